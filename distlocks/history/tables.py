"""How the history gets into its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import connections, transaction
from django.db.models import F

from ..patterns import pattern_of
from .rollups import COUNTED, Cell, CellKey

if TYPE_CHECKING:
    from ..facts import Fact
    from ..models import LockWaiter

# Rows of one statement.
BATCH = 200

KEY_COLUMNS = ("span", "began", "backend", "pattern")
# Invariant: what several processes count of the same minute is added up, whoever comes first.
ADD = "INSERT INTO {table} ({columns}) VALUES {rows} {on_conflict}"
ON_CONFLICT = {
    "postgresql": ("ON CONFLICT ({keys}) DO UPDATE SET ", "{c} = {table}.{c} + excluded.{c}"),
    "sqlite": ("ON CONFLICT ({keys}) DO UPDATE SET ", "{c} = {table}.{c} + excluded.{c}"),
    "mysql": ("ON DUPLICATE KEY UPDATE ", "{c} = {c} + VALUES({c})"),
}


def moment(at: float) -> datetime:
    """Seconds since the epoch as the column wants it."""
    return datetime.fromtimestamp(at, UTC) if settings.USE_TZ else datetime.fromtimestamp(at)


def prepare(using: str) -> None:
    """Have what is written committed, also where the settings say that users commit by hand."""
    connection = connections[using]
    if not (connection.settings_dict["AUTOCOMMIT"] or connection.in_atomic_block):
        connection.set_autocommit(True)


def write_events(using: str, facts: Iterable[Fact]) -> None:
    """Add a row for each."""
    from ..models import LockEvent

    rows = [
        LockEvent(
            at=moment(fact.at),
            kind=fact.kind,
            backend=fact.alias,
            key=fact.name,
            pattern=fact.pattern or pattern_of(fact.name),
            fencing_token=fact.fencing_token,
            other=asdict(fact.other) if fact.other is not None else {},
            waited=fact.waited,
            held=fact.held,
            reason=fact.reason[:500],
            **asdict(fact.who),
        )
        for fact in facts
    ]
    LockEvent.objects.using(using).bulk_create(rows, batch_size=BATCH)


def add_up(using: str, cells: Sequence[tuple[CellKey, Cell]]) -> None:
    """Add what was counted to what is there."""
    from ..models import HOLD_COLUMNS, WAIT_COLUMNS, LockRollup

    connection = connections[using]
    added = (*COUNTED, "wait_seconds", "hold_seconds", *WAIT_COLUMNS, *HOLD_COLUMNS)
    rows: list[tuple[Any, ...]] = [
        (
            *(key.span, key.began, key.alias, key.pattern),
            *[cell.counts[name] for name in COUNTED],
            *(cell.wait_seconds, cell.hold_seconds),
            *cell.waited,
            *cell.held,
        )
        for key, cell in cells
    ]
    if connection.vendor not in ON_CONFLICT:
        _add_one_by_one(using, rows, added)
        return
    quote = connection.ops.quote_name
    table = quote(LockRollup._meta.db_table)
    begin, each = ON_CONFLICT[connection.vendor]
    on_conflict = begin.format(keys=", ".join(KEY_COLUMNS)) + ", ".join(
        [each.format(c=column, table=table) for column in added]
    )
    columns = KEY_COLUMNS + added
    marks = f"({', '.join(['%s'] * len(columns))})"
    with transaction.atomic(using=using), connection.cursor() as cursor:
        for at in range(0, len(rows), BATCH):
            page = rows[at : at + BATCH]
            cursor.execute(
                ADD.format(
                    table=table,
                    columns=", ".join(columns),
                    rows=", ".join([marks] * len(page)),
                    on_conflict=on_conflict,
                ),
                [value for row in page for value in row],
            )


def _add_one_by_one(using: str, rows: Iterable[tuple[Any, ...]], added: Sequence[str]) -> None:
    from ..models import LockRollup

    objects = LockRollup.objects.using(using)
    for row in rows:
        of = dict(zip(KEY_COLUMNS, row, strict=False))
        values = dict(zip(added, row[len(KEY_COLUMNS) :], strict=True))
        with transaction.atomic(using=using):
            objects.get_or_create(**of)
            objects.filter(**of).update(**{name: F(name) + value for name, value in values.items()})


def publish(using: str, waiters: Sequence[LockWaiter], gone: Iterable[str]) -> None:
    """Tell who waits, and that these owner ids do not any more."""
    from ..models import LockWaiter

    objects = LockWaiter.objects.using(using)
    gone = list(gone)
    for at in range(0, len(gone), BATCH):
        objects.filter(owner_id__in=gone[at : at + BATCH]).delete()
    if waiters:
        names = [field.name for field in LockWaiter._meta.fields if not field.primary_key]
        target: dict[str, Any] = {}
        if connections[using].features.supports_update_conflicts_with_target:
            target["unique_fields"] = ["owner_id"]
        objects.bulk_create(
            waiters, batch_size=BATCH, update_conflicts=True, update_fields=names, **target
        )
