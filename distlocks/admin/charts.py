"""What the dashboard's charts show: as lines, and as tables for who cannot see those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.html import escape
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy as _

from ..claims import MICROSECOND
from ..history.figures import Point, Summary
from ..keys import SEPARATOR
from . import wording
from .asked import local

# How the numbers are written on the axis.
RATE, DURATION, COUNT = "rate", "duration", "count"
WRITTEN: dict[str, Callable[[float | None], str]] = {
    RATE: wording.rate,
    DURATION: wording.seconds,
    COUNT: lambda value: wording.NOTHING if value is None else wording.count(value),
}

CELL = '<td class="dl-right">'

Read = Callable[[Point], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One number over time."""

    label: Any
    # Which of the style sheet's colours.
    colour: str
    values: list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Some numbers of the same kind over time."""

    name: str
    title: Any
    unit: str
    # What there is to read when there is nothing to draw.
    empty: Any
    lines: list[Line]
    # When each point begins, in the current time zone.
    moments: list[str]

    @property
    def is_empty(self) -> bool:
        """Whether no line has a point."""
        return all(value is None for line in self.lines for value in line.values)

    @property
    def rows(self) -> Sequence[tuple[str, str]]:
        """The same as a table, the newest first: when, and the cells."""
        write = WRITTEN[self.unit]
        columns = [[write(value) for value in line.values] for line in self.lines]
        # A template's loop over thousands of cells takes longer than to find what is in them.
        cells = [
            mark_safe(f"{CELL}{escaped.replace(SEPARATOR, f'</td>{CELL}')}</td>")
            for escaped in (escape(SEPARATOR.join(texts)) for texts in zip(*columns, strict=True))
        ]
        return list(zip(self.moments, cells, strict=True))[::-1]

    def drawn(self) -> dict[str, Any]:
        """For the script."""
        return {
            "unit": self.unit,
            "empty": self.is_empty,
            "lines": [
                {"label": str(line.label), "colour": line.colour, "values": line.values}
                for line in self.lines
            ],
        }


def _counted(name: str) -> Read:
    return lambda point: point.figures.counts[name] if point.figures else None


def _rate(name: str) -> Read:
    return lambda point: point.per_minute(name)


def _waited(percent: int) -> Read:
    return lambda point: point.figures.wait(percent) if point.figures else None


def _held(percent: int) -> Read:
    return lambda point: point.figures.hold(percent) if point.figures else None


Lines = Sequence[tuple[Any, str, Read]]

CHARTS: Sequence[tuple[str, Any, str, Any, Lines]] = (
    (
        "rates",
        _("Acquired and found taken, a minute"),
        RATE,
        _("Nothing was counted in this time."),
        (
            (_("acquired"), "good", _rate("acquired")),
            (_("found taken"), "warn", _rate("contended")),
        ),
    ),
    (
        "troubles",
        _("What went wrong"),
        COUNT,
        _("Nothing was counted in this time."),
        (
            (_("timed out"), "warn", _counted("timed_out")),
            (_("lost"), "bad", _counted("lost")),
            (_("expired"), "other", _counted("expired")),
            (_("store errors"), "more", _counted("errors")),
            (_("force-released"), "good", _counted("forced")),
        ),
    ),
    (
        "waits",
        _("Time waited for a grant"),
        DURATION,
        _("No lock was granted in this time."),
        (
            (_("p50"), "good", _waited(50)),
            (_("p95"), "warn", _waited(95)),
            (_("p99"), "bad", _waited(99)),
        ),
    ),
    (
        "holds",
        _("Time held"),
        DURATION,
        _("No lock was released in this time."),
        (
            (_("p50"), "good", _held(50)),
            (_("p95"), "warn", _held(95)),
            (_("p99"), "bad", _held(99)),
        ),
    ),
)


def charts(found: Summary) -> list[Chart]:
    """All of them."""
    moments = [f"{local(point.at * MICROSECOND):%Y-%m-%d %H:%M}" for point in found.points]
    return [
        Chart(
            name=name,
            title=title,
            unit=unit,
            empty=empty,
            moments=moments,
            lines=[
                Line(label=label, colour=colour, values=[read(point) for point in found.points])
                for label, colour, read in lines
            ],
        )
        for name, title, unit, empty, lines in CHARTS
    ]
