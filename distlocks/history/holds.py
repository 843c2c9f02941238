"""For how much longer a key is likely to be held, going by what this process has seen."""

from __future__ import annotations

from collections.abc import Sequence

from ..patterns import pattern_of
from .journal import Entry, journal, patterns_in

# Holds of each pattern that are remembered, the latest; fewer than the second tell nothing.
REMEMBERED, ENOUGH = 32, 5
MAX_PATTERNS = 500


class Holds:
    """How long leases were held lately, by the pattern of their keys."""

    def __init__(self) -> None:
        # The pattern that was seen last is the last. Values are replaced, never changed: others
        # read them meanwhile.
        self._seen: dict[str, tuple[float, ...]] = {}
        self._started = False

    def start(self) -> None:
        """Look on from now on, if that has not begun."""
        if not self._started:
            self._started = True
            journal.observers.append(self.observe)

    def observe(self, entries: Sequence[Entry]) -> None:
        """Remember what has been released. Called by the journal."""
        for entry in entries:
            if len(entry) == 2 or not entry[4]:
                continue
            for pattern in patterns_in(entry):
                known = self._seen.pop(pattern, ())
                self._seen[pattern] = (*known[1 - REMEMBERED :], entry[3])
        while len(self._seen) > MAX_PATTERNS:
            del self._seen[next(iter(self._seen))]

    def rest(self, name: str, held: float) -> float | None:
        """Seconds until the key of this name is free, if it has been held for `held` seconds and
        goes the way of the others of its kind; None if that is not known."""
        seen = self._seen.get(pattern_of(name), ())
        longer = sorted(seconds for seconds in seen if seconds > held)
        if len(seen) < ENOUGH or not longer:
            return None
        return longer[len(longer) // 2] - held


holds = Holds()
