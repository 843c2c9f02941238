"""Who of this process waits, told to the others; and whether they wait for each other."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from django.db import connections

from .. import facts, logs
from ..claims import MICROSECOND, PERMIT, Denial, Request, to_us
from ..clock import lease_now
from ..exceptions import DistlocksError
from ..facts import Who
from ..keys import key_of
from . import tables
from .cycles import circles
from .journal import journal, names_of

if TYPE_CHECKING:
    from ..backends.base import BaseBackend
    from ..keys import Key
    from ..models import LockWaiter

logger = logging.getLogger("distlocks")

# Seconds of waiting after which others are told, between two times of telling, and after which who
# is not heard of any more counts as gone.
TELL_AFTER = 1.0
TELL_EVERY = 2.0
TOLD_FOR = 10.0
# Seconds until a database that failed is tried again.
RETRY = 10.0
# Waiters that are told of, and that are looked at, at a time.
MAX_TOLD = 1_000
# Of those that hold something, so many have it looked up who is in their way now.
MAX_ASKED = 20


class Held(Protocol):
    """What has to be known of a lease that a waiter has meanwhile."""

    @property
    def backend(self) -> BaseBackend: ...
    @property
    def owner_id(self) -> str: ...
    @property
    def keys(self) -> tuple[Key, ...]: ...
    @property
    def unit(self) -> int: ...


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Waiting:
    """An acquire that waits."""

    backend: BaseBackend
    # How it wants its keys.
    mode: str
    # The thread or task: see identity.unit().
    unit: int
    # On the lease clock; seconds since the epoch; and those until which it waits, None for ever.
    started: float
    since: float
    gives_up: float | None
    # The last answer that it got, and to what.
    denial: Denial | None = None
    request: Request | None = None
    # As whom others were told of it.
    told_as: str = ""


class Waits:
    """The acquires of this process that wait."""

    def __init__(self) -> None:
        # Where to find the leases of this process.
        self.sources: list[Callable[[], Iterable[Held]]] = [
            lambda: list(self.in_transactions.values())
        ]
        # Called with the alias of a backend, and those who wait for each other, once for each
        # circle, in one of its processes.
        self.when_circle: list[Callable[[BaseBackend, list[LockWaiter]], object]] = []
        self._reset()

    def _reset(self) -> None:
        self._current: set[Waiting] = set()
        # By database: who others are to forget.
        self._gone: dict[str, set[str]] = {}
        self._tell_at: dict[str, float] = {}
        # Circles that were there at the last look, and those that have been told of.
        # By database.
        self._seen: dict[str, set[tuple[str, ...]]] = {}
        self._known: dict[str, set[tuple[str, ...]]] = {}
        # Leases that nothing else in this process has a list of: they need no renewal.
        self.in_transactions: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def begin(self, waiting: Waiting) -> None:
        """Note that an acquire waits."""
        self._current.add(waiting)
        if not journal._awake:
            journal.wake()

    def end(self, waiting: Waiting) -> None:
        """Note that it does not wait any more."""
        self._current.discard(waiting)
        if waiting.told_as:
            self._gone.setdefault(waiting.backend.params.history_database, set()).add(
                waiting.told_as
            )

    def tell(self, now: float) -> bool:
        """Tell the others what is due, at `now` on the monotonic clock; whether anybody waits."""
        by_database: dict[str, list[Waiting]] = {name: [] for name in self._gone}
        for waiting in list(self._current):
            if waiting.backend.recorded and waiting.denial is not None:
                by_database.setdefault(waiting.backend.params.history_database, []).append(waiting)
        for database, several in by_database.items():
            if now >= self._tell_at.get(database, 0.0):
                self._tell_at[database] = now + TELL_EVERY
                try:
                    self._tell(database, several)
                except Exception as error:
                    # That it is out of reach, the journal tells; and who is gone expires by itself.
                    logger.debug("Nobody is told who waits: %s", error)
                    self._tell_at[database] = now + RETRY
                    connections[database].close()
        return bool(by_database)

    def _tell(self, database: str, several: list[Waiting]) -> None:
        now = lease_now()
        several = [one for one in several if now - one.started >= TELL_AFTER][:MAX_TOLD]
        told_as: dict[str, Waiting] = {}
        held = [lease for source in self.sources for lease in source()]
        asked: dict[BaseBackend, int] = {}
        rows: dict[str, LockWaiter] = {}
        for waiting in several:
            mine = [lease for lease in held if lease.unit == waiting.unit]
            row = _row(waiting, mine)
            if row is None:
                continue
            if mine and asked.get(waiting.backend, 0) < MAX_ASKED:
                asked[waiting.backend] = asked.get(waiting.backend, 0) + 1
                if not _ask_who_is_in_the_way(waiting.backend, row):
                    asked[waiting.backend] = MAX_ASKED
            rows[row.owner_id] = row
            told_as[row.owner_id] = waiting
        tables.prepare(database)
        gone = self._gone.pop(database, set())
        try:
            tables.publish(database, list(rows.values()), gone - rows.keys())
        except BaseException:
            self._gone.setdefault(database, set()).update(gone)
            raise
        for owner_id, waiting in told_as.items():
            waiting.told_as = owner_id
            if waiting not in self._current:
                # It has ended meanwhile.
                self.end(waiting)
        if any(row.holding for row in rows.values()):
            self._look_for_circles(database, told_as)

    def _look_for_circles(self, database: str, ours: dict[str, Waiting]) -> None:
        waiters = told(database, holding=True)
        there = set(circles_of(waiters))
        # Who has just got what it waited for is not in one: what is there twice, is.
        known = self._known.setdefault(database, set())
        for circle in there & self._seen.get(database, set()) - known:
            known.add(circle)
            # Of all processes that see it, one tells.
            first = ours.get(circle[0])
            if first is not None:
                by_owner = {waiter.owner_id: waiter for waiter in waiters}
                self._report([by_owner[owner] for owner in circle], first.backend)
        self._seen[database] = there
        known &= there

    def _report(self, members: list[LockWaiter], backend: BaseBackend) -> None:
        """Tell that these wait for each other; the first of them for a lock of the backend."""
        first = members[0]
        text = description(members)
        logs.event(
            logging.WARNING,
            facts.CYCLE,
            first.backend,
            dict.fromkeys(key_of(member.key) for member in members),
            "Processes wait for each other's locks, none can go on: %s",
            text,
            owner_ids=[member.owner_id for member in members],
        )
        journal.note(
            facts.CYCLE,
            backend,
            (key_of(first.key),),
            who=Who.of(first),
            waited=time.time() - first.since / MICROSECOND,
            reason=text,
        )
        for call in self.when_circle:
            call(backend, members)


def _row(waiting: Waiting, held: list[Held]) -> LockWaiter | None:
    from ..models import LockWaiter

    denial, request = waiting.denial, waiting.request
    if denial is None or request is None:
        return None
    (name,) = names_of((waiting.backend.public_key(denial.key),))
    return LockWaiter(
        owner_id=request.owner_id,
        backend=waiting.backend.alias,
        key=name,
        mode=waiting.mode,
        host=request.host,
        pid=request.pid,
        thread=request.thread,
        label=request.label,
        metadata=request.metadata,
        since=to_us(waiting.since),
        deadline=None if waiting.gives_up is None else to_us(waiting.gives_up),
        valid_until=to_us(time.time() + TOLD_FOR),
        blockers=[holder.owner_id for holder in denial.holders if holder.owner_id],
        holds=[
            {
                "owner_id": lease.owner_id,
                "backend": lease.backend.alias,
                "keys": names_of(lease.keys),
            }
            for lease in held
        ],
        holding=len(held),
    )


def _ask_who_is_in_the_way(backend: BaseBackend, row: LockWaiter) -> bool:
    """Note who holds now what the waiter wants; False if the store does not say."""
    try:
        holders = backend.holders_of(row.key, limit=MAX_ASKED)
    except DistlocksError:
        return False
    row.blockers = [holder.owner_id for holder in holders if holder.owner_id]
    return True


def told(database: str, *, holding: bool = False) -> list[LockWaiter]:
    """Who waits, of all processes, the longest first; only those that hold something meanwhile."""
    from ..models import LockWaiter

    now = to_us(time.time())
    found = LockWaiter.objects.using(database).filter(valid_until__gt=now)
    if holding:
        found = found.filter(holding__gt=0)
    return list(found.order_by("since", "owner_id")[:MAX_TOLD])


def circles_of(waiters: Iterable[LockWaiter]) -> list[tuple[str, ...]]:
    """Which of them wait for each other, by owner id."""
    waiters = list(waiters)
    holder_of = {held["owner_id"]: waiter.owner_id for waiter in waiters for held in waiter.holds}
    waits_for: dict[str, set[str]] = {}
    for waiter in waiters:
        waits_for[waiter.owner_id] = {
            holder_of[blocker] for blocker in waiter.blockers if blocker in holder_of
        }
        if waiter.mode == PERMIT and not holder_of.keys() >= set(waiter.blockers):
            # Whichever of them is done lets it go on, and one works.
            waits_for[waiter.owner_id] = set()
    return circles(waits_for)


def description(circle: Iterable[LockWaiter]) -> str:
    """Who waits for what and holds what."""
    return "; ".join(
        f"{waiter.host} pid {waiter.pid} {waiter.thread} waits for {facts.shown(waiter.key)!r} "
        f"({waiter.backend}) and holds "
        + ", ".join(
            f"{facts.shown(name)!r} ({held['backend']})"
            for held in waiter.holds
            for name in held["keys"]
        )
        for waiter in circle
    )


waits = Waits()
journal.chores.append(waits.tell)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=waits._reset)
