"""The backends' locks, put together into one list."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

from ..backends.base import BaseBackend
from ..backends.database import DatabaseBackend
from ..handler import locks
from . import tables, waiters
from .asking import TIME, ask
from .entries import MAX_LISTED, SORTS, Entry, Found, Listing, StoreState, Wanted
from .snapshots import watch


def listing(wanted: Wanted) -> Listing:
    """One page of what is wanted; there in less than two seconds, whatever is down."""
    until = time.monotonic() + TIME
    backends, stores = _backends(wanted)
    counts, unknown = _counts(backends, until - TIME / 2)
    questions: dict[str, tuple[str, Callable[[], Found]]] = {}
    for alias, backend in backends.items():
        waited = counts.get(alias, {}) if backend.recorded and not unknown else None
        if isinstance(backend, DatabaseBackend):
            find = partial(tables.find, backend, wanted, waited, _strangers(backend))
            questions[alias] = (backend.using, find)
        else:
            watch(backend).start()
    answers = ask(questions)
    for alias, backend in backends.items():
        state = stores[alias]
        try:
            if alias in answers:
                found: Found | None = answers[alias].result(until)
            else:
                snapshot = watch(backend).latest(until)
                waited = counts.get(alias, {}) if backend.recorded and not unknown else None
                found = snapshot.find(wanted, waited) if snapshot else None
        except Exception as error:
            stores[alias] = replace(state, error=told(error))
        else:
            stores[alias] = replace(state, found=found, reading=found is None)
    found_all = _put_together(wanted, list(stores.values()), unknown)
    if wanted.page > found_all.pages:
        # There were more a moment ago.
        return listing(replace(wanted, page=found_all.pages))
    return found_all


def refresh(alias: str) -> None:
    """Have what is known of a backend's locks read again: it has just been changed."""
    backend = locks[alias]
    if not isinstance(backend, DatabaseBackend):
        watch(backend).expire()


def told(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _backends(wanted: Wanted) -> tuple[dict[str, BaseBackend], dict[str, StoreState]]:
    """The backends that are to be looked at, and all that are wanted."""
    backends: dict[str, BaseBackend] = {}
    stores: dict[str, StoreState] = {}
    same: dict[object, str] = {}
    for alias in locks:
        try:
            backend = locks[alias]
        except Exception as error:
            if wanted.backend in ("", alias):
                stores[alias] = StoreState(alias=alias, kind="", error=told(error))
            continue
        if wanted.backend not in ("", alias):
            continue
        if isinstance(backend, DatabaseBackend):
            first = same.setdefault((backend.using, backend.prefix), alias)
            if first != alias:
                stores[first] = replace(stores[first], also=(*stores[first].also, alias))
                continue
        backends[alias] = backend
        stores[alias] = StoreState(alias=alias, kind=type(backend).__name__.removesuffix("Backend"))
    return backends, stores


def _strangers(backend: DatabaseBackend) -> list[str]:
    """The prefixes of keys in the same table that begin as ours do, and are another backend's."""
    return [
        other.prefix
        for other in locks.all(initialized_only=True)
        if isinstance(other, DatabaseBackend)
        and other.using == backend.using
        and other.prefix != backend.prefix
        and other.prefix.startswith(backend.prefix)
    ]


def _counts(
    backends: dict[str, BaseBackend], until: float
) -> tuple[dict[str, dict[str, int]], str]:
    """How many wait, by alias and key; or why that is not known."""
    databases = {one.params.history_database for one in backends.values() if one.recorded}
    answers = ask(
        {
            f"history in {database}": (database, partial(waiters.counts, database))
            for database in sorted(databases)
        }
    )
    counts: dict[str, dict[str, int]] = {}
    try:
        for answer in answers.values():
            for alias, found in answer.result(until).items():
                counts.setdefault(alias, {}).update(found)
    except Exception as error:
        return {}, told(error)
    return counts, ""


def _put_together(wanted: Wanted, stores: list[StoreState], unknown: str) -> Listing:
    found = [store.found for store in stores if store.found is not None]
    count = sum(one.count for one in found)
    more = any(one.more for one in found) or count > MAX_LISTED
    count = min(count, MAX_LISTED)
    pages = max(-(-count // wanted.size), 1)
    value: Callable[[Entry], str | float] = SORTS[wanted.sort]
    merged = heapq.merge(*[one.entries for one in found], key=value, reverse=wanted.descending)
    first = (wanted.page - 1) * wanted.size
    return Listing(
        wanted=wanted,
        entries=list(islice(merged, first, min(first + wanted.size, MAX_LISTED))),
        count=count,
        more=more,
        pages=pages,
        stores=stores,
        waiters_unknown=unknown,
    )
