"""Who waits for which lock: those who have for a second or longer tell of it themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping

from django.db.models import Count

from ..backends.base import BaseBackend
from ..claims import to_us
from ..models import LockWaiter
from .entries import MAX_LISTED

# By alias and name, how many wait.
Counts = Mapping[str, Mapping[str, int]]


def counts(database: str) -> dict[str, dict[str, int]]:
    """How many wait, by alias and key; of very many keys, of those with most."""
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


def waiters_of(backend: BaseBackend, name: str, limit: int) -> list[LockWaiter]:
    """Who waits for the key, the longest first."""
    return list(
        LockWaiter.objects.using(backend.params.history_database)
        .filter(backend=backend.alias, key=name, valid_until__gt=to_us(time.time()))
        .order_by("since", "owner_id")[:limit]
    )
