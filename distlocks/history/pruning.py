"""How the history is kept from growing: what is older than it is to be kept for goes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import Q
from django.utils import timezone

from ..claims import to_us
from .places import Unreadable, kept_days, reading
from .rollups import HOUR, MINUTE

if TYPE_CHECKING:
    from django.db.models import Model, QuerySet

# Days for which minutes are kept; what is shown of a longer time is shown by the hour.
MINUTES_KEPT = 3.0
DAY = 86400.0
# Seconds after which who waits is certainly gone: its row holds for a few, by its own clock.
WAITER_KEPT = DAY
# Keys in one statement: more than some databases take of parameters.
PAGE = 500


@dataclass(slots=True)
class Pruned:
    """What was deleted from one database, or would be."""

    database: str
    events: int = 0
    minutes: int = 0
    hours: int = 0
    waiters: int = 0

    def __str__(self) -> str:
        return (
            f"{self.events} events, {self.minutes} minutes and {self.hours} hours of statistics, "
            f"{self.waiters} who waited"
        )


def prune(
    aliases: Iterable[str] | None = None, *, batch_size: int = 1000, dry_run: bool = False
) -> Iterator[Pruned]:
    """Delete what is too old, in each database of these aliases' history, or in every one.

    What is left of aliases that are not configured goes with what is kept longest. Raises
    Unreadable; a database without the tables in which nothing is to be kept is passed over.
    """
    chosen = None if aliases is None else set(aliases)
    for database, days in kept_days().items():
        if chosen is not None and chosen.isdisjoint(days):
            continue
        try:
            yield _Broom(database, batch_size, dry_run).prune(days)
        except Unreadable as error:
            if any(days.values()) or not error.trouble.tables_missing:
                raise


class _Broom:
    """One database, on its way to be cleaned."""

    def __init__(self, database: str, batch_size: int, dry_run: bool) -> None:
        self.database = database
        self.batch_size = batch_size
        self.dry_run = dry_run

    def prune(self, days: dict[str, float]) -> Pruned:
        """Delete what is older than `days`, by the alias of its backend."""
        from ..models import LockWaiter

        longest = max(days.values())
        pruned = Pruned(self.database)
        shorter = [alias for alias, kept in days.items() if kept < longest]
        for alias in shorter:
            self._prune(pruned, days[alias], Q(backend=alias))
        self._prune(pruned, longest, ~Q(backend__in=shorter) if shorter else Q())
        gone = to_us(time.time() - WAITER_KEPT)
        waiters = LockWaiter.objects.using(self.database).filter(valid_until__lt=gone)
        pruned.waiters = self._delete(waiters.order_by("pk"))
        return pruned

    def _prune(self, pruned: Pruned, days: float, of: Q) -> None:
        from ..models import LockEvent, LockRollup

        events = LockEvent.objects.using(self.database).filter(of)
        rollups = LockRollup.objects.using(self.database).filter(of)
        now = timezone.now()
        pruned.events += self._delete(
            events.filter(at__lt=now - timedelta(days=days)).order_by("at", "id")
        )
        for span, kept in ((MINUTE, min(days, MINUTES_KEPT)), (HOUR, days)):
            before = int(time.time() - kept * DAY)
            deleted = self._delete(rollups.filter(span=span, began__lt=before).order_by("began"))
            if span == MINUTE:
                pruned.minutes += deleted
            else:
                pruned.hours += deleted

    def _delete(self, rows: QuerySet[Any]) -> int:
        """Delete them, each statement by itself; how many that were."""
        model: type[Model] = rows.model
        with reading(self.database, model._meta.db_table):
            if self.dry_run:
                return rows.order_by().count()
            return sum(self._batches(rows))

    def _batches(self, rows: QuerySet[Any]) -> Iterator[int]:
        keys = list(rows.values_list("pk", flat=True)[: self.batch_size])
        while keys:
            for at in range(0, len(keys), PAGE):
                named = rows.model._base_manager.using(self.database).filter(
                    pk__in=keys[at : at + PAGE]
                )
                # No signals, no collector: nothing refers to these rows.
                yield named._raw_delete(self.database)
            if len(keys) < self.batch_size:
                return
            keys = list(rows.values_list("pk", flat=True)[: self.batch_size])
