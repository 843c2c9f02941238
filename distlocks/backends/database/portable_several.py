"""Claims that several may have on one key, through the ORM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Count, F, Max, Min, Q, QuerySet, Value

from ...claims import EXCLUSIVE, Claim, Holder, Request
from ...models import Lock, LockHolder
from .channels import Session
from .dialect import Taken, Wanted
from .orm import extend_live, holder_of, now_us, values_of
from .several import REMEMBERED_US, Latched, Seen, Several


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
                **values_of(request),
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
            extend_live(live, now, ttl_us, min_hold_us)

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
        return [holder_of(claim, now) for claim in live[:limit]]

    def holders(self, session: Session, prefix: str, limit: int | None) -> list[Holder]:
        now = now_us(session)
        live = self._claims(key__startswith=prefix, expires_at__gt=now)
        # LIKE ignores case on some databases.
        claims = [claim for claim in live if claim.key.startswith(prefix)]
        return [holder_of(claim, now) for claim in claims[:limit]]

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
        return [holder_of(row, now) for row in rows if not row.released_at], bool(rows)

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
