"""Locks in a table of any database that Django speaks."""

from .backend import DatabaseBackend

__all__ = ["DatabaseBackend"]
