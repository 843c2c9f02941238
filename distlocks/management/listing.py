"""Who holds what and who waits for it, over all backends, as far as they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError

from ..backends.base import BaseBackend
from ..claims import INTENTION, Holder
from ..exceptions import DistlocksError
from ..handler import locks
from ..history.waits import told
from ..keys import check_key
from ..live.waiters import Waiting, circles_in, databases_of, from_row, in_queue

# What a backend or a database says that cannot be asked.
Unanswered = (DistlocksError, DatabaseError, ImproperlyConfigured)


@dataclass(slots=True, kw_only=True)
class Listed:
    """A key, one of those who hold it, and who waits for it."""

    name: str
    # Several aliases may share a store.
    aliases: list[str]
    # None: it is free, or about to be.
    holder: Holder | None
    # Beside one holder of each key.
    waiters: list[Waiting] = field(default_factory=list)


@dataclass(slots=True)
class Listing:
    """All that was found, in the order of the keys."""

    locks: list[Listed] = field(default_factory=list)
    # Who waits for each other, by owner id; and in words.
    circles: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    # Why a backend could not be asked, by its alias; and a database for who waits, by its own.
    errors: dict[str, str] = field(default_factory=dict)
    history_errors: dict[str, str] = field(default_factory=dict)
    # The aliases that have more than were asked for.
    more: list[str] = field(default_factory=list)


def listing(
    aliases: Sequence[str],
    prefix: str = "",
    *,
    limit: int | None = None,
    with_waiters: bool = True,
    asks_queue: Callable[[BaseBackend], bool] = lambda backend: True,
) -> Listing:
    """Who has the keys whose names begin with `prefix`, at most `limit` of each backend.

    Its store's queue, which costs a round trip for each key, is looked at where `asks_queue`.
    """
    found = Listing()
    backends: list[BaseBackend] = []
    listed: dict[tuple[str, str, int], Listed] = {}
    for alias in aliases:
        try:
            backend = locks[alias]
            holders = backend.holders(prefix, limit=None if limit is None else limit + 1)
        except Unanswered as error:
            found.errors[alias] = str(error)
            continue
        backends.append(backend)
        if limit is not None and len(holders) > limit:
            found.more.append(alias)
        for holder in holders[:limit]:
            name = check_key(holder.key)
            # The same lease is told by all aliases that share its store.
            one = listed.setdefault(
                (name, holder.owner_id, holder.fencing_token),
                Listed(name=name, aliases=[], holder=holder),
            )
            one.aliases.append(alias)
    if with_waiters:
        _add_waiters(found, backends, listed, prefix, asks_queue)
    # The key above a tree key is held by the same lease: it is worth a line if somebody waits.
    found.locks = [
        one
        for one in listed.values()
        if one.holder is None or one.holder.mode != INTENTION or one.waiters
    ]
    found.locks.sort(key=lambda one: (one.name, one.aliases))
    return found


def _add_waiters(
    found: Listing,
    backends: Sequence[BaseBackend],
    listed: dict[tuple[str, str, int], Listed],
    prefix: str,
    asks_queue: Callable[[BaseBackend], bool],
) -> None:
    rows = []
    for database in databases_of(backends):
        try:
            rows += told(database)
        except Unanswered as error:
            found.history_errors[database] = str(error)
    found.circles = circles_in(rows)
    by_owner = {row.owner_id: from_row(row) for row in rows if row.key.startswith(prefix)}
    for backend in filter(asks_queue, backends):
        names = {one.name for one in listed.values() if backend.alias in one.aliases}
        names |= {one.name for one in by_owner.values() if one.alias == backend.alias}
        try:
            queued = [one for name in sorted(names) for one in in_queue(backend, name) or ()]
        except Unanswered as error:
            found.errors[backend.alias] = str(error)
            continue
        for waiting in queued:
            # Who has told of itself has told more.
            by_owner.setdefault(waiting.owner_id, waiting)
    chosen = {backend.alias for backend in backends}
    for waiting in sorted(by_owner.values(), key=lambda one: (one.since, one.owner_id)):
        if waiting.alias in chosen:
            _line_for(waiting, listed).waiters.append(waiting)


def _line_for(waiting: Waiting, listed: dict[tuple[str, str, int], Listed]) -> Listed:
    """Where to show it: beside the first holder of its key, which may have none any more."""
    for one in listed.values():
        if one.name == waiting.name and waiting.alias in one.aliases:
            return one
    free = Listed(name=waiting.name, aliases=[waiting.alias], holder=None)
    listed[waiting.name, "", 0] = free
    return free
