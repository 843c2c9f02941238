"""Which events there are, the newest first, in pages that cost the same at any depth."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Self

from django.conf import settings
from django.db import connections
from django.db.models import Q

from ..claims import from_us, to_us
from .places import Trouble, of_each, reading

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ..models import LockEvent

# Greater than every character that a key may have.
LAST = chr(0x10FFFF)
# Of more kinds than this, most rows are: they are not worth a query each.
FEW_KINDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked for; what is empty is not asked about. Moments are since the epoch, in µs."""

    key: str = ""
    # Is it only the beginning of the keys?
    is_beginning: bool = False
    kinds: tuple[str, ...] = ()
    backend: str = ""
    pattern: str = ""
    # Of one key.
    owner_id: str = ""
    since: int | None = None
    until: int | None = None


class Cursor(NamedTuple):
    """An event's place among the others.

    They come by their moments; of the same moment, by their database, then by their number.
    """

    # Microseconds since the epoch.
    at: int
    # Its place in the list of databases.
    database: int
    id: int

    @classmethod
    def of(cls, event: LockEvent, databases: list[str]) -> Self:
        """The place of one that was read."""
        at = to_us(event.at.timestamp())
        return cls(at, databases.index(str(event._state.db)), int(event.pk))

    @classmethod
    def read(cls, text: str) -> Self | None:
        """From what str() has made of one; None if it has not."""
        parts = text.split("-")
        # None is longer, and int() refuses thousands of digits.
        if any(len(part) > 19 for part in parts):
            return None
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
            return None
        at, database, id = map(int, parts)
        return cls(at, database, id) if at < 1 << 53 and id < 1 << 63 else None

    def __str__(self) -> str:
        return f"{self.at}-{self.database}-{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A few events, the newest first."""

    events: list[LockEvent]
    # Where to go on: are there older ones than the last, and newer ones than the first?
    older: Cursor | None
    newer: Cursor | None
    troubles: list[Trouble]


def page(
    databases: list[str],
    wanted: Wanted,
    *,
    size: int,
    older_than: Cursor | None = None,
    newer_than: Cursor | None = None,
) -> Page:
    """The newest events, or those beside a place. Nothing is counted and nothing skipped: a page
    is read from where it begins in an index."""
    found, troubles = of_each(
        databases,
        lambda database: _read(
            database, databases.index(database), wanted, older_than, newer_than, size + 1
        ),
    )

    def oldest_first(event: LockEvent) -> tuple[int, int, int]:
        at, database, id = Cursor.of(event, databases)
        return at, -database, id

    def newest_first(event: LockEvent) -> tuple[int, int, int]:
        at, database, id = Cursor.of(event, databases)
        return -at, database, -id

    streams = [rows for streams in found for rows in streams]
    merged = heapq.merge(*streams, key=oldest_first if newer_than else newest_first)
    events = list(islice(merged, size + 1))
    is_full = len(events) > size
    del events[size:]
    if newer_than:
        if not is_full:
            # There are newer ones than when the link was made, or none: begin where they begin.
            return page(databases, wanted, size=size)
        events.reverse()
    first, last = (events[0], events[-1]) if events else (None, None)
    return Page(
        events=events,
        older=Cursor.of(last, databases) if last and (is_full or newer_than) else None,
        newer=Cursor.of(first, databases) if first and (older_than or newer_than) else None,
        troubles=troubles,
    )


def every(databases: list[str], wanted: Wanted, *, limit: int, chunk: int = 1000) -> Iterator[Page]:
    """All of them, the newest first, in pages: no more than one is in memory, and no transaction
    nor cursor of the database's is open between two."""
    older_than: Cursor | None = None
    while limit > 0:
        one = page(databases, wanted, size=min(chunk, limit), older_than=older_than)
        yield one
        limit -= len(one.events)
        older_than = one.older
        if older_than is None or one.troubles:
            return


def _read(
    database: str,
    place: int,
    wanted: Wanted,
    older_than: Cursor | None,
    newer_than: Cursor | None,
    size: int,
) -> list[list[LockEvent]]:
    """The first rows of the database, in one or several sorted lists."""
    from ..models import LockEvent

    every = LockEvent.objects.using(database)
    if older_than:
        every = every.filter(_before(older_than, place))
    if newer_than:
        every = every.filter(_after(newer_than, place))
    is_beside = bool(older_than or newer_than)
    descending = "" if newer_than else "-"

    def rows(kinds: Sequence[str]) -> list[LockEvent]:
        found, within = _rows(every, wanted, kinds, database if is_beside else "")
        return list(
            found.order_by(*[f"{descending}{name}" for name in (*within, "at", "id")])[:size]
        )

    with reading(database, LockEvent._meta.db_table):
        if 1 < len(wanted.kinds) <= FEW_KINDS:
            # Of each kind there is a sorted index; of several together there is not.
            return [rows([kind]) for kind in wanted.kinds]
        return [rows(wanted.kinds)]


def _rows(
    rows: QuerySet[LockEvent], wanted: Wanted, kinds: Sequence[str], beside_in: str
) -> tuple[QuerySet[LockEvent], list[str]]:
    """What is wanted, and by which column's index it has to be sorted for that to be used."""
    equal = {"pattern": wanted.pattern, "backend": wanted.backend}
    if len(kinds) == 1:
        equal = {"pattern": wanted.pattern, "kind": kinds[0], "backend": wanted.backend}
    elif kinds:
        rows = rows.filter(kind__in=kinds)
    if wanted.key and wanted.is_beginning:
        # A range is what the index knows; LIKE is not everywhere.
        rows = rows.filter(key__gte=wanted.key, key__lt=wanted.key + LAST)
    else:
        equal = {"key": wanted.key, **equal}
    if wanted.owner_id:
        rows = rows.filter(owner_id=wanted.owner_id)
    if wanted.since is not None:
        rows = rows.filter(at__gte=_moment(wanted.since))
    if wanted.until is not None:
        rows = rows.filter(at__lt=_moment(wanted.until))
    equal = {name: value for name, value in equal.items() if value}
    within: list[str] = []
    if equal and beside_in and connections[beside_in].vendor == "mysql":
        # Of a column that equals something, MariaDB reads every row from the newest on until the
        # page begins; of one that lies between two values, it begins there.
        within = [next(iter(equal))]
        value = equal.pop(within[0])
        rows = rows.filter(**{f"{within[0]}__gte": value, f"{within[0]}__lte": value})
    return rows.filter(**equal), within


def _before(cursor: Cursor, place: int) -> Q:
    """What comes after the cursor in a list that has the newest first. Written so that the whole
    of it begins at one point of an index."""
    at = _moment(cursor.at)
    if place == cursor.database:
        return Q(at__lte=at) & (Q(at__lt=at) | Q(id__lt=cursor.id))
    return Q(at__lt=at) if place < cursor.database else Q(at__lte=at)


def _after(cursor: Cursor, place: int) -> Q:
    at = _moment(cursor.at)
    if place == cursor.database:
        return Q(at__gte=at) & (Q(at__gt=at) | Q(id__gt=cursor.id))
    return Q(at__gte=at) if place < cursor.database else Q(at__gt=at)


def _moment(at: int) -> datetime:
    """As the column wants it."""
    return from_us(at) if settings.USE_TZ else from_us(at).astimezone().replace(tzinfo=None)
