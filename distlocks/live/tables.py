"""The locks of a database backend, sorted and filtered where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.db.models import Count, F, Q, QuerySet, Value, Window
from django.db.models.functions import RowNumber

from ..backends.database import DatabaseBackend
from ..backends.database.orm import holder_of
from ..claims import EXCLUSIVE, MICROSECOND, Holder, to_us
from ..history.events import LAST
from ..keys import SEPARATOR
from ..models import Lock, LockHolder, LockQuerySet, StoreClock
from .entries import COOLING, MAX_LISTED, NAMED, Entry, Found, Wanted

# Where two are alike, the key decides.
ORDERS = {
    ("key", False): ("key",),
    ("key", True): ("-key",),
    ("age", False): ("-acquired_at", "key"),
    ("age", True): ("acquired_at", "key"),
    ("left", False): ("expires_at", "key"),
    ("left", True): ("-expires_at", "key"),
}
SEARCHED = ("key", "label", "host", "thread", "owner_id")


def find(
    backend: DatabaseBackend,
    wanted: Wanted,
    waited: Mapping[str, int] | None,
    strangers: Iterable[str] = (),
) -> Found:
    """The first of what is wanted.

    `waited` says how many wait for which key, if that is known; `strangers` are the prefixes of
    other backends' keys in the same table.
    """
    locks = _filtered(backend, wanted, waited or {}, strangers)
    limit = wanted.until
    if wanted.sort == "waiters":
        rows = _by_waiters(backend, locks, wanted, waited or {}, limit)
    else:
        order = ORDERS[wanted.sort, wanted.descending]
        rows = list(locks.order_by(*order)[:limit])
    count, more = len(rows), False
    if count == limit:
        count = locks.order_by().values("pk")[: MAX_LISTED + 1].count()
        more, count = count > MAX_LISTED, min(count, MAX_LISTED)
    # Of all rows: which of them are on the page is known when the other stores' are there too.
    several = _several(backend, [row.key for row in rows if row.mode != EXCLUSIVE])
    entries = [_entry(backend, row, several.get(row.key), waited) for row in rows]
    return Found(entries=entries, count=count, more=more)


def _filtered(
    backend: DatabaseBackend,
    wanted: Wanted,
    waited: Mapping[str, int],
    strangers: Iterable[str],
) -> LockQuerySet:
    locks = Lock.objects.using(backend.using).taken().annotate(now=StoreClock())
    if backend.prefix or wanted.below:
        below = wanted.below + SEPARATOR if wanted.below else ""
        locks = locks.filter(_begins_with(backend.prefix + below))
    for prefix in strangers:
        locks = locks.exclude(_begins_with(prefix))
    if wanted.mode == COOLING:
        locks = locks.filter(mode=EXCLUSIVE, owner_id="")
    elif wanted.mode == EXCLUSIVE:
        locks = locks.filter(mode=EXCLUSIVE).exclude(owner_id="")
    elif wanted.mode:
        locks = locks.filter(mode=wanted.mode)
    if wanted.longer_than:
        age = Value(to_us(wanted.longer_than))
        locks = locks.filter(acquired_at__lt=StoreClock() - age)
    if wanted.waited_for:
        locks = locks.filter(key__in=_full(backend, waited))
    for word in wanted.words:
        held = LockHolder.objects.using(backend.using).filter(
            _matches(word), expires_at__gt=StoreClock()
        )
        locks = locks.filter(_matches(word) | Q(key__in=held.values("key")))
    return locks


def _begins_with(prefix: str) -> Q:
    # A range, because LIKE is deaf to case on SQLite.
    return Q(key__gte=prefix, key__lt=prefix + LAST)


def _matches(word: str) -> Q:
    return Q(*[(f"{name}__icontains", word) for name in SEARCHED], _connector=Q.OR)


def _full(backend: DatabaseBackend, names: Iterable[str]) -> list[str]:
    return [backend.prefix + name for name in names]


def _by_waiters(
    backend: DatabaseBackend,
    locks: QuerySet[Lock],
    wanted: Wanted,
    waited: Mapping[str, int],
    limit: int,
) -> list[Lock]:
    """Few keys are waited for: those are sorted here, the others come before or behind them."""
    keys = _full(backend, waited)
    of = dict(zip(keys, waited.values(), strict=True))
    first = list(locks.filter(key__in=keys).order_by("key"))
    first.sort(key=lambda row: of[row.key], reverse=wanted.descending)
    rest = list(locks.exclude(key__in=keys).order_by("key")[:limit])
    return [*first, *rest][:limit] if wanted.descending else [*rest, *first][:limit]


def _several(
    backend: DatabaseBackend, keys: list[str]
) -> dict[str, tuple[int, tuple[Holder, ...]]]:
    """How many have each of these keys, and the first of them."""
    if not keys:
        return {}
    rows = (
        LockHolder.objects.using(backend.using)
        .filter(key__in=keys, expires_at__gt=StoreClock())
        .annotate(
            now=StoreClock(),
            place=Window(RowNumber(), partition_by=F("key"), order_by=F("fencing_token").asc()),
            among=Window(Count("id"), partition_by=F("key")),
        )
        .filter(place__lte=NAMED)
        .order_by("key", "fencing_token")
    )
    found: dict[str, tuple[int, tuple[Holder, ...]]] = {}
    for row in rows:
        _, holders = found.get(row.key, (0, ()))
        holder = backend.public_holder(holder_of(row, row.now))
        found[row.key] = (row.among, (*holders, holder))
    return found


def _entry(
    backend: DatabaseBackend,
    row: Lock,
    several: tuple[int, tuple[Holder, ...]] | None,
    waited: Mapping[str, int] | None,
) -> Entry:
    now: int = row.now  # type: ignore[attr-defined]
    name = row.key.removeprefix(backend.prefix)
    if row.mode == EXCLUSIVE:
        count = 1
        holders: tuple[Holder, ...] = (backend.public_holder(holder_of(row, now)),)
    else:
        count, holders = several or (0, ())
    return Entry(
        alias=backend.alias,
        name=name,
        mode=COOLING if row.cooling_down else row.mode,
        holders=holders,
        count=count,
        age=(now - row.acquired_at) / MICROSECOND,
        left=(row.expires_at - now) / MICROSECOND,
        waiters=None if waited is None else waited.get(name, 0),
    )
