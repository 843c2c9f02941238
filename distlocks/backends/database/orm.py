"""What rows say, and what time it is, through the ORM."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.db.models import F, QuerySet, Value
from django.db.models.functions import Now

from ...claims import EPOCH, MICROSECOND, Holder, Request, from_us
from ...models import Lock, LockHolder
from .channels import Session


def values_of(request: Request) -> dict[str, Any]:
    """What a row says of who has asked for its claim."""
    return {
        "owner_id": request.owner_id,
        "host": request.host,
        "pid": request.pid,
        "thread": request.thread,
        "label": request.label,
        "metadata": dict(request.metadata),
    }


def extend_live(live: QuerySet[Any], now: int, ttl_us: int, min_hold_us: int) -> int:
    """Make a live claim last until max(now + ttl, acquired + minimum hold); how many it was."""
    until = now + ttl_us
    if not min_hold_us:
        return live.update(expires_at=until)
    # As two conditional updates: see Portable.acquire().
    cooling = until - min_hold_us
    return live.filter(acquired_at__lte=cooling).update(expires_at=until) or live.filter(
        acquired_at__gt=cooling
    ).update(expires_at=F("acquired_at") + Value(min_hold_us))


def now_us(session: Session) -> int:
    """The server's clock in microseconds, as of the beginning of a statement of its own."""
    connection = session.wrapper
    if connection.vendor == "mysql":
        # Now() is in the session's time zone there, which may have a summer time.
        moment: datetime = session.execute("SELECT UTC_TIMESTAMP(6)")[0][0]
        return _microseconds(moment.replace(tzinfo=UTC))
    compiler = Lock.objects.using(connection.alias).all().query.get_compiler(connection.alias)
    expression = Now()
    sql, params = compiler.compile(expression)
    value: Any = session.execute(f"SELECT {sql}{connection.features.bare_select_suffix}", params)[
        0
    ][0]
    converters = [
        *connection.ops.get_db_converters(expression),
        *expression.get_db_converters(connection),
    ]
    for convert in converters:
        value = convert(value, expression, connection)
    return _microseconds(value)


def _microseconds(moment: datetime) -> int:
    difference = moment - EPOCH
    return (difference.days * 86400 + difference.seconds) * MICROSECOND + difference.microseconds


def holder_of(row: Lock | LockHolder, now: int) -> Holder:
    released = isinstance(row, LockHolder) and row.released_at
    return Holder(
        key=row.key,
        owner_id="" if released else row.owner_id,
        fencing_token=row.fencing_token,
        since=from_us(row.acquired_at),
        remaining=(row.expires_at - now) / MICROSECOND,
        host=row.host,
        pid=row.pid,
        thread=row.thread,
        label=row.label,
        metadata=row.metadata,
        mode=row.mode,
    )
