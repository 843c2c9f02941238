"""Any database that Django speaks, through the ORM: several statements per verb, same promises."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from django.db import IntegrityError, connections, transaction
from django.db.models import Count, F, Max, Min, Q, QuerySet, Value
from django.db.models.functions import Now

from ...claims import EPOCH, EXCLUSIVE, MICROSECOND, Claim, Holder, Request, from_us
from ...models import Lock, LockHolder
from .channels import OwnThread, Session
from .dialect import Batch, Dialect, Freed, Held, Taken, Wanted, held_by
from .several import REMEMBERED_US, Latched, Seen, Several


class Portable(Dialect):
    """The ORM path, for databases without a dialect of their own.

    The server's clock is read before the conditional update. A wait on the row in between makes
    what was computed from it older than the truth, which is the safe side everywhere: an expired
    lease may look live for the length of the wait, and a lease granted is shorter by it, still
    longer than its holder trusts it (the holder counts from before the clock was read). Tokens
    are computed in the update itself.
    """

    def __init__(self, alias: str, table: str, holders_table: str) -> None:
        super().__init__(alias, table, holders_table)
        self.one_writer = connections[alias].vendor == "sqlite"

    def channel(self) -> OwnThread:
        return OwnThread(self.alias)

    @cached_property
    def several(self) -> PortableSeveral:
        return PortableSeveral(self.alias)

    def _locks(self, **filters: Any) -> QuerySet[Lock]:
        return Lock.objects.using(self.alias).filter(**filters)

    def acquire(self, session: Session, key: str, request: Request) -> Taken | Held:
        now = now_us(session)
        row = self._locks(key=key).first()
        if row is not None and row.expires_at > now and row.owner_id != request.owner_id:
            return held_by(_holder(row, now))
        values = {
            **_values(request),
            "expires_at": now + request.hold_us,
            "mode": EXCLUSIVE,
            "reserved_until": 0,
        }
        if row is None:
            return self._insert(key, now, values)
        if row.owner_id == request.owner_id and row.expires_at > now:
            mine = self._locks(key=key, owner_id=request.owner_id, expires_at__gt=now)
            if mine.update(expires_at=now + request.hold_us):
                return Taken(fencing_token=row.fencing_token, acquired_us=row.acquired_at)
            return Held()
        # max(stored + 1, now), as two conditional updates: GREATEST() of a column and a parameter
        # takes the wrong one where the driver binds parameters on the server.
        free = self._locks(key=key, expires_at__lte=now)
        values["acquired_at"] = now
        taken = free.filter(fencing_token__lt=now).update(
            **values, fencing_token=now
        ) or free.filter(fencing_token__gte=now).update(
            **values, fencing_token=F("fencing_token") + 1
        )
        if not taken:
            return Held()
        token = self._locks(key=key, owner_id=request.owner_id).values_list(
            "fencing_token", flat=True
        )
        return Taken(fencing_token=token.get(), acquired_us=now)

    def _insert(self, key: str, now: int, values: dict[str, Any]) -> Taken | Held:
        try:
            with transaction.atomic(using=self.alias):
                Lock.objects.using(self.alias).create(
                    key=key, acquired_at=now, fencing_token=now, **values
                )
        except IntegrityError:
            return Held()
        return Taken(fencing_token=now, acquired_us=now)

    def release(
        self, session: Session, key: str, owner_id: str, token: int | None, min_hold_us: int
    ) -> Freed:
        mine = self._locks(key=key, owner_id=owner_id)
        if token is not None:
            mine = mine.filter(fencing_token=token)
        if not min_hold_us:
            return Freed(ours=bool(mine.update(owner_id="", expires_at=0)))
        now = now_us(session)
        cooling = mine.filter(acquired_at__gt=now - min_hold_us)
        freed = cooling.update(
            owner_id="", expires_at=F("acquired_at") + Value(min_hold_us)
        ) or mine.update(owner_id="", expires_at=0)
        return Freed(ours=bool(freed))

    def extend(
        self, session: Session, wanted: Sequence[Wanted]
    ) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        now = now_us(session)
        extended = set()
        for one in wanted:
            mine = self._locks(
                key=one.key,
                owner_id=one.owner_id,
                fencing_token=one.fencing_token,
                expires_at__gt=now,
            )
            if _extend(mine, now, one.ttl_us, one.min_hold_us):
                extended.add((one.key, one.owner_id))
        return extended, set()

    def holders(self, session: Session, prefix: str, limit: int | None) -> list[Holder]:
        now = now_us(session)
        live = self._locks(key__startswith=prefix, expires_at__gt=now, mode=EXCLUSIVE).order_by(
            "key"
        )
        # LIKE ignores case on some databases.
        rows = [row for row in live if row.key.startswith(prefix)]
        return [_holder(row, now) for row in rows[:limit]]

    def force_release(self, session: Session, key: str) -> tuple[Holder | None, bool]:
        now = now_us(session)
        row = self._locks(key=key, expires_at__gt=now, mode=EXCLUSIVE).first()
        if row is None:
            return None, False
        same = self._locks(key=key, fencing_token=row.fencing_token)
        # The token goes up, so that the old holder can tell this from a release of its own.
        if not same.update(owner_id="", fencing_token=F("fencing_token") + 1, expires_at=0):
            return None, False
        return _holder(row, now), False

    def sweep(
        self, session: Session, after: str, batch_size: int, older_than_us: int, dry_run: bool
    ) -> Batch | None:
        span = self._locks(key__gt=after).order_by("key").values_list("key", flat=True)[:batch_size]
        keys = list(span)
        if not keys:
            return None
        now = now_us(session)
        dead = self._locks(key__gt=after, key__lte=keys[-1], expires_at__lte=now)
        old = dead.filter(fencing_token__lte=now - older_than_us)
        left_behind = dead.exclude(owner_id="")
        if dry_run:
            expired = [_holder(row, now) for row in left_behind]
            return Batch(
                examined=len(keys), last_key=keys[-1], expired=expired, deleted=old.count()
            )
        # Each statement checks the expiry again: a row taken meanwhile is left alone.
        expired = [
            _holder(row, now)
            for row in left_behind
            if left_behind.filter(key=row.key, owner_id=row.owner_id).update(
                owner_id="", fencing_token=F("fencing_token") + 1, expires_at=0
            )
        ]
        deleted, _ = old.delete()
        return Batch(examined=len(keys), last_key=keys[-1], expired=expired, deleted=deleted)

    def is_freed(self, session: Session, key: str, token: int) -> bool:
        return self._locks(key=key, owner_id="", fencing_token=token).exists()

    def is_taken(self, session: Session, key: str) -> bool:
        return self._locks(key=key, expires_at__gt=now_us(session)).exists()


class PortableSeveral(Several):
    """The ORM path of claims that several may have. The latch is an update of the key's row."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def _locks(self, **filters: Any) -> QuerySet[Lock]:
        return Lock.objects.using(self._alias).filter(**filters)

    def _claims(self, **filters: Any) -> QuerySet[LockHolder]:
        return LockHolder.objects.using(self._alias).filter(**filters)

    def latch(self, session: Session, key: str) -> Latched:
        # Every database locks the rows that it updates.
        while not self._locks(key=key).update(waiting_until=F("waiting_until")):
            try:
                with transaction.atomic(using=self._alias):
                    self._locks().create(key=key, fencing_token=0, acquired_at=0)
            except IntegrityError:
                continue
        return _latched(self._locks(key=key).get())

    def glance(self, session: Session, key: str, owner_id: str) -> tuple[Latched, Seen] | None:
        row = self._locks(key=key).first()
        return (_latched(row), self.look(session, key, owner_id)) if row else None

    def look(self, session: Session, key: str, owner_id: str) -> Seen:
        now = now_us(session)
        live = self._claims(key=key, expires_at__gt=now)
        own = live.filter(owner_id=owner_id, released_at=0).first()
        others = live.exclude(pk=own.pk) if own else live
        found = others.aggregate(
            count=Count("pk"),
            mode=Min("mode"),
            soonest=Min("expires_at"),
            latest=Max("expires_at"),
        )
        return Seen(
            now,
            found["count"],
            found["mode"] or "",
            found["soonest"] or 0,
            found["latest"] or 0,
            own.fencing_token if own else 0,
            own.acquired_at if own else 0,
        )

    def put(
        self, session: Session, claim: Claim, request: Request, taken: Taken, until_us: int
    ) -> None:
        self._claims().update_or_create(
            key=claim.key,
            owner_id=request.owner_id,
            defaults={
                **_values(request),
                "mode": claim.mode,
                "released_at": 0,
                "fencing_token": taken.fencing_token,
                "acquired_at": taken.acquired_us,
                "expires_at": until_us,
            },
        )

    def occupy(
        self,
        session: Session,
        claim: Claim,
        owner_id: str,
        *,
        last_token: int,
        since_us: int | None,
        until_us: int,
    ) -> None:
        row = self._locks(key=claim.key)
        row.filter(reserved_by=owner_id).update(reserved_until=0)
        if since_us is not None:
            row.update(acquired_at=since_us)
        row.update(
            **dict.fromkeys(("owner_id", "host", "thread", "label"), ""),
            pid=0,
            metadata={},
            mode=claim.mode,
            fencing_token=last_token,
            expires_at=until_us,
        )

    def end(
        self, session: Session, key: str, owner_id: str, token: int | None, min_hold_us: int
    ) -> bool:
        now = now_us(session)
        own = self._claims(key=key, owner_id=owner_id, released_at=0)
        # Nobody else can have come before the caller's transaction ends.
        if not session.in_callers_transaction:
            own = own.filter(expires_at__gt=now)
        if token is not None:
            own = own.filter(fencing_token=token)
        cooling = own.filter(acquired_at__gt=now - min_hold_us) if min_hold_us else own.none()
        return bool(
            cooling.update(released_at=now, expires_at=F("acquired_at") + Value(min_hold_us))
            or own.update(released_at=now, expires_at=0)
        )

    def has_ended(self, session: Session, key: str, owner_id: str, token: int) -> bool:
        return self._claims(
            key=key, owner_id=owner_id, fencing_token=token, released_at__gt=0
        ).exists()

    def settle(self, session: Session, key: str) -> bool:
        row = self._locks(key=key).exclude(mode=EXCLUSIVE)
        row.update(fencing_token=F("fencing_token") + 1)
        self.cover(session, [key])
        return False

    def latch_free(self, session: Session, keys: Sequence[str]) -> set[str]:
        # Not every database can skip rows.
        return {
            key for key in keys if self._locks(key=key).update(waiting_until=F("waiting_until"))
        }

    def prolong(
        self, session: Session, wanted: Sequence[Wanted], ttl_us: int, min_hold_us: int
    ) -> None:
        now = now_us(session)
        for one in wanted:
            live = self._claims(
                key=one.key, owner_id=one.owner_id, released_at=0, expires_at__gt=now
            )
            _extend(live, now, ttl_us, min_hold_us)

    def live(self, session: Session, wanted: Sequence[Wanted]) -> set[tuple[str, str]]:
        now = now_us(session)
        return {
            (one.key, one.owner_id)
            for one in wanted
            if self._claims(
                key=one.key, owner_id=one.owner_id, released_at=0, expires_at__gt=now
            ).exists()
        }

    def cover(self, session: Session, keys: Sequence[str]) -> None:
        now = now_us(session)
        for key in keys:
            latest = self._claims(key=key, expires_at__gt=now).aggregate(latest=Max("expires_at"))
            row = self._locks(key=key).exclude(mode=EXCLUSIVE)
            row.update(expires_at=latest["latest"] or 0)

    def remove(self, session: Session, key: str) -> None:
        self._claims(key=key).delete()

    def forget(self, session: Session, key: str) -> None:
        old = now_us(session) - REMEMBERED_US
        self._claims(key=key, expires_at__lte=old, released_at__lte=old).delete()

    def version(self, session: Session, key: str) -> int:
        now = now_us(session)
        row = self._locks(key=key).filter(Q(expires_at__gt=now) | Q(reserved_until__gt=now))
        return row.values_list("fencing_token", flat=True).first() or 0

    def on_key(self, session: Session, key: str, limit: int | None) -> list[Holder]:
        now = now_us(session)
        live = self._claims(key=key, expires_at__gt=now).order_by("fencing_token")
        return [_holder(claim, now) for claim in live[:limit]]

    def holders(self, session: Session, prefix: str, limit: int | None) -> list[Holder]:
        now = now_us(session)
        live = self._claims(key__startswith=prefix, expires_at__gt=now)
        # LIKE ignores case on some databases.
        claims = [claim for claim in live if claim.key.startswith(prefix)]
        return [_holder(claim, now) for claim in claims[:limit]]

    def reserve(self, session: Session, key: str, owner_id: str, life_us: int) -> None:
        now = now_us(session)
        row = self._locks(key=key, expires_at__gt=now).exclude(mode=EXCLUSIVE)
        row.filter(Q(reserved_until__lte=now) | Q(reserved_by=owner_id)).update(
            reserved_by=owner_id, reserved_until=now + life_us
        )

    def _ended(self, after: str, last: str, now: int) -> QuerySet[LockHolder]:
        return self._claims(key__gt=after, key__lte=last, expires_at__lte=now).filter(
            Q(released_at=0) | Q(released_at__lte=now - REMEMBERED_US)
        )

    def ended(self, session: Session, after: str, last: str) -> tuple[list[Holder], bool]:
        now = now_us(session)
        rows = list(self._ended(after, last, now))
        return [_holder(row, now) for row in rows if not row.released_at], bool(rows)

    def sweep(self, session: Session, after: str, last: str) -> list[Holder]:
        # What has ended never lives again.
        left_behind, _ = self.ended(session, after, last)
        self._ended(after, last, now_us(session)).delete()
        return left_behind


def _latched(row: Lock) -> Latched:
    return Latched(
        row.mode,
        row.fencing_token,
        row.expires_at,
        row.reserved_by,
        row.reserved_until,
        row.waiting_until,
    )


def _values(request: Request) -> dict[str, Any]:
    """What a row says of who has asked for its claim."""
    return {
        "owner_id": request.owner_id,
        "host": request.host,
        "pid": request.pid,
        "thread": request.thread,
        "label": request.label,
        "metadata": dict(request.metadata),
    }


def _extend(live: QuerySet[Any], now: int, ttl_us: int, min_hold_us: int) -> int:
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


def _holder(row: Lock | LockHolder, now: int) -> Holder:
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
