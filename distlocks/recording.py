"""What happened, told to whoever asked: never on the path of an acquire or a release."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from django.dispatch import Signal

logger = logging.getLogger("distlocks")

Event = Callable[[], object]


class Recorder:
    """A thread that calls signal handlers and on_lost callbacks, one after the other.

    So they stall neither the renewer nor the work; and what they raise is logged.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, signal: Signal, sender: type, **arguments: Any) -> None:
        """Send `signal`, if anybody listens."""
        if signal.receivers:
            self.call(lambda: _send(signal, sender, arguments))

    def call(self, event: Event) -> None:
        """Call `event` from the recorder's thread."""
        self._events.put(event)
        if self._thread is None:
            with self._mutex:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="distlocks-events", daemon=True
                    )
                    self._thread.start()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything that has happened so far has been told; whether it was in time."""
        if self._thread is None:
            return True
        done = threading.Event()
        self.call(done.set)
        return done.wait(timeout)

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=1.0)
            except queue.Empty:
                # Handlers may have used the database: keep no connection open that nobody needs.
                _close_connections()
                event = self._events.get()
            try:
                event()
            except Exception:
                logger.exception("A callback of distlocks failed")


def _send(signal: Signal, sender: type, arguments: dict[str, Any]) -> None:
    for receiver, answer in signal.send_robust(sender, **arguments):
        if isinstance(answer, Exception):
            logger.error("The handler %r of a distlocks signal failed", receiver, exc_info=answer)


def _close_connections() -> None:
    from django.db import connections

    connections.close_all()


recorder = Recorder()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=recorder._reset)
