"""What time it is for a lease, and how to wait for a moment on that clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    import threading

# A suspended machine must find its leases expired when it wakes: CLOCK_MONOTONIC stops in
# suspend, CLOCK_BOOTTIME does not.
_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", None)


class Clock:
    """The process's lease clock, and the wall clock of stores that live in this process."""

    # Does a wait at a store, which has a clock of its own, take as long on this one?
    is_real = True

    def now(self) -> float:
        """Seconds on the lease clock: never set back, goes on while the machine is suspended."""
        if _CLOCK_ID is None:
            return time.monotonic()
        return time.clock_gettime(_CLOCK_ID)

    def wall_us(self) -> int:
        """Microseconds since the epoch."""
        return time.time_ns() // 1000

    def wait(self, event: threading.Event, until: float) -> bool:
        """Block until `event` is set or the lease clock shows `until`; whether it is set."""
        return event.wait(max(until - self.now(), 0.0))

    async def wait_async(self, future: asyncio.Future[None], until: float) -> bool:
        """See wait(): the same for a future on the running event loop."""
        import asyncio

        done, _ = await asyncio.wait((future,), timeout=max(until - self.now(), 0.0))
        return bool(done)


_current = Clock()
_now = _current.now


def current() -> Clock:
    """The clock in force: the real one, or the one that `distlocks.testing` has put in place."""
    return _current


def replace(clock: Clock) -> Clock:
    """Put `clock` in force and return the one before it. For tests."""
    global _current, _now
    previous, _current = _current, clock
    _now = clock.now
    return previous


def lease_now() -> float:
    """Seconds on the lease clock."""
    return _now()
