"""How leases are kept: one thread per process that knows when each is to be extended or is lost.

It never talks to a store itself. Each backend has a worker for that, so a store that hangs neither
hides a deadline nor delays the leases of another.
"""

from __future__ import annotations

import atexit
import heapq
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from . import facts, logs
from .backends.base import BaseBackend, losses
from .clock import lease_now
from .handler import locks
from .history.journal import journal
from .releases import FLUSH_WITHIN, Releases
from .threads import ThreadPerBackend
from .waiting import renewal_due, renewal_retry

if TYPE_CHECKING:
    from .renewable import Renewable

logger = logging.getLogger("distlocks")

# Seconds: how finely moments are told apart.
TICK = 0.05
# Seconds: without leases, how long the threads wait for the next one before they end.
LINGER = 5.0
IDLE_AFTER = 60.0
# For tests: how long extensions and releases under way are waited for.
JOIN_WITHIN = 30.0


class Renewer:
    """Keeps the leases of this process, of all backends."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        # Held while what is due is taken and handed to the workers: between the two it is neither
        # due nor under way.
        self._acting = threading.Lock()
        self._mutex = threading.Lock()
        self._condition = threading.Condition(self._mutex)
        self._thread: threading.Thread | None = None
        # Leases by the tick in which something is to be done with them, and those ticks.
        self._ticks: dict[int, dict[str, Renewable]] = {}
        self._order: list[int] = []
        self._tick_of: dict[str, int] = {}
        # When the thread is going to look next.
        self._planned = math.inf
        self._workers = ThreadPerBackend("distlocks-worker")
        self.releases = Releases(self._workers, self._look_by)

    # What leases call

    def add(self, lease: Renewable) -> None:
        """Keep `lease` until it is discarded or lost."""
        due = renewal_due(lease_now(), lease.ttl, lease.deadline)
        self._schedule(lease, due if lease.renewing else lease.deadline)

    def discard(self, lease: Renewable) -> None:
        """Forget `lease`."""
        with self._mutex:
            self._unschedule(lease.owner_id)

    def lost(self, owner_id: str, reason: str) -> None:
        """The store has ended this owner's lease, if it is one that is kept."""
        with self._mutex:
            tick = self._tick_of.get(owner_id)
            lease = None if tick is None else self._ticks[tick].get(owner_id)
        if lease is not None:
            lease.lose(reason)

    # The schedule

    def _schedule(self, lease: Renewable, at: float) -> None:
        tick = math.ceil(at / TICK)
        with self._mutex:
            self._unschedule(lease.owner_id)
            if lease.over:
                return
            leases = self._ticks.get(tick)
            if leases is None:
                leases = self._ticks[tick] = {}
                heapq.heappush(self._order, tick)
            leases[lease.owner_id] = lease
            self._tick_of[lease.owner_id] = tick
            self._wake_before(tick * TICK)

    def _look_by(self, at: float) -> None:
        with self._condition:
            self._wake_before(at)

    def _wake_before(self, at: float) -> None:
        """Make sure that the thread looks again at `at`, at the latest. Under the condition."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="distlocks-renewer", daemon=True)
            # If it cannot be started, the next lease tries again.
            thread.start()
            self._thread = thread
        elif at < self._planned:
            self._condition.notify_all()

    def _unschedule(self, owner_id: str) -> None:
        tick = self._tick_of.pop(owner_id, None)
        if tick is not None:
            leases = self._ticks[tick]
            del leases[owner_id]
            if not leases:
                # The tick stays in the order until its time: it costs one empty look.
                del self._ticks[tick]

    def _run(self) -> None:
        idle_since = lease_now()
        while True:
            try:
                with self._acting:
                    busy = self._do_what_is_due()
            except Exception:
                # Without this thread no lease of the process would be kept any more.
                with suppress(Exception):
                    logger.exception("The renewal of locks has failed once; it goes on")
                continue
            if busy:
                continue
            with self._condition:
                now = lease_now()
                again = self.releases.next_due()
                if self._ticks or again < math.inf:
                    idle_since = now
                elif now - idle_since > IDLE_AFTER:
                    self._thread = None
                    return
                self._planned = min(self._order[0] * TICK if self._order else now + LINGER, again)
                self._condition.wait(max(self._planned - now, 0.0))
                self._planned = -math.inf

    def _do_what_is_due(self) -> bool:
        """Hand it to the workers; whether there was any."""
        now = lease_now()
        with self._condition:
            due = self._take_due(now)
        retries = self.releases.take_due(now)
        for lease in retries:
            self.releases.put(lease)
        self._act(due, now)
        return bool(due or retries)

    def _take_due(self, now: float) -> list[Renewable]:
        due: list[Renewable] = []
        while self._order and self._order[0] * TICK <= now:
            tick = heapq.heappop(self._order)
            for owner_id, lease in self._ticks.pop(tick, {}).items():
                del self._tick_of[owner_id]
                due.append(lease)
        return due

    def _act(self, due: Iterable[Renewable], now: float) -> None:
        """Tell the lost from those to be extended; hand the latter to the workers."""
        batches: dict[BaseBackend, list[Renewable]] = {}
        for lease in due:
            if lease.over:
                continue
            if now >= lease.deadline:
                lease.lose("it was not extended before its deadline")
            else:
                # While the extension is under way, the deadline is watched.
                self._schedule(lease, lease.deadline)
                if lease.renewing:
                    batches.setdefault(lease.backend, []).append(lease)
        for backend, leases in batches.items():
            self._workers.of(backend).put(lambda leases=leases: self._extend(leases))  # type: ignore[misc]

    def forget(self, backend: BaseBackend) -> None:
        """End the worker of a backend that is done with, after what it has to do."""
        self._workers.forget(backend)

    # What a worker does

    def _extend(self, leases: list[Renewable]) -> None:
        leases = [lease for lease in leases if not lease.over]
        if not leases:
            return
        backend = leases[0].backend
        wanted = {lease.owner_id: lease.next_extension() for lease in leases}
        first_send = lease_now()
        try:
            answer = backend.extend([extension for extension, _ in wanted.values()])
        except BaseException as error:
            logs.event(
                logging.WARNING,
                "renewal_failed",
                backend.alias,
                [key for lease in leases for key in getattr(lease, "keys", ())],
                "%d lock(s) of %r could not be extended, it is tried again until their "
                "deadlines: %s",
                len(leases),
                backend.alias,
                error,
                count=len(leases),
                error=str(error),
            )
            for lease in leases:
                self._retry(lease)
            journal.note(facts.ERROR, backend, (), reason=f"{len(leases)} not extended: {error}")
            return
        for lease in leases:
            if lease.owner_id in answer.lost:
                lease.lose("the store has it no more: it expired, was taken over or force-released")
            elif why := answer.ending.get(lease.owner_id):
                # It stays in the schedule, until its deadline.
                lease.run_out(why)
            elif lease.owner_id not in answer.extended:
                self._retry(lease)
            elif lease.extended(first_send, wanted[lease.owner_id][1]):
                self.add(lease)
            else:
                lease.lose("the answer to its extension came after its deadline")

    def _retry(self, lease: Renewable) -> None:
        now = lease_now()
        if now < lease.deadline:
            self._schedule(lease, renewal_retry(now, lease.ttl, lease.deadline))

    # For those who look on

    def leases(self) -> list[Renewable]:
        """All that are kept at the moment."""
        with self._condition:
            return [lease for leases in self._ticks.values() for lease in leases.values()]

    def next_due(self) -> float:
        """When something is to be done next, on the lease clock."""
        with self._condition:
            return min(min(self._ticks, default=math.inf) * TICK, self.releases.next_due())

    def run_due(self, go_to: Callable[[float], bool] | None = None) -> None:
        """Do now, in this thread, what is due.

        Then, with `go_to`, what is due next, and so on: it sets the lease clock to that moment, or
        says that this is too late.
        """
        while True:
            # No other thread does a part of it meanwhile, while the clock goes on.
            with self._acting:
                self._do_what_is_due()
                self.join_workers()
                if go_to is None or not go_to(self.next_due()):
                    return

    def join_workers(self) -> None:
        """Wait for the extensions and releases under way."""
        self._workers.join(JOIN_WITHIN)


renewer = Renewer()
locks._when_closed.append(renewer.forget)
losses.append(renewer.lost)


def _finish_at_exit() -> None:
    """Releases whose transaction has ended should not have to wait for their lease to end."""
    # The workers go on meanwhile; it is too late for new threads.
    renewer.releases.wait(FLUSH_WITHIN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renewer._reset)
atexit.register(_finish_at_exit)
