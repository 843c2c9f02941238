"""What has happened in this time, in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from django.db import connections, transaction
from django.db.models import F, Q, Sum

from ..histogram import SIZE, percentile
from .places import Trouble, of_each, reading
from .rollups import COUNTED, HOUR, MINUTE, TOTAL

if TYPE_CHECKING:
    from django.db.models import QuerySet


# By name: seconds looked back, and seconds of one point of a chart. Minutes are kept for days only,
# and there are many of them.
RANGES: Mapping[str, tuple[int, int]] = {
    "15m": (15 * 60, MINUTE),
    "1h": (HOUR, MINUTE),
    "6h": (6 * HOUR, 5 * MINUTE),
    "24h": (24 * HOUR, HOUR),
    "7d": (7 * 24 * HOUR, HOUR),
    "30d": (30 * 24 * HOUR, 6 * HOUR),
}
LONGEST_BY_MINUTES = 6 * HOUR
# Processes add to the tables every few seconds: what is younger says too little.
SETTLED = 10
# The patterns with the most of these are told apart.
MAX_PATTERNS = 20
RANKED = ("contended", "timed_out", "acquired")

SECONDS = ("wait_seconds", "hold_seconds")


@dataclass(frozen=True, slots=True)
class Window:
    """From when to when, in points of `step` seconds, from rows of `span` seconds."""

    since: int
    until: int
    step: int
    span: int

    @classmethod
    def back_from(cls, now: float, name: str) -> Self:
        """One of RANGES until now; from the beginning of its first point on."""
        length, step = RANGES[name]
        since = math.floor((now - length) / step) * step
        span = MINUTE if length <= LONGEST_BY_MINUTES else HOUR
        return cls(since, math.ceil(now), step, span)

    def moments(self) -> Iterator[tuple[int, float]]:
        """Where each point begins, and how many seconds of it have passed."""
        for at in range(self.since, self.until, self.step):
            yield at, min(self.step, self.until - at)


@dataclass(slots=True)
class Figures:
    """How often what has happened, and how long it took."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    # See histogram.
    waited: list[int] = field(default_factory=lambda: [0] * SIZE)
    held: list[int] = field(default_factory=lambda: [0] * SIZE)
    wait_seconds: float = 0.0
    hold_seconds: float = 0.0

    def add(self, other: Figures) -> None:
        """Count what was counted there, too."""
        for name, count in other.counts.items():
            self.counts[name] += count
        self.waited = [a + b for a, b in zip(self.waited, other.waited, strict=True)]
        self.held = [a + b for a, b in zip(self.held, other.held, strict=True)]
        self.wait_seconds += other.wait_seconds
        self.hold_seconds += other.hold_seconds

    def wait(self, percent: int) -> float | None:
        """So many of a hundred grants had been waited for no longer than that, in seconds."""
        return percentile(self.waited, percent / 100)

    def hold(self, percent: int) -> float | None:
        """So many of a hundred leases were held no longer than that, in seconds."""
        return percentile(self.held, percent / 100)


