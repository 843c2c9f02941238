"""What the tables know of one lock: its history, how long it is held, who waits in a circle."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import Sum
from django.utils import timezone

from ..backends.base import BaseBackend
from ..histogram import percentile
from ..history.waits import circles_of, told
from ..live.waiters import Waiting, who_told
from ..models import HOLD_COLUMNS, LockEvent, LockRollup, LockWaiter
from ..patterns import OTHERS, pattern_of

DAYS = 7
SHOWN_EVENTS = 50
SHOWN_WAITERS = 100
HOUR = 3600
DAY = 24 * HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """See the module."""

    events: list[LockEvent]
    waiting: list[Waiting]
    # How many holds of keys like it took how long, in the last 24 hours: see histogram.
    holds: list[int]
    # Those that the lock is part of.
    circles: list[list[LockWaiter]]

    @property
    def typical(self) -> float | None:
        """The hold that half of all are shorter than, in seconds."""
        return percentile(self.holds, 0.5)


def past(backend: BaseBackend, name: str) -> Past:
    """What is known of the key of this name."""
    database = backend.params.history_database
    week = timezone.now() - timedelta(days=DAYS)
    events = LockEvent.objects.using(database).filter(backend=backend.alias, key=name, at__gte=week)
    sums: Iterable[Any] = (
        LockRollup.objects.using(database)
        .filter(
            span=HOUR,
            began__gte=int(time.time()) - DAY,
            backend=backend.alias,
            # Where there were too many patterns, it was counted among the others.
            pattern__in=[pattern_of(name), OTHERS],
        )
        .values("pattern")
        .annotate(**{f"sum_{column}": Sum(column) for column in HOLD_COLUMNS})
    )
    by_pattern = {
        row["pattern"]: [row[f"sum_{column}"] or 0 for column in HOLD_COLUMNS] for row in sums
    }
    return Past(
        events=list(events[:SHOWN_EVENTS]),
        waiting=who_told(backend, name, SHOWN_WAITERS),
        holds=by_pattern.get(pattern_of(name)) or by_pattern.get(OTHERS) or [],
        circles=_circles(database, backend.alias, name),
    )


def _circles(database: str, alias: str, name: str) -> list[list[LockWaiter]]:
    waiters = {waiter.owner_id: waiter for waiter in told(database, holding=True)}
    found = [[waiters[owner] for owner in circle] for circle in circles_of(waiters.values())]
    return [circle for circle in found if any(_is_about(one, alias, name) for one in circle)]


def _is_about(waiter: LockWaiter, alias: str, name: str) -> bool:
    return (waiter.backend, waiter.key) == (alias, name) or any(
        held["backend"] == alias and name in held["keys"] for held in waiter.holds
    )


@dataclass(frozen=True, slots=True)
class Point:
    """A place on the ring of a circle, and where its arrow to the next one is, in degrees."""

    x: float
    y: float
    arrow_x: float
    arrow_y: float
    turn: float


# Of the drawing, which is 200 wide.
RADIUS, CENTRE = 70, 100


def ring(circle: Sequence[LockWaiter]) -> list[Point]:
    """Where to draw those who wait for each other: the first on top, then clockwise."""
    points = []
    for index in range(len(circle)):
        angle = 2 * math.pi * index / len(circle)
        half = angle + math.pi / len(circle)
        points.append(
            Point(
                round(CENTRE + RADIUS * math.sin(angle), 1),
                round(CENTRE - RADIUS * math.cos(angle), 1),
                round(CENTRE + RADIUS * math.sin(half), 1),
                round(CENTRE - RADIUS * math.cos(half), 1),
                round(math.degrees(half), 1),
            )
        )
    return points
