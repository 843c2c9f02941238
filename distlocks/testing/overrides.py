"""Other backends for the time of a test."""

from __future__ import annotations

from typing import Any

from django.test.utils import override_settings

from .. import conf
from ..history.journal import journal
from ..recording import recorder

MEMORY_BACKEND = "distlocks.backends.memory.MemoryBackend"


class memory_locks(override_settings):
    """Keep the locks of every alias in memory: for a block, a test, or a TestCase class.

        @memory_locks()
        class InvoiceTests(TestCase): ...

    Each alias keeps its TTL, TIMEOUT and prefix, and starts empty. `aliases` adds some that the
    settings lack.
    """

    def __init__(self, *aliases: str) -> None:
        super().__init__()
        self.options: dict[str, Any] = {}
        self._aliases = aliases

    def enable(self) -> None:
        # Read now, not when decorating: settings may be overridden around us.
        self.options = {"DISTLOCKS": self._in_memory()}
        super().enable()

    def save_options(self, test_func: Any) -> None:
        # Decorating a class, whose test runner applies what is saved here.
        self.options = {"DISTLOCKS": self._in_memory()}
        super().save_options(test_func)

    def _in_memory(self) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {alias: {} for alias in self._aliases}
        for alias, entry in conf.aliases().items():
            kept = dict(entry) if isinstance(entry, dict) else {}
            kept.pop("OPTIONS", None)
            entries[alias] = kept
        return {alias: {**entry, "BACKEND": MEMORY_BACKEND} for alias, entry in entries.items()}


def flush_events(timeout: float = 10.0) -> None:
    """Return once signal handlers and on_lost callbacks have run for all that has happened."""
    if not recorder.flush(timeout):
        raise TimeoutError(f"Handlers of distlocks' signals did not finish within {timeout:g} s.")


def flush_history() -> None:
    """Write to the history of locks, over this thread's connections, all that has happened.

    Under a test runner nothing else does: no thread writes beside a test.
    """
    if not journal.flush():
        raise RuntimeError("The history of locks could not be written: see the log.")


def forget_history() -> None:
    """Drop what has happened and has not been written: for the start of a test that looks at it."""
    journal.forget()
