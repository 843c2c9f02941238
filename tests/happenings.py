"""Makes rows of the history."""

import time
from datetime import UTC, datetime
from typing import Any

from distlocks import facts
from distlocks.histogram import bucket
from distlocks.history.rollups import HOUR, MINUTE
from distlocks.models import LockEvent, LockRollup
from distlocks.patterns import pattern_of


def event(
    kind: str = facts.CONTENDED, *, ago: float = 60, using: str = "default", **fields: Any
) -> LockEvent:
    """One that happened so many seconds ago."""
    return event_at(time.time() - ago, kind, using=using, **fields)


def event_at(at: float, kind: str, *, using: str = "default", **fields: Any) -> LockEvent:
    key = fields.pop("key", "order:42")
    values = {
        "backend": "default",
        "pattern": pattern_of(key),
        "owner_id": "owner-1",
        "host": "web-1",
        "pid": 4711,
        "thread": "MainThread",
    }
    moment = datetime.fromtimestamp(at, UTC)
    return LockEvent.objects.using(using).create(at=moment, kind=kind, key=key, **(values | fields))


def counted(
    *,
    at: float,
    span: int = MINUTE,
    pattern: str = "order:*",
    backend: str = "default",
    using: str = "default",
    waits: tuple[float, ...] = (),
    holds: tuple[float, ...] = (),
    **counts: int,
) -> None:
    """What was counted in one minute or hour, of the pattern and in all."""
    began = int(at) // span * span
    lengths: dict[str, int] = {}
    for name, values in (("wait", waits), ("hold", holds)):
        for value in values:
            column = f"{name}_{bucket(value)}"
            lengths[column] = lengths.get(column, 0) + 1
    seconds = {"wait_seconds": sum(waits), "hold_seconds": sum(holds)}
    added = {**lengths, **seconds, **counts}
    for name in {pattern, ""}:
        row, _ = LockRollup.objects.using(using).get_or_create(
            span=span, began=began, backend=backend, pattern=name
        )
        for column, value in added.items():
            setattr(row, column, getattr(row, column) + value)
        row.save(using=using)


def counted_in_both(*, ago: float = 0, **fields: Any) -> None:
    """The same in the minute and in the hour of so many seconds ago."""
    at = time.time() - ago
    for span in (MINUTE, HOUR):
        counted(at=at, span=span, **fields)
