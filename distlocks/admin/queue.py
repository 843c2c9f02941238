"""Who waits for one lock, in order, and for about how long yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..claims import EXCLUSIVE, MICROSECOND, Holder, Waiter
from ..histogram import rest
from ..models import LockWaiter
from .past import Past


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One who waits. Durations are seconds from now; has the fields of a holder."""

    owner_id: str
    mode: str
    host: str
    pid: int
    thread: str
    label: str
    metadata: Any
    age: float
    # Until it gives up: None if that is not known.
    gives_up: float | None = None
    for_ever: bool = False
    # What it has meanwhile: {"backend", "keys"}.
    holds: Sequence[Any] = field(default_factory=list)
    # Until its turn, about; None if that cannot be told.
    turn: float | None = None


def queue(
    holders: Sequence[Holder], waiters: Sequence[Waiter] | None, past: Past | None
) -> list[Place]:
    """Who waits: by the store's queue, if it has one, with what the waiters tell of themselves."""
    told = {waiter.owner_id: waiter for waiter in past.waiting} if past else {}
    places = []
    now = time.time()
    for waiter in waiters or ():
        place = Place(
            owner_id=waiter.owner_id,
            mode=waiter.mode,
            host=waiter.host,
            pid=waiter.pid,
            thread=waiter.thread,
            label=waiter.label,
            metadata=waiter.metadata,
            age=max(now - waiter.since.timestamp(), 0.0),
        )
        row = told.pop(waiter.owner_id, None)
        places.append(_with(place, row, now) if row else place)
    places += [_with(_place(row, now), row, now) for row in told.values()]
    return _predicted(places, holders, past)


def _place(row: LockWaiter, now: float) -> Place:
    return Place(
        owner_id=row.owner_id,
        mode=row.mode,
        host=row.host,
        pid=row.pid,
        thread=row.thread,
        label=row.label,
        metadata=row.metadata,
        age=max(now - row.since / MICROSECOND, 0.0),
    )


def _with(place: Place, row: LockWaiter, now: float) -> Place:
    return replace(
        place,
        gives_up=None if row.deadline is None else max(row.deadline / MICROSECOND - now, 0.0),
        for_ever=row.deadline is None,
        holds=row.holds,
    )


def _predicted(places: list[Place], holders: Sequence[Holder], past: Past | None) -> list[Place]:
    """With the turn of each: the rest of the hold that is under way, then one typical hold after
    the other. Where several can have the key at once, that would say nothing."""
    modes = {one.mode for one in holders} | {one.mode for one in places}
    if past is None or past.typical is None or modes != {EXCLUSIVE}:
        return places
    first: float | None = 0.0
    for holder in holders[:1]:
        first = rest(past.holds, max(time.time() - holder.since.timestamp(), 0.0))
        if holder.cooling_down:
            first = holder.remaining
    if first is None:
        return places
    return [replace(place, turn=first + index * past.typical) for index, place in enumerate(places)]
