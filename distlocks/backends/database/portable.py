"""Any database that Django speaks, through the ORM: several statements per verb, same promises."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from django.db import IntegrityError, connections, transaction
from django.db.models import F, QuerySet, Value

from ...claims import EXCLUSIVE, Holder, Request
from ...models import Lock, LockAuthority
from .channels import OwnThread, Session
from .dialect import Batch, Dialect, Freed, Held, Tables, Taken, Wanted, held_by
from .orm import extend_live, holder_of, now_us, values_of
from .portable_several import PortableSeveral


class Portable(Dialect):
    """The ORM path, for databases without a dialect of their own.

    The server's clock is read before the conditional update. A wait on the row in between makes
    what was computed from it older than the truth, which is the safe side everywhere: an expired
    lease may look live for the length of the wait, and a lease granted is shorter by it, still
    longer than its holder trusts it (the holder counts from before the clock was read). Tokens
    are computed in the update itself.
    """

    def __init__(self, alias: str, tables: Tables) -> None:
        super().__init__(alias, tables)
        self.one_writer = connections[alias].vendor == "sqlite"

    def channel(self) -> OwnThread:
        return OwnThread(self.alias)

    @cached_property
    def several(self) -> PortableSeveral:
        return PortableSeveral(self.alias)

    def _locks(self, **filters: Any) -> QuerySet[Lock]:
        return Lock.objects.using(self.alias).filter(**filters)

    def has_authority(self, session: Session, authority: tuple[str, int]) -> bool:
        name, epoch = authority
        rows = LockAuthority.objects.using(self.alias).select_for_update()
        return rows.filter(name=name, epoch=epoch, phase="db").first() is not None

    def acquire(self, session: Session, key: str, request: Request) -> Taken | Held:
        authority = request.authority
        if authority is None:
            return self._acquire(session, key, request)
        return self.all_or_none(
            session,
            lambda: (
                self._acquire(session, key, request)
                if self.has_authority(session, authority)
                else Held()
            ),
        )

    def _acquire(self, session: Session, key: str, request: Request) -> Taken | Held:
        now = now_us(session)
        row = self._locks(key=key).first()
        if row is not None and row.expires_at > now and row.owner_id != request.owner_id:
            return held_by(holder_of(row, now))
        values = {
            **values_of(request),
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
        expired = holder_of(row, now) if row.owner_id and row.mode == EXCLUSIVE else None
        return Taken(fencing_token=token.get(), acquired_us=now, expired=expired)

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
            if extend_live(mine, now, one.ttl_us, one.min_hold_us):
                extended.add((one.key, one.owner_id))
        return extended, set()

    def holders(self, session: Session, prefix: str, limit: int | None) -> list[Holder]:
        now = now_us(session)
        live = self._locks(key__startswith=prefix, expires_at__gt=now, mode=EXCLUSIVE).order_by(
            "key"
        )
        # LIKE ignores case on some databases.
        rows = [row for row in live if row.key.startswith(prefix)]
        return [holder_of(row, now) for row in rows[:limit]]

    def force_release(self, session: Session, key: str) -> tuple[Holder | None, bool]:
        now = now_us(session)
        row = self._locks(key=key, expires_at__gt=now, mode=EXCLUSIVE).first()
        if row is None:
            return None, False
        same = self._locks(key=key, fencing_token=row.fencing_token)
        # The token goes up, so that the old holder can tell this from a release of its own.
        if not same.update(owner_id="", fencing_token=F("fencing_token") + 1, expires_at=0):
            return None, False
        return holder_of(row, now), False

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
            expired = [holder_of(row, now) for row in left_behind]
            return Batch(
                examined=len(keys), last_key=keys[-1], expired=expired, deleted=old.count()
            )
        # Each statement checks the expiry again: a row taken meanwhile is left alone.
        expired = [
            holder_of(row, now)
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
