"""Who waits for what, from all that know it: the stores that keep a queue, and those who wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import Count

from ..backends.base import BaseBackend
from ..claims import from_us, to_us
from ..history.waits import circles_of, description
from ..keys import check_key
from ..models import LockWaiter
from .entries import MAX_LISTED

# By alias and name, how many wait.
Counts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Somebody who waits for a key."""

    # The alias of the backend, and the name of the key in its way.
    alias: str
    name: str
    owner_id: str
    since: datetime
    mode: str
    host: str = ""
    pid: int = 0
    thread: str = ""
    label: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # Whether it has told of itself: then it is known when it gives up (None: never), and what it
    # holds meanwhile: the alias and the name of each key.
    has_told: bool = False
    gives_up: datetime | None = None
    holds: tuple[tuple[str, str], ...] = ()


def databases_of(backends: Iterable[BaseBackend]) -> dict[str, list[BaseBackend]]:
    """The databases in which those tell of themselves who wait for locks of these backends."""
    databases: dict[str, list[BaseBackend]] = {}
    for backend in backends:
        if backend.recorded:
            databases.setdefault(backend.params.history_database, []).append(backend)
    return databases


def from_row(row: LockWaiter) -> Waiting:
    """Who has told of itself."""
    return Waiting(
        alias=row.backend,
        name=row.key,
        owner_id=row.owner_id,
        since=from_us(row.since),
        mode=row.mode,
        host=row.host,
        pid=row.pid,
        thread=row.thread,
        label=row.label,
        metadata=row.metadata,
        has_told=True,
        gives_up=None if row.deadline is None else from_us(row.deadline),
        holds=tuple((held["backend"], name) for held in row.holds for name in held["keys"]),
    )


def in_queue(backend: BaseBackend, name: str) -> list[Waiting] | None:
    """Whom the store has in its queue for a key; None if it keeps none."""
    if not backend.supports_waiters:
        return None
    return [
        Waiting(
            alias=backend.alias,
            name=check_key(waiter.key),
            owner_id=waiter.owner_id,
            since=waiter.since,
            mode=waiter.mode,
            host=waiter.host,
            pid=waiter.pid,
            thread=waiter.thread,
            label=waiter.label,
            metadata=waiter.metadata,
        )
        for waiter in backend.waiters(name)
    ]


def who_told(backend: BaseBackend, name: str, limit: int) -> list[Waiting]:
    """Those who have told that they wait for the key, who do so after a second: the longest
    first."""
    rows = (
        LockWaiter.objects.using(backend.params.history_database)
        .filter(backend=backend.alias, key=name, valid_until__gt=to_us(time.time()))
        .order_by("since", "owner_id")[:limit]
    )
    return list(map(from_row, rows))


def counts(database: str) -> dict[str, dict[str, int]]:
    """How many have told that they wait, by alias and key; of very many keys, of those with
    most."""
    rows = (
        LockWaiter.objects.using(database)
        .filter(valid_until__gt=to_us(time.time()))
        .order_by()
        .values_list("backend", "key")
        .annotate(n=Count("owner_id"))
        .order_by("-n", "key")[:MAX_LISTED]
    )
    found: dict[str, dict[str, int]] = {}
    for alias, name, count in rows:
        found.setdefault(alias, {})[name] = count
    return found


def circles_in(rows: Iterable[LockWaiter]) -> list[tuple[tuple[str, ...], str]]:
    """Which of them wait for each other, by owner id; and who that is, in words."""
    by_owner = {row.owner_id: row for row in rows}
    return [
        (circle, description([by_owner[owner] for owner in circle]))
        for circle in circles_of(by_owner.values())
    ]
