"""How those who wait for a key learn that trying again makes sense."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from ... import clock
from ...claims import Denial
from ...waiting import poll_delay
from ..offload import offload
from ..wakeups import Ticket, Wakeups
from .pool import Pool
from .rows import Rows

# Seconds between two looks at a key by who has no session to wait in, at the longest; and what
# each who does the same adds to it.
POLL_CAP = 0.25
POLL_CAP_EACH = 0.005
# What waiters with a session sleep by, before their owner id: no key begins so.
TURN_OF = "\x01"


class Waiters:
    """Who sleeps in this process, and what wakes them.

    Who stands in the server's queue, by a session, sleeps until the server has answered. Others
    look at the key now and then, and one of them is woken at once by a release in this process.
    """

    def __init__(self, pool: Pool, rows: Rows) -> None:
        self._pool = pool
        self._rows = rows
        self._wakeups = Wakeups()

    def wake(self, keys: Sequence[str]) -> None:
        """The keys have been freed."""
        # One can have it. If that is not who is woken, the others look before long.
        for key in keys:
            self._wakeups.wake_one(key)

    def wake_owner(self, owner_id: str) -> None:
        """The server has answered who stands in its queue."""
        self._wakeups.wake(TURN_OF + owner_id)

    def sleep(self, denial: Denial, until: float, attempt: int) -> None:
        """Block until trying again makes sense, at the latest until `until` on the lease clock."""
        queued = self._is_queued(denial)
        with self._ticket(denial, queued) as ticket:
            if self._is_over(denial, queued):
                return
            if queued:
                ticket.wait(until)
                return
            while not ticket.wait(min(until, self._next_look(attempt))):
                attempt += 1
                if clock.lease_now() >= until or self._is_over(denial, queued):
                    return

    async def asleep(self, denial: Denial, until: float, attempt: int) -> None:
        """See sleep()."""
        queued = self._is_queued(denial)
        with self._ticket(denial, queued) as ticket:
            if await offload(lambda: self._is_over(denial, queued)):
                return
            if queued:
                await ticket.wait_async(until)
                return
            while not await ticket.wait_async(min(until, self._next_look(attempt))):
                attempt += 1
                if clock.lease_now() >= until:
                    return
                if not await offload(lambda: self._rows.is_taken(denial.key)):
                    return

    def _ticket(self, denial: Denial, queued: bool) -> AbstractContextManager[Ticket]:
        return self._wakeups.ticket(TURN_OF + denial.queued if queued else denial.key)

    def _is_queued(self, denial: Denial) -> bool:
        return bool(denial.queued) and self._pool.hold_of(denial.queued) is not None

    def _is_over(self, denial: Denial, queued: bool) -> bool:
        """Whether trying again makes sense at once. Where there is a session, have the asker woken
        when it does later on."""
        if not queued:
            return self._pool.has_room and not self._rows.is_taken(denial.key)
        hold = self._pool.hold_of(denial.queued)
        if hold is None:
            return True
        with hold.mutex:
            if hold.waits_for is None:
                return True
            self._pool.expect(hold)
            return hold.session.has_answer()

    def _next_look(self, attempt: int) -> float:
        # Each who looks keeps the server busy: many look less often.
        cap = POLL_CAP + POLL_CAP_EACH * self._wakeups.count
        return clock.lease_now() + poll_delay(attempt, cap=cap)
