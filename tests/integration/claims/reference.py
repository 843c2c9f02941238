"""What a store of claims must answer, in as few words as possible: no rows, no latches, no clocks.

Written from the table of who goes with whom, not from the code that keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TOGETHER = ("shared", "permit", "intention")


@dataclass
class Had:
    """A claim of one owner on one key."""

    owner: str
    mode: str
    acquired: float
    expires: float
    min_hold: float
    released: bool = False


@dataclass
class Reference:
    """The claims on each key; time is a number that the test moves."""

    now: float = 0.0
    keys: dict[str, list[Had]] = field(default_factory=dict)

    def live(self, key: str) -> list[Had]:
        return [had for had in self.keys.get(key, ()) if had.expires > self.now]

    def admits(self, key: str, mode: str, limit: int) -> bool:
        there = self.live(key)
        if mode == "exclusive":
            return not there
        if any(had.mode != mode for had in there):
            return False
        return mode != "permit" or len(there) < limit

    def acquire(
        self, owner: str, wanted: dict[str, str], limit: int, ttl: float, min_hold: float
    ) -> bool:
        if not all(self.admits(key, mode, limit) for key, mode in wanted.items()):
            return False
        for key, mode in wanted.items():
            there = self.keys.setdefault(key, [])
            # An exclusive claim that ended is forgotten as soon as somebody else comes, all
            # claims are when an exclusive one comes.
            there[:] = [h for h in there if mode != "exclusive" and h.mode != "exclusive"]
            expires = self.now + max(ttl, min_hold)
            there.append(Had(owner, mode, self.now, expires, min_hold))
        return True

    def extend(self, owner: str, keys: list[str], ttl: float) -> bool:
        mine = [self._mine(owner, key) for key in keys]
        if not all(had and had.expires > self.now and not had.released for had in mine):
            return False
        for had in mine:
            assert had is not None
            had.expires = self.now + ttl
            if had.min_hold:
                had.expires = max(had.expires, had.acquired + had.min_hold)
        return True

    def release(self, owner: str, keys: list[str]) -> bool:
        ours = True
        for key in keys:
            had = self._mine(owner, key)
            if had is None or (had.mode in TOGETHER and had.expires <= self.now):
                ours = False
                continue
            had.released = True
            had.expires = had.acquired + had.min_hold
            if not had.min_hold or had.expires <= self.now:
                self.keys[key].remove(had)
        return ours

    def force_release(self, key: str) -> set[str]:
        there = self.live(key)
        if there:
            self.keys[key] = []
        return {"" if had.released else had.owner for had in there}

    def forget(self, key: str, owner: str) -> None:
        """The store has told of a claim that ended by the clock: it knows nothing more of it."""
        self.keys[key] = [had for had in self.keys.get(key, ()) if had.owner != owner]

    def sweep(self) -> None:
        for key in self.keys:
            # A minimum hold that is over leaves nobody behind who could be swept.
            self.keys[key] = [h for h in self.keys[key] if h.expires > self.now or h.released]

    def has_cooled(self) -> bool:
        """Whether some minimum hold is over that nobody has written over yet."""
        return any(
            had.released and had.expires <= self.now
            for there in self.keys.values()
            for had in there
        )

    def holders(self) -> set[tuple[str, str, str]]:
        return {
            (key, "" if had.released else had.owner, had.mode)
            for key in self.keys
            for had in self.live(key)
        }

    def _mine(self, owner: str, key: str) -> Had | None:
        return next((had for had in self.keys.get(key, ()) if had.owner == owner), None)