@dataclass(frozen=True, slots=True)
class Point:
    """One step of a window."""

    at: int
    # How much of it has passed.
    seconds: float
    # None where nothing is known: before anything was counted for the first time.
    figures: Figures | None

    def per_minute(self, counter: str) -> float | None:
        """The rate of one of COUNTED."""
        return self.figures.counts[counter] * 60 / self.seconds if self.figures else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What has happened in a window."""

    window: Window
    points: list[Point]
    total: Figures
    # The keys that were found taken most often, by their pattern; without the lengths of each wait
    # and hold: there are many rows to be added up.
    patterns: dict[str, Figures]
    # Since when anything is known, seconds since the epoch; None: nothing is.
    known_since: int | None
    troubles: list[Trouble]


def summary(
    databases: Iterable[str], window: Window, *, backend: str = "", pattern: str = ""
) -> Summary:
    """What is known of all backends and keys, or of one backend, or of the keys of one pattern.

    Keys are told apart by pattern in either case.
    """
    found, troubles = of_each(
        list(databases), lambda database: _Read(database, window, backend, pattern)
    )
    steps: dict[int, Figures] = {}
    patterns: dict[str, Figures] = {}
    for one in found:
        for at, figures in one.steps.items():
            steps.setdefault(at, Figures()).add(figures)
        for name, figures in one.patterns.items():
            patterns.setdefault(name, Figures()).add(figures)
    first = [one.known_since for one in found if one.known_since is not None]
    known_since = min(first) if first else None
    total = Figures()
    for figures in steps.values():
        total.add(figures)
    return Summary(
        window=window,
        points=list(_points(window, steps, known_since)),
        total=total,
        patterns=dict(sorted(patterns.items(), key=_rank)[:MAX_PATTERNS]),
        known_since=known_since,
        troubles=troubles,
    )


def _points(
    window: Window, steps: Mapping[int, Figures], known_since: int | None
) -> Iterator[Point]:
    """Rows are written only when something happens: from the first on, no row means nothing did."""
    for at, seconds in window.moments():
        figures = steps.get(at)
        if figures is None and known_since is not None and at + window.step > known_since:
            figures = Figures()
        if seconds >= SETTLED:
            yield Point(at, seconds, figures)


def _rank(item: tuple[str, Figures]) -> tuple[int | str, ...]:
    name, figures = item
    return (*[-figures.counts[counter] for counter in RANKED], name)


@contextmanager
def _alone(database: str) -> Iterator[None]:
    """Keep PostgreSQL from starting helpers: that takes longer than they save, and where all
    processors are busy, several times as long."""
    connection = connections[database]
    if connection.vendor != "postgresql":
        yield
        return
    with transaction.atomic(using=database):
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL max_parallel_workers_per_gather = 0")
        yield


class _Read:
    """What one database says."""

    def __init__(self, database: str, window: Window, backend: str, pattern: str) -> None:
        from ..models import HOLD_COLUMNS, WAIT_COLUMNS, LockRollup

        every = LockRollup.objects.using(database).filter(span=window.span)
        rows = every.filter(began__gte=window.since, began__lt=window.until).order_by()
        if backend:
            rows = rows.filter(backend=backend)
        columns = (*COUNTED, *SECONDS)
        with reading(database, LockRollup._meta.db_table), _alone(database):
            self.known_since: int | None = (
                every.filter(pattern=TOTAL)
                .order_by("began")
                .values_list("began", flat=True)
                .first()
            )
            at = F("began") - F("began") % window.step
            steps = rows.filter(pattern=pattern or TOTAL).annotate(of=at)
            self.steps = _added_up(steps.values("of"), (*columns, *WAIT_COLUMNS, *HOLD_COLUMNS))
            patterns = rows.exclude(pattern=TOTAL).annotate(of=F("pattern"))
            # There are many of these, and what is not shown of them is not added up.
            self.patterns = _added_up(patterns.values("of"), columns, first=RANKED)


def _added_up(
    grouped: QuerySet[Any, Any], columns: Sequence[str], *, first: Sequence[str] = ()
) -> dict[Any, Figures]:
    """The sums of the columns by `of`; of MAX_PATTERNS, if only those with the most of `first`
    count."""
    sums = {f"sum_{name}": Sum(name) for name in columns}
    grouped = grouped.annotate(**sums)
    if first:
        names = [f"sum_{name}" for name in first]
        some = Q(*[(f"{name}__gt", 0) for name in names], _connector=Q.OR)
        order = [f"-{name}" for name in names]
        grouped = grouped.filter(some).order_by(*order, "of")[:MAX_PATTERNS]
    return {row[0]: _figures(row[1:]) for row in grouped.values_list("of", *sums)}


def _figures(values: Sequence[Any]) -> Figures:
    """From sums in the order of the columns."""
    found = iter(values)
    return Figures(
        counts={name: int(next(found)) for name in COUNTED},
        wait_seconds=float(next(found)),
        hold_seconds=float(next(found)),
        waited=[int(next(found, 0)) for _ in range(SIZE)],
        held=[int(next(found, 0)) for _ in range(SIZE)],
    )
