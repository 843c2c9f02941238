"""Stores whose history is kept, each in a database of its own kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from distlocks import locks
from distlocks.history.journal import journal
from distlocks.history.waits import waits
from distlocks.models import LockEvent, LockRollup, LockWaiter
from distlocks.testing import flush_history
from tests.servers import session

# By the alias of the locks, the database of their history.
KEPT_IN = {"default": "default", "postgres": "postgres", "mariadb": "mariadb", "redis": "default"}


class History:
    """What is known of an alias' locks."""

    def __init__(self, alias: str, using: str) -> None:
        self.alias = alias
        self.using = using

    def events(self, key: str, *kinds: str) -> list[LockEvent]:
        """What has happened to a key, in order; only of some kinds."""
        flush_history()
        found = LockEvent.objects.using(self.using).filter(key=key).order_by("id")
        return [event for event in found if not kinds or event.kind in kinds]

    def kinds(self, key: str) -> list[str]:
        return [event.kind for event in self.events(key)]

    def counted(self, pattern: str, span: int = 3600) -> dict[str, Any]:
        """What has been counted of a pattern this hour, or in its minutes together."""
        flush_history()
        rows = LockRollup.objects.using(self.using).filter(
            backend=self.alias, pattern=pattern, span=span
        )
        total: dict[str, Any] = {}
        for row in rows.values():
            for name, value in row.items():
                if name not in ("id", "backend", "pattern", "span", "began"):
                    total[name] = total.get(name, 0) + value
        return total

    def waiters(self) -> list[LockWaiter]:
        return list(LockWaiter.objects.using(self.using))


@pytest.fixture(params=KEPT_IN)
def history(databases: None, request: pytest.FixtureRequest) -> Iterator[History]:
    """The history of one alias, whose locks are called "default" in the test."""
    session.start_for(request.param)
    entry = settings.DISTLOCKS[request.param]
    using = KEPT_IN[request.param]
    kept = {**entry, "HISTORY_DAYS": 30, "HISTORY_DATABASE": using}
    with override_settings(DISTLOCKS={"default": kept}):
        for model in (LockEvent, LockRollup, LockWaiter):
            model.objects.using(using).delete()
        journal._reset()
        waits._reset()
        if locks["default"].supports_quarantine:
            # The server's memory is new.
            locks["default"].quarantine(end=True)
        yield History("default", using)
        locks.close_all()
