"""Who in this process sleeps beside which key, and how to wake them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .. import clock


class Ticket:
    """One sleeper's place: a wake-up is kept for it from the moment it is registered."""

    __slots__ = ("_event", "_future", "_loop", "_mutex")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._mutex = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        with self._mutex:
            self._event.set()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._resolve)

    @property
    def woken(self) -> bool:
        return self._event.is_set()

    def wait(self, until: float) -> bool:
        """Block until woken or until the lease clock shows `until`; whether woken."""
        return clock.current().wait(self._event, until)

    async def wait_async(self, until: float) -> bool:
        """See wait(): on the event loop, without holding a thread."""
        with self._mutex:
            if self._event.is_set():
                return True
            self._loop = asyncio.get_running_loop()
            self._future = self._loop.create_future()
        return await clock.current().wait_async(self._future, until)

    def _resolve(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Wakeups:
    """The sleepers of one store in this process, by key."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._tickets: dict[str, set[Ticket]] = {}

    def __bool__(self) -> bool:
        return bool(self._tickets)

    @property
    def count(self) -> int:
        """How many sleep, about."""
        return sum(map(len, list(self._tickets.values())))

    @contextmanager
    def ticket(self, key: str) -> Iterator[Ticket]:
        """A place beside `key`, kept while the block runs.

        What is announced between the registration and the sleep is not missed: check the store
        inside the block, then sleep.
        """
        ticket = Ticket()
        with self._mutex:
            self._tickets.setdefault(key, set()).add(ticket)
        try:
            yield ticket
        finally:
            with self._mutex:
                sleepers = self._tickets[key]
                sleepers.discard(ticket)
                if not sleepers:
                    del self._tickets[key]

    def wake(self, key: str) -> None:
        """Wake everybody who sleeps beside `key`."""
        if key in self._tickets:
            with self._mutex:
                woken = list(self._tickets.get(key, ()))
            for ticket in woken:
                ticket.wake()

    def wake_one(self, key: str) -> None:
        """Wake one of those who sleep beside `key` and have not been woken."""
        if key in self._tickets:
            with self._mutex:
                tickets = self._tickets.get(key, ())
                ticket = next((one for one in tickets if not one.woken), None)
            if ticket is not None:
                ticket.wake()

    def wake_first(self) -> None:
        """Wake one who sleeps, of those who came first."""
        with self._mutex:
            for tickets in self._tickets.values():
                for ticket in tickets:
                    ticket.wake()
                    return

    def wake_all(self) -> None:
        """Wake everybody: what was announced may have been missed."""
        with self._mutex:
            woken = [ticket for tickets in self._tickets.values() for ticket in tickets]
        for ticket in woken:
            ticket.wake()
