"""Who waits for one lock, in order, and for about how long yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..claims import EXCLUSIVE, Holder
from ..histogram import rest
from ..live.waiters import Waiting
from .past import Past


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One who waits. Durations are seconds from now."""

    who: Waiting
    age: float
    # Until it gives up: None if that is not known, or never.
    gives_up: float | None
    # Until its turn, about; None if that cannot be told.
    turn: float | None = None

    @property
    def for_ever(self) -> bool:
        """Whether it is known to wait without an end."""
        return self.who.has_told and self.who.gives_up is None


def queue(
    holders: Sequence[Holder], queued: Sequence[Waiting] | None, past: Past | None
) -> list[Place]:
    """Who waits: by the store's queue, if it has one, then those who tell of themselves."""
    told = {one.owner_id: one for one in past.waiting} if past else {}
    # Who has told of itself has told more.
    waiting = [told.pop(one.owner_id, one) for one in queued or ()]
    now = time.time()
    places = [_place(one, now) for one in (*waiting, *told.values())]
    return _predicted(places, holders, past)


def _place(who: Waiting, now: float) -> Place:
    return Place(
        who=who,
        age=max(now - who.since.timestamp(), 0.0),
        gives_up=None if who.gives_up is None else max(who.gives_up.timestamp() - now, 0.0),
    )


def _predicted(places: list[Place], holders: Sequence[Holder], past: Past | None) -> list[Place]:
    """With the turn of each: the rest of the hold that is under way, then one typical hold after
    the other. Where several can have the key at once, that would say nothing."""
    modes = {one.mode for one in holders} | {one.who.mode for one in places}
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
