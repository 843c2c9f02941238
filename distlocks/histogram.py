"""How long things take, in few numbers that can be added up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Upper ends of the buckets, in seconds. Whatever takes longer is in one more.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
SIZE = len(BOUNDS) + 1


def bucket(seconds: float) -> int:
    """In which bucket a duration counts."""
    return bisect_left(BOUNDS, seconds)


def percentile(counts: Sequence[int], share: float) -> float | None:
    """The duration in seconds within which `share` (0 to 1) of what was counted has ended; None if
    nothing was.

    Interpolated within its bucket, so not more exact than that. Of the last bucket, which has no
    end, its beginning is returned.
    """
    total = sum(counts)
    if not total:
        return None
    wanted = share * total
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            if index == len(BOUNDS):
                return BOUNDS[-1]
            low = BOUNDS[index - 1] if index else 0.0
            return low + (BOUNDS[index] - low) * (wanted - below) / count
        below += count
    return BOUNDS[-1]


def within(counts: Sequence[int], seconds: float) -> float:
    """How many of what was counted had ended after so long; interpolated within a bucket."""
    found = 0.0
    for index, count in enumerate(counts):
        low = BOUNDS[index - 1] if index else 0.0
        if index == len(BOUNDS) or seconds <= low:
            break
        found += count * min((seconds - low) / (BOUNDS[index] - low), 1.0)
    return found


def rest(counts: Sequence[int], age: float) -> float | None:
    """How much longer what has lasted for `age` seconds lasts, as half of those did that got so
    old; None if none is known that did."""
    total = sum(counts)
    ended = within(counts, age)
    if total - ended < 1:
        return None
    middle = percentile(counts, (ended + total) / 2 / total)
    return None if middle is None or middle >= BOUNDS[-1] else max(middle - age, 0.0)
