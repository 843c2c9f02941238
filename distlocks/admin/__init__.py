"""Admin pages: importing the modules that have them registers them."""

from . import authority, locks

__all__ = ["authority", "locks"]
