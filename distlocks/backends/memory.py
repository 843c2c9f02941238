"""Locks in the memory of this process: for tests, and for programs of a single process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import ClassVar

from .. import clock
from ..claims import (
    EXCLUSIVE,
    MICROSECOND,
    Claim,
    Denial,
    Extended,
    Extension,
    Grant,
    Holder,
    Present,
    Request,
    Swept,
    from_us,
    next_token,
    refusal,
    to_us,
)
from ..conf import Params
from . import promises
from .base import RESERVED_LONGER, BaseBackend
from .wakeups import Wakeups

# Claims that have ended are remembered for so long, so that a release that is sent twice can tell
# its own first one from the loss of the lease.
REMEMBERED_US = 10 * MICROSECOND


@dataclass(slots=True)
class _Held:
    """One claim on a key, live or not."""

    claim: Claim
    request: Request
    fencing_token: int
    acquired_us: int
    expires_us: int
    released_us: int = 0

    def end(self, now: int, min_hold_us: int) -> None:
        """Note its release: it lasts until its minimum hold has passed."""
        self.released_us = now
        cooled = self.acquired_us + min_hold_us
        # The clock may have been set back since.
        self.expires_us = cooled if min_hold_us and cooled > now else 0


@dataclass(slots=True)
class _Row:
    """A key. Exclusive claims are among the others here: at most one of them is live."""

    fencing_token: int = 0
    held: dict[str, _Held] = field(default_factory=dict)
    reserved_by: str = ""
    reserved_until_us: int = 0

    def live(self, now: int) -> list[_Held]:
        return [one for one in self.held.values() if one.expires_us > now]

    def present(self, owner_id: str, now: int) -> Present:
        """What somebody else's claim finds."""
        others = [
            one for one in self.live(now) if one.request.owner_id != owner_id or one.released_us
        ]
        ends = sorted(one.expires_us for one in others)
        modes = {one.claim.mode for one in others}
        return Present(
            now=now,
            exclusive_until=ends[-1] if EXCLUSIVE in modes else 0,
            others=len(others),
            mode=next(iter(modes), ""),
            soonest=ends[0] if ends else 0,
            latest=ends[-1] if ends else 0,
            reserved_until=0 if self.reserved_by == owner_id else self.reserved_until_us,
        )

    def forget(self, now: int) -> None:
        """Drop the claims that ended a while ago."""
        for owner_id, one in list(self.held.items()):
            if max(one.expires_us, one.released_us) <= now - REMEMBERED_US:
                del self.held[owner_id]


