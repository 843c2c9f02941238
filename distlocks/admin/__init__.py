"""Admin pages: importing the modules that have them registers them."""

from . import authority, dashboard, history, locks

__all__ = ["authority", "dashboard", "history", "locks"]
