"""Locks by a majority of independent Redis servers."""

from .backend import RedlockBackend

__all__ = ["RedlockBackend"]
