"""Locks in Redis or Valkey: one server, Sentinel or Cluster."""

from .backend import RedisBackend

__all__ = ["RedisBackend"]
