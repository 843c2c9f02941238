"""What is counted of each minute and hour, before it is added to what the tables have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from .. import facts
from ..histogram import SIZE, bucket
from ..patterns import OTHERS

# Seconds that one row is about.
MINUTE, HOUR = 60, 3600
SPANS = (MINUTE, HOUR)
# All patterns of a backend together.
TOTAL = ""
# More patterns than this are not told apart in one hour: each costs rows.
MAX_PATTERNS = 200
# More cells than this are not kept while the tables cannot be reached.
MAX_CELLS = 10_000

# Which counter a fact adds to.
COUNTERS = {
    facts.CONTENDED: "contended",
    facts.TIMED_OUT: "timed_out",
    facts.EXPIRED: "expired",
    facts.TAKEN_OVER: "expired",
    facts.LOST: "lost",
    facts.FORCED: "forced",
    facts.ERROR: "errors",
}
# In the order of the columns.
COUNTED = ("acquired", "contended", "timed_out", "expired", "lost", "forced", "errors", "dropped")


class CellKey(NamedTuple):
    """Which row of LockRollup is meant."""

    # The alias of the backend.
    alias: str
    # Seconds since the epoch, by the clock of the process that counts.
    began: int
    span: int
    pattern: str


class Cell:
    """What has been counted and not yet been written."""

    __slots__ = ("counts", "held", "hold_seconds", "wait_seconds", "waited")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTED, 0)
        # How many waits and holds of which length there were: see histogram.
        self.waited = [0] * SIZE
        self.held = [0] * SIZE
        self.wait_seconds = 0.0
        self.hold_seconds = 0.0


class Tally:
    """Durations that belong together."""

    __slots__ = ("counts", "seconds")

    def __init__(self, *durations: float) -> None:
        # How many of each length there were: see histogram.
        self.counts = [0] * SIZE
        self.seconds = 0.0
        for duration in durations:
            self.add(duration)

    def add(self, duration: float) -> None:
        """Count one more, in seconds."""
        self.counts[bucket(duration)] += 1
        self.seconds += duration


class Cells:
    """All that one database is owed."""

    def __init__(self) -> None:
        self._cells: dict[CellKey, Cell] = {}
        # Of the hour that it is: which patterns are told apart.
        self._patterns: dict[int, set[str]] = defaultdict(set)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, alias: str, pattern: str, at: float, *, in_total: bool = True) -> Iterator[Cell]:
        """Where to count something that has happened now: in up to four cells.

        In that of all patterns only where it is not there yet: it may be about several patterns.
        """
        hour = int(at) // HOUR
        known = self._patterns[hour]
        if pattern not in known:
            if len(known) >= MAX_PATTERNS:
                pattern = OTHERS
            known.add(pattern)
            for past in [one for one in self._patterns if one < hour - 1]:
                del self._patterns[past]
        for span in SPANS:
            began = int(at) // span * span
            # What is about no key is of no pattern, and must not be counted twice.
            for name in [TOTAL] * in_total + [pattern] * bool(pattern):
                key = CellKey(alias, began, span, name)
                cell = self._cells.get(key)
                if cell is None:
                    if len(self._cells) >= MAX_CELLS:
                        self.dropped += 1
                        continue
                    cell = self._cells[key] = Cell()
                yield cell

    def granted(
        self, alias: str, pattern: str, at: float, waits: Tally, *, in_total: bool = True
    ) -> None:
        """Count grants that took so long."""
        for cell in self.add(alias, pattern, at, in_total=in_total):
            cell.counts["acquired"] += sum(waits.counts)
            cell.waited = [a + b for a, b in zip(cell.waited, waits.counts, strict=True)]
            cell.wait_seconds += waits.seconds

    def released(
        self, alias: str, pattern: str, at: float, holds: Tally, *, in_total: bool = True
    ) -> None:
        """Count leases that were held for so long."""
        for cell in self.add(alias, pattern, at, in_total=in_total):
            cell.held = [a + b for a, b in zip(cell.held, holds.counts, strict=True)]
            cell.hold_seconds += holds.seconds

    def count(
        self,
        counter: str,
        alias: str,
        pattern: str,
        at: float,
        times: int = 1,
        *,
        in_total: bool = True,
    ) -> None:
        """Add to one of COUNTED."""
        for cell in self.add(alias, pattern, at, in_total=in_total):
            cell.counts[counter] += times

    def take(self) -> list[tuple[CellKey, Cell]]:
        """What is to be written, in the order in which all processes write it; it is forgotten
        here."""
        cells, self._cells = self._cells, {}
        return sorted(cells.items(), key=lambda item: item[0])

    def put_back(self, cells: list[tuple[CellKey, Cell]]) -> None:
        """What could not be written."""
        for key, cell in cells:
            there = self._cells.get(key)
            if there is None:
                self._cells[key] = cell
                continue
            for name, value in cell.counts.items():
                there.counts[name] += value
            there.waited = [a + b for a, b in zip(there.waited, cell.waited, strict=True)]
            there.held = [a + b for a, b in zip(there.held, cell.held, strict=True)]
            there.wait_seconds += cell.wait_seconds
            there.hold_seconds += cell.hold_seconds
