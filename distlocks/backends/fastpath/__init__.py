"""Redis grants while it is healthy, the database takes over when it is not."""

from .backend import FastPathBackend

__all__ = ["FastPathBackend"]
