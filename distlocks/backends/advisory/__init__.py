"""Locks that PostgreSQL itself keeps, for a session or a transaction: advisory locks."""

from .backend import AdvisoryBackend

__all__ = ["AdvisoryBackend"]
