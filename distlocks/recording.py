"""What happened, told to whoever asked: never on the path of an acquire or a release."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from django.dispatch import Signal

from . import facts, logs
from .backends.base import listeners
from .handler import locks
from .history.journal import journal
from .history.waits import waits
from .keys import key_of
from .signals import authority_changed, cycle_found
from .threads import JobThreads


class Recorder:
    """Calls signal handlers and on_lost callbacks in a thread of its own, one after the other.

    So they stall neither the renewer nor the work; and what they raise is logged.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        # Handlers may use the database: keep no connection open that nobody needs.
        self._thread = JobThreads("distlocks-events", when_idle=_close_connections)

    def send(self, signal: Signal, sender: type, **arguments: Any) -> None:
        """Send `signal`, if anybody listens."""
        if signal.receivers:
            self.call(lambda: _send(signal, sender, arguments))

    def call(self, event: Callable[[], object]) -> None:
        """Call `event` from the recorder's thread."""
        self._thread.put(event)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything that has happened so far has been told; whether it was in time."""
        return self._thread.join(timeout)


def _send(signal: Signal, sender: type, arguments: dict[str, Any]) -> None:
    for receiver, answer in signal.send_robust(sender, **arguments):
        if isinstance(answer, Exception):
            logs.event(
                logging.ERROR,
                "handler_failed",
                arguments.get("alias", ""),
                arguments.get("keys", ()),
                "The handler %r of a distlocks signal failed",
                receiver,
                exc_info=answer,
                handler=repr(receiver),
            )


def _close_connections() -> None:
    from django.db import connections

    connections.close_all()


def _note_authority(signal: Signal, sender: type, **told: Any) -> None:
    if signal is authority_changed and told["made_here"]:
        journal.note(
            facts.AUTHORITY,
            locks[told["alias"]],
            (),
            reason=f"{told['authority']}, epoch {told['epoch']}: {told['reason']}",
        )


recorder = Recorder()
listeners += [recorder.send, _note_authority]
waits.when_circle.append(
    lambda backend, waiters: recorder.send(
        cycle_found,
        type(backend),
        alias=backend.alias,
        keys=tuple([key_of(waiter.key) for waiter in waiters]),
        waiters=waiters,
    )
)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=recorder._reset)
