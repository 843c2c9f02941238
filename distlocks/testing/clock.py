"""A lease clock that is moved by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .. import clock
from ..renewal import renewer
from .overrides import flush_events


class FakeClock(clock.Clock):
    """Stands still, except when it is advanced, or when somebody waits.

    It governs deadlines, renewals and the memory backend's expiry. Other backends expire by the
    clock of their server, which no test can move. A wait moves it to the wait's end at once,
    unless `auto_advance` is False: then a wait lasts until another thread advances the clock.
    """

    is_real = False

    def __init__(self, *, auto_advance: bool = True) -> None:
        self._changed = threading.Condition()
        # What the real clocks show, so that leases from before go on making sense.
        real = clock.Clock()
        self._now = real.now()
        self._wall_us = real.wall_us()
        self.auto_advance = auto_advance

    def now(self) -> float:
        return self._now

    def wall_us(self) -> int:
        return self._wall_us

    def advance(self, seconds: float) -> None:
        """Move the clock on by `seconds`, doing on the way what falls due, in its order.

        Renewals that fall due take place, leases that are not renewed are lost, and on_lost
        callbacks and signal handlers have run when this returns.
        """
        if seconds < 0:
            raise ValueError(f"A clock cannot be set back ({seconds:g} s).")
        target = self._now + seconds

        def go_to(due: float) -> bool:
            self._set(min(due, target))
            return due <= target

        renewer.run_due(go_to)
        flush_events()

    def _set(self, now: float) -> None:
        with self._changed:
            # Several threads may advance it at once.
            now = max(now, self._now)
            self._wall_us += round((now - self._now) * 1_000_000)
            self._now = now
            self._changed.notify_all()

    def wait(self, event: threading.Event, until: float) -> bool:
        # Somebody in another thread may be about to set it: give that a moment of real time.
        if event.wait(0.001):
            return True
        if self.auto_advance:
            self.advance(max(until - self._now, 0.0))
            return event.is_set()
        while not event.is_set() and self._now < until:
            with self._changed:
                self._changed.wait(0.01)
        return event.is_set()

    async def wait_async(self, future: asyncio.Future[None], until: float) -> bool:
        # Other tasks may be about to resolve it: let them run first.
        for _ in range(10):
            await asyncio.sleep(0)
        if not future.done() and self.auto_advance:
            self.advance(max(until - self._now, 0.0))
        # Nothing on this loop tells when another thread advances the clock.
        while not future.done() and self._now < until:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return future.done()


@contextmanager
def fake_clock(*, auto_advance: bool = True) -> Iterator[FakeClock]:
    """Put a FakeClock in force for the block."""
    fake = FakeClock(auto_advance=auto_advance)
    previous = clock.replace(fake)
    try:
        yield fake
    finally:
        clock.replace(previous)
