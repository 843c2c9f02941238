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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from . import facts, logs
from .backends.base import BaseBackend, losses
from .claims import Request
from .clock import lease_now
from .exceptions import DistlocksError
from .handler import locks
from .history.journal import journal
from .renewable import Abandoned
from .threads import JobThreads
from .waiting import renewal_due, renewal_retry

if TYPE_CHECKING:
    from .renewable import Releasable, Renewable

logger = logging.getLogger("distlocks")

# Seconds: how finely moments are told apart.
TICK = 0.05
# Seconds: without leases, how long the threads wait for the next one before they end.
LINGER = 5.0
IDLE_AFTER = 60.0
# Seconds: how long an acquire waits for releases of this process that are under way, and the
# interpreter's exit for those that are due.
FLUSH_WITHIN = 1.0
# Seconds: several times the longest wait for a row in a server.
SECOND_LOOK_AFTER = 1.0
# For tests: how long extensions and releases under way are waited for.
JOIN_WITHIN = 30.0


class Renewer:
    """Keeps the leases of this process, of all backends."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._condition = threading.Condition(self._mutex)
        self._thread: threading.Thread | None = None
        # Leases by the tick in which something is to be done with them, and those ticks.
        self._ticks: dict[int, dict[str, Renewable]] = {}
        self._order: list[int] = []
        self._tick_of: dict[str, int] = {}
        # When the thread is going to look next.
        self._planned = math.inf
        self._workers: dict[BaseBackend, JobThreads] = {}
        # Leases whose transaction has ended, to be released.
        self._due_releases: dict[str, Releasable] = {}
        # Releases that failed, by when to try again.
        self._retries: list[tuple[float, str, Releasable]] = []
        self._releasing = 0
        # Owner ids whose release has failed, and somebody has been told.
        self._failing: set[str] = set()

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

    def release_soon(self, lease: Releasable, *, told: bool = False) -> None:
        """Release `lease` from another thread, at once. Neither blocks nor raises. `told`: that it
        has failed before is in the log."""
        if told:
            self._failing.add(lease.owner_id)
        # Called from finalisers, which may run inside our own critical section: no lock here.
        self._due_releases[lease.owner_id] = lease
        self._worker(lease.backend).put(self.flush_releases)

    def abandon_soon(self, backend: BaseBackend, request: Request, until: float) -> None:
        """Free what `request` may have been granted, from another thread, trying until `until`."""
        self._due_releases[request.owner_id] = Abandoned(backend, request, until)
        self._worker(backend).put(self.flush_releases)

    def flush_releases(self, give_up: float = math.inf) -> None:
        """Carry out what release_soon() was asked for; begin none after `give_up`."""
        while self._due_releases and lease_now() < give_up:
            with self._condition:
                self._releasing += 1
            try:
                try:
                    _, lease = self._due_releases.popitem()
                except KeyError:
                    break
                self._release(lease)
            finally:
                with self._condition:
                    self._releasing -= 1
                    self._condition.notify_all()

    @property
    def has_releases(self) -> bool:
        """Whether a release of this process is due or under way."""
        return bool(self._due_releases or self._releasing)

    def settle_releases(self) -> None:
        """Return once the releases that were due by now have been carried out.

        So that a thread whose transaction has just ended finds free what it held in it.
        """
        # Others carry out the rest, while a store does not answer.
        self.flush_releases(lease_now() + FLUSH_WITHIN)
        with self._condition:
            self._condition.wait_for(lambda: not self._releasing, FLUSH_WITHIN)

    def await_releases(self, timeout: float) -> None:
        """Return once other threads have carried out all releases, or after `timeout` seconds."""
        with self._condition:
            self._condition.wait_for(lambda: not self.has_releases, timeout)

    def _release(self, lease: Releasable) -> None:
        try:
            lease.give_back()
            if isinstance(lease, Abandoned) and lease.looks > 1:
                again = replace(lease, looks=lease.looks - 1)
                self._later(again, lease_now() + SECOND_LOOK_AFTER)
            self._failing.discard(lease.owner_id)
        except DistlocksError as error:
            now = lease_now()
            if now >= lease.deadline:
                self._failing.discard(lease.owner_id)
                return
            # Of a request that may well never have been granted, its asker has been told.
            if not isinstance(lease, Abandoned) and lease.owner_id not in self._failing:
                self._failing.add(lease.owner_id)
                _log(
                    logging.WARNING,
                    lease,
                    "A lock could not be released yet, it is tried again until its lease ends: %s",
                    error,
                )
            self._later(lease, renewal_retry(now, lease.ttl, lease.deadline))
        except BaseException as error:
            self._failing.discard(lease.owner_id)
            _log(
                logging.ERROR,
                lease,
                "A lock could not be released; it ends with its lease: %s",
                error,
                exc_info=error,
            )

    def _later(self, lease: Releasable, at: float) -> None:
        with self._condition:
            heapq.heappush(self._retries, (at, lease.owner_id, lease))
            self._wake_before(at)

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
            with self._condition:
                now = lease_now()
                due, retries = self._take_due(now), self._take_retries(now)
                if not (due or retries):
                    if self._ticks or self._retries:
                        idle_since = now
                    elif now - idle_since > IDLE_AFTER:
                        self._thread = None
                        return
                    self._planned = min(
                        self._order[0] * TICK if self._order else now + LINGER,
                        self._retries[0][0] if self._retries else math.inf,
                    )
                    self._condition.wait(max(self._planned - now, 0.0))
                    self._planned = -math.inf
                    continue
            try:
                for lease in retries:
                    self.release_soon(lease)
                self._act(due, now)
            except Exception:
                # Without this thread no lease of the process would be kept any more.
                with suppress(Exception):
                    logger.exception("The renewal of locks has failed once; it goes on")

    def _take_retries(self, now: float) -> list[Releasable]:
        due = []
        while self._retries and self._retries[0][0] <= now:
            due.append(heapq.heappop(self._retries)[2])
        return due

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
            self._worker(backend).put(lambda leases=leases: self._extend(leases))  # type: ignore[misc]

    def _worker(self, backend: BaseBackend) -> JobThreads:
        worker = self._workers.get(backend)
        if worker is None:
            worker = self._workers.setdefault(
                backend, JobThreads(f"distlocks-worker-{backend.alias}")
            )
        return worker

    def forget(self, backend: BaseBackend) -> None:
        """End the worker of a backend that is done with, after what it has to do."""
        worker = self._workers.pop(backend, None)
        if worker is not None:
            worker.close(wait=False)

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
            retry = self._retries[0][0] if self._retries else math.inf
            return min(min(self._ticks, default=math.inf) * TICK, retry)

    def run_due(self) -> None:
        """Do now, in this thread, what is due."""
        with self._condition:
            now = lease_now()
            due, retries = self._take_due(now), self._take_retries(now)
        for lease in retries:
            self.release_soon(lease)
        self._act(due, now)
        self.join_workers()

    def join_workers(self) -> None:
        """Wait for the extensions and releases under way."""
        for worker in list(self._workers.values()):
            worker.join(JOIN_WITHIN)


def _log(
    level: int,
    lease: Releasable,
    message: str,
    error: BaseException,
    *,
    exc_info: BaseException | None = None,
) -> None:
    """That a release has failed."""
    logs.event(
        level,
        "release_failed",
        lease.backend.alias,
        getattr(lease, "keys", ()),
        message,
        error,
        exc_info=exc_info,
        owner_id=lease.owner_id,
        error=str(error),
    )


renewer = Renewer()
locks._when_closed.append(renewer.forget)
losses.append(renewer.lost)


def _finish_at_exit() -> None:
    """Releases whose transaction has ended should not have to wait for their lease to end."""
    # The workers go on meanwhile; it is too late for new threads.
    renewer.await_releases(FLUSH_WITHIN)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renewer._reset)
atexit.register(_finish_at_exit)
