"""What a store with queues must answer: whoever came first is first, and nobody passes.

Written from what is promised: see reference.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# Seconds for which a key is kept for who is called, and for which waiters count as alive.
RESERVED = 0.5
ALIVE_NEXT, ALIVE = 5.5, 10.5


@dataclass
class Ask:
    """A request: what it wants of each key, in the order in which the store takes them."""

    owner: str
    number: int
    keys: list[str]
    mode: str
    limit: int
    ttl: float


@dataclass
class Held:
    """A key is an owner's, or kept for it."""

    mode: str
    expires: float
    reserved: bool


@dataclass
class Waiting:
    ask: Ask
    alive: float


@dataclass
class Place:
    """One key: who has it, by owner, and who waits for it, by when they began to ask."""

    had: dict[str, Held] = field(default_factory=dict)
    queue: list[Waiting] = field(default_factory=list)


@dataclass
class Fair:
    """Time is a number that the test moves."""

    now: float = 0.0
    places: dict[str, Place] = field(default_factory=dict)

    def acquire(self, ask: Ask, *, waits: bool) -> bool:
        refused = next((key for key in ask.keys if not self._may_have(key, ask)), None)
        for key in ask.keys:
            place = self._place(key)
            if refused is None:
                place.had[ask.owner] = Held(ask.mode, self.now + ask.ttl, False)
                self._leave(place, ask.owner)
                self._call(place)
            elif key != refused or not waits:
                mine = place.had.pop(ask.owner, None)
                if self._leave(place, ask.owner) or mine:
                    self._call(place)
        if refused is not None and waits:
            self._stand(self._place(refused), ask)
        return refused is None

    def _may_have(self, key: str, ask: Ask) -> bool:
        place = self._place(key)
        if ask.owner in place.had:
            return True
        self._call(place, but=ask.owner)
        first = place.queue[0].ask.owner if place.queue else ask.owner
        return first == ask.owner and self._goes(place, ask)

    def _stand(self, place: Place, ask: Ask) -> None:
        self._leave(place, ask.owner)
        place.queue.append(Waiting(ask, 0.0))
        place.queue.sort(key=lambda one: one.ask.number)
        number = [one.ask.owner for one in place.queue].index(ask.owner)
        place.queue[number].alive = self.now + (ALIVE_NEXT if number < 2 else ALIVE)

    @staticmethod
    def _leave(place: Place, owner: str) -> bool:
        before = len(place.queue)
        place.queue[:] = [one for one in place.queue if one.ask.owner != owner]
        return len(place.queue) < before

    def end(self, owner: str, keys: Iterable[str]) -> None:
        """It releases what it has or had, or gives up what it waits for."""
        for key in keys:
            place = self._place(key)
            place.had.pop(owner, None)
            self._leave(place, owner)
            self._call(place)

    def force_release(self, key: str) -> set[str]:
        place = self._place(key)
        had = set(place.had)
        if had:
            place.had.clear()
            self._call(place)
        return had

    def sweep(self) -> None:
        for key in self.places:
            place = self._place(key)
            place.queue[:] = [one for one in place.queue if one.alive >= self.now]
            self._call(place)

    def _place(self, key: str) -> Place:
        place = self.places.setdefault(key, Place())
        place.had = {owner: had for owner, had in place.had.items() if had.expires > self.now}
        return place

    def _call(self, place: Place, but: str = "") -> None:
        """Keep the key for those first in the queue, while they go with what is there."""
        while place.queue and place.queue[0].ask.owner != but:
            first = place.queue[0]
            if first.alive >= self.now:
                if not self._goes(place, first.ask):
                    return
                until = self.now + RESERVED
                place.had[first.ask.owner] = Held(first.ask.mode, until, True)
            del place.queue[0]

    @staticmethod
    def _goes(place: Place, ask: Ask) -> bool:
        if not place.had:
            return True
        if ask.mode == "exclusive" or any(had.mode != ask.mode for had in place.had.values()):
            return False
        return ask.mode != "permit" or len(place.had) < ask.limit

    # What can be seen of it

    def holders(self) -> set[tuple[str, str, str, bool]]:
        return {
            (key, owner, had.mode, had.reserved)
            for key in self.places
            for owner, had in self._place(key).had.items()
        }

    def waiters(self, key: str) -> list[str]:
        queue = self._place(key).queue
        return [one.ask.owner for one in queue if one.alive >= self.now]