class MemoryBackend(BaseBackend):
    """Excludes the threads and tasks of one process from each other. Nothing outlives it.

    Keeps the whole contract, fencing tokens and expiry included, so that tests may run on it what
    runs on a real store in production.
    """

    supports_wakeups: ClassVar[bool] = True
    supports_shared: ClassVar[bool] = True
    supports_permits: ClassVar[bool] = True
    supports_tree_keys: ClassVar[bool] = True
    supports_sweep: ClassVar[bool] = True
    promise = promises.MEMORY

    def __init__(self, alias: str, params: Params) -> None:
        super().__init__(alias, params)
        self._mutex = threading.Lock()
        self._rows: dict[str, _Row] = {}
        self._wakeups = Wakeups()

    def try_acquire(self, request: Request) -> Grant | Denial:
        with self._mutex:
            now = clock.current().wall_us()
            for claim in request.claims:
                if denial := self._denial(claim, request.owner_id, now):
                    return denial
            taken = [self._take(claim, request, now) for claim in request.claims]
            return Grant(
                claims=request.claims,
                owner_id=request.owner_id,
                fencing_tokens=tuple(one.fencing_token for one in taken),
                acquired_us=taken[0].acquired_us,
                min_hold_us=request.min_hold_us,
            )

    def _denial(self, claim: Claim, owner_id: str, now: int) -> Denial | None:
        row = self._rows.get(claim.key)
        if row is None:
            return None
        own = row.held.get(owner_id)
        if own is not None and own.expires_us > now and not own.released_us:
            return None
        refused = refusal(claim, row.present(owner_id, now))
        if refused is None:
            return None
        return Denial(
            key=claim.key,
            remaining=refused.remaining / MICROSECOND,
            holders=tuple(self._holder(one, now) for one in row.live(now)),
            starves=owner_id if refused.starves else "",
            version=None if claim.mode == EXCLUSIVE else row.fencing_token,
        )

    def _take(self, claim: Claim, request: Request, now: int) -> _Held:
        row = self._rows.setdefault(claim.key, _Row())
        owner_id = request.owner_id
        own = row.held.get(owner_id)
        if own is not None and own.expires_us > now and not own.released_us:
            own.expires_us = now + request.hold_us
            return own
        row.forget(now)
        # Whose it was has lost it: all of it, or what was exclusive.
        for other, one in list(row.held.items()):
            if EXCLUSIVE in (claim.mode, one.claim.mode):
                del row.held[other]
        if claim.mode == EXCLUSIVE:
            row.reserved_until_us = 0
        elif row.reserved_by == owner_id and row.reserved_until_us:
            row.reserved_until_us = 0
            # Who was kept out by the reservation may go with us.
            self._wakeups.wake(claim.key)
        row.fencing_token = next_token(row.fencing_token, now)
        own = row.held[owner_id] = _Held(
            claim=claim,
            request=request,
            fencing_token=row.fencing_token,
            acquired_us=now,
            expires_us=now + request.hold_us,
        )
        return own

    def abandon(self, request: Request) -> None:
        self._free(request.keys, request.owner_id)

    def release(self, grant: Grant) -> bool:
        return self._free(grant.keys, grant.owner_id, grant.fencing_tokens, grant.min_hold_us)

    def _free(
        self,
        keys: Sequence[str],
        owner_id: str,
        tokens: Sequence[int] = (),
        min_hold_us: int = 0,
    ) -> bool:
        """Free the owner's keys; whether all were, now or by an earlier release of these tokens."""
        freed, ours = [], True
        with self._mutex:
            now = clock.current().wall_us()
            for key, token in zip_longest(keys, tokens):
                row = self._rows.get(key)
                own = row.held.get(owner_id) if row else None
                if row is None or own is None or token not in (None, own.fencing_token):
                    ours = False
                elif own.released_us:
                    pass
                elif own.claim.mode != EXCLUSIVE and own.expires_us <= now:
                    ours = False
                else:
                    own.end(now, min_hold_us)
                    if own.claim.mode != EXCLUSIVE:
                        row.fencing_token += 1
                    freed.append(key)
        for key in freed:
            self._wakeups.wake(key)
        return ours

    def extend(self, extensions: Sequence[Extension]) -> Extended:
        extended, lost = set(), set()
        with self._mutex:
            now = clock.current().wall_us()
            for extension in extensions:
                grant = extension.grant
                held = [
                    own
                    for key, token in zip(grant.keys, grant.fencing_tokens, strict=True)
                    if (row := self._rows.get(key))
                    and (own := row.held.get(grant.owner_id))
                    and own.fencing_token == token
                    and own.expires_us > now
                    and not own.released_us
                ]
                if len(held) < len(grant.keys):
                    lost.add(grant.owner_id)
                    continue
                for own in held:
                    cooled = own.acquired_us + grant.min_hold_us if grant.min_hold_us else 0
                    own.expires_us = max(now + extension.ttl_us, cooled)
                extended.add(grant.owner_id)
        return Extended(extended=frozenset(extended), lost=frozenset(lost))

    def holders(self, prefix: str = "", *, limit: int | None = None) -> list[Holder]:
        with self._mutex:
            now = clock.current().wall_us()
            found = [
                self._holder(one, now)
                for key, row in sorted(self._rows.items())
                if key.startswith(self.prefix + prefix)
                for one in row.live(now)
            ]
            return found[:limit]

    def force_release(self, key: str) -> list[Holder]:
        with self._mutex:
            now = clock.current().wall_us()
            row = self._rows.get(self.prefix + key)
            if row is None or not row.live(now):
                return []
            held = [self._holder(one, now) for one in row.live(now)]
            row.held.clear()
            row.fencing_token += 1
        self._wakeups.wake(self.prefix + key)
        return held

    def sweep(
        self, *, older_than: float, batch_size: int, dry_run: bool = False
    ) -> Iterator[Swept]:
        with self._mutex:
            now = clock.current().wall_us()
            examined = len(self._rows)
            expired, forgotten = [], []
            for key, row in self._rows.items():
                left_behind = [
                    owner_id
                    for owner_id, one in row.held.items()
                    if one.expires_us <= now and not one.released_us
                ]
                expired += [self._holder(row.held[owner_id], now) for owner_id in left_behind]
                if not row.live(now) and row.fencing_token <= now - to_us(older_than):
                    forgotten.append(key)
                if not dry_run:
                    for owner_id in left_behind:
                        del row.held[owner_id]
                    row.fencing_token += bool(left_behind)
                    row.forget(now)
            if not dry_run:
                for key in forgotten:
                    del self._rows[key]
        yield Swept(examined=examined, expired=tuple(expired), deleted=len(forgotten))

    def wait(self, denial: Denial, until: float, attempt: int) -> None:
        with self._wakeups.ticket(denial.key) as ticket:
            if self._stays_denied(denial, until):
                ticket.wait(until)

    async def await_(self, denial: Denial, until: float, attempt: int) -> None:
        with self._wakeups.ticket(denial.key) as ticket:
            if self._stays_denied(denial, until):
                await ticket.wait_async(until)

    def _stays_denied(self, denial: Denial, until: float) -> bool:
        """Reserve the asker's turn where needed; whether the key is still as it was."""
        with self._mutex:
            now = clock.current().wall_us()
            row = self._rows.get(denial.key)
            if row is None or not (row.live(now) or row.reserved_until_us > now):
                return False
            if denial.starves and (
                row.reserved_until_us <= now or row.reserved_by == denial.starves
            ):
                row.reserved_by = denial.starves
                life = max(until - clock.lease_now(), 0.0) + RESERVED_LONGER
                row.reserved_until_us = now + to_us(life)
            return denial.version is None or denial.version == row.fencing_token

    async def atry_acquire(self, request: Request) -> Grant | Denial:
        return self.try_acquire(request)

    async def aabandon(self, request: Request) -> None:
        self.abandon(request)

    async def arelease(self, grant: Grant) -> bool:
        return self.release(grant)

    async def aextend(self, extensions: Sequence[Extension]) -> Extended:
        return self.extend(extensions)

    def _holder(self, held: _Held, now: int) -> Holder:
        request = held.request
        return Holder(
            key=self.public_key(held.claim.key),
            owner_id="" if held.released_us else request.owner_id,
            fencing_token=held.fencing_token,
            since=from_us(held.acquired_us),
            remaining=(held.expires_us - now) / MICROSECOND,
            host=request.host,
            pid=request.pid,
            thread=request.thread,
            label=request.label,
            metadata=request.metadata,
            mode=held.claim.mode,
        )
