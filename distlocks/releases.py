"""How leases are given back that nobody waits for: after a commit, by finalisers, or in doubt."""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from . import logs
from .backends.base import BaseBackend
from .claims import Request
from .clock import lease_now
from .exceptions import DistlocksError
from .renewable import Abandoned
from .threads import ThreadPerBackend
from .waiting import renewal_retry

if TYPE_CHECKING:
    from .renewable import Releasable

# Seconds: how long an acquire waits for releases of this process that are under way, and the
# interpreter's exit for those that are due.
FLUSH_WITHIN = 1.0
# Seconds: several times the longest wait for a row in a server.
SECOND_LOOK_AFTER = 1.0


class Releases:
    """The releases of this process that are due, under way, and to be tried again.

    The backends' workers carry them out. Who holds the clock takes what is to be tried again;
    `look_by(at)` is called when that is sooner than it may know.
    """

    def __init__(self, workers: ThreadPerBackend, look_by: Callable[[float], None]) -> None:
        self._workers = workers
        self._look_by = look_by
        self._condition = threading.Condition(threading.Lock())
        self._due: dict[str, Releasable] = {}
        self._under_way = 0
        # Those that failed, by when to try again.
        self._again: list[tuple[float, str, Releasable]] = []
        # Owner ids whose release has failed, and somebody has been told.
        self._failing: set[str] = set()

    def put(self, lease: Releasable, *, told: bool = False) -> None:
        """Release `lease` from another thread, at once. Neither blocks nor raises. `told`: that it
        has failed before is in the log."""
        if told:
            self._failing.add(lease.owner_id)
        # Called from finalisers, which may run inside our own critical section: no lock here.
        self._due[lease.owner_id] = lease
        self._workers.of(lease.backend).put(self.flush)

    def abandon(self, backend: BaseBackend, request: Request, until: float) -> None:
        """Free what `request` may have been granted, from another thread, trying until `until`."""
        self.put(Abandoned(backend, request, until))

    @property
    def pending(self) -> bool:
        """Whether one is due or under way."""
        return bool(self._due or self._under_way)

    def flush(self, give_up: float = math.inf) -> None:
        """Carry out those that are due; begin none after `give_up`."""
        while self._due and lease_now() < give_up:
            with self._condition:
                self._under_way += 1
            try:
                try:
                    _, lease = self._due.popitem()
                except KeyError:
                    break
                self._release(lease)
            finally:
                with self._condition:
                    self._under_way -= 1
                    self._condition.notify_all()

    def settle(self) -> None:
        """Return once those that were due by now have been carried out.

        So that a thread whose transaction has just ended finds free what it held in it.
        """
        # Others carry out the rest, while a store does not answer.
        self.flush(lease_now() + FLUSH_WITHIN)
        with self._condition:
            self._condition.wait_for(lambda: not self._under_way, FLUSH_WITHIN)

    def wait(self, timeout: float) -> None:
        """Return once other threads have carried out all, or after `timeout` seconds."""
        with self._condition:
            self._condition.wait_for(lambda: not self.pending, timeout)

    def _release(self, lease: Releasable) -> None:
        try:
            lease.give_back()
            if isinstance(lease, Abandoned) and lease.looks > 1:
                again = replace(lease, looks=lease.looks - 1)
                self._try_again(again, lease_now() + SECOND_LOOK_AFTER)
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
            self._try_again(lease, renewal_retry(now, lease.ttl, lease.deadline))
        except BaseException as error:
            self._failing.discard(lease.owner_id)
            _log(
                logging.ERROR,
                lease,
                "A lock could not be released; it ends with its lease: %s",
                error,
                exc_info=error,
            )

    # Those that are to be tried again

    def _try_again(self, lease: Releasable, at: float) -> None:
        with self._condition:
            heapq.heappush(self._again, (at, lease.owner_id, lease))
        self._look_by(at)

    def next_due(self) -> float:
        """When one is to be tried again, on the lease clock; infinite if none is."""
        with self._condition:
            return self._again[0][0] if self._again else math.inf

    def take_due(self, now: float) -> list[Releasable]:
        """Those to be tried again now, which the caller is to put()."""
        due = []
        with self._condition:
            while self._again and self._again[0][0] <= now:
                due.append(heapq.heappop(self._again)[2])
        return due

    def to_come(self) -> list[Releasable]:
        """Those that have failed and are to be tried again."""
        with self._condition:
            return [lease for _, _, lease in self._again]

    def give_up(self) -> None:
        """Try none again that has failed: each ends with its lease."""
        with self._condition:
            self._again.clear()


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
