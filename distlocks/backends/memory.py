"""Locks in the memory of this process: for tests, and for programs of a single process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from .. import clock
from ..claims import (
    MICROSECOND,
    Denial,
    Extended,
    Extension,
    Grant,
    Holder,
    Request,
    Swept,
    from_us,
    to_us,
)
from ..conf import Params
from .base import BaseBackend
from .wakeups import Wakeups


@dataclass(slots=True)
class _Row:
    owner_id: str
    fencing_token: int
    acquired_us: int
    expires_us: int
    request: Request

    def clear(self) -> None:
        """Free it over its holder's head, who can tell so by the token."""
        self.owner_id, self.fencing_token, self.expires_us = "", self.fencing_token + 1, 0


class MemoryBackend(BaseBackend):
    """Excludes the threads and tasks of one process from each other. Nothing outlives it.

    Keeps the whole contract, fencing tokens and expiry included, so that tests may run on it what
    runs on a real store in production.
    """

    supports_wakeups: ClassVar[bool] = True
    supports_sweep: ClassVar[bool] = True

    def __init__(self, alias: str, params: Params) -> None:
        super().__init__(alias, params)
        self._mutex = threading.Lock()
        self._rows: dict[str, _Row] = {}
        self._wakeups = Wakeups()

    def try_acquire(self, request: Request) -> Grant | Denial:
        with self._mutex:
            now = clock.current().wall_us()
            for key in request.keys:
                row = self._rows.get(key)
                if row and row.expires_us > now and row.owner_id != request.owner_id:
                    return Denial(
                        key=key,
                        remaining=(row.expires_us - now) / MICROSECOND,
                        holder=self._holder(key, row, now),
                    )
            rows = [self._take(key, request, now) for key in request.keys]
            return Grant(
                keys=request.keys,
                owner_id=request.owner_id,
                fencing_tokens=tuple(row.fencing_token for row in rows),
                acquired_us=rows[0].acquired_us,
                min_hold_us=request.min_hold_us,
            )

    def _take(self, key: str, request: Request, now: int) -> _Row:
        row = self._rows.get(key)
        if row and row.owner_id == request.owner_id and row.expires_us > now:
            row.expires_us = now + request.hold_us
            return row
        row = self._rows[key] = _Row(
            owner_id=request.owner_id,
            fencing_token=max(row.fencing_token + 1 if row else 0, now),
            acquired_us=now,
            expires_us=now + request.hold_us,
            request=request,
        )
        return row

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
                if row and row.owner_id == owner_id and token in (None, row.fencing_token):
                    cooled = row.acquired_us + min_hold_us
                    row.owner_id, row.expires_us = "", cooled if cooled > now else 0
                    freed.append(key)
                elif not (row and not row.owner_id and row.fencing_token == token):
                    ours = False
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
                    row
                    for key, token in zip(grant.keys, grant.fencing_tokens, strict=True)
                    for row in (self._rows.get(key),)
                    if row
                    and (row.owner_id, row.fencing_token) == (grant.owner_id, token)
                    and row.expires_us > now
                ]
                if len(held) < len(grant.keys):
                    lost.add(grant.owner_id)
                    continue
                for row in held:
                    row.expires_us = max(
                        now + extension.ttl_us, row.acquired_us + grant.min_hold_us
                    )
                extended.add(grant.owner_id)
        return Extended(extended=frozenset(extended), lost=frozenset(lost))

    def holders(self, prefix: str = "", *, limit: int | None = None) -> list[Holder]:
        with self._mutex:
            now = clock.current().wall_us()
            live = sorted(
                (key, row)
                for key, row in self._rows.items()
                if key.startswith(self.prefix + prefix) and row.expires_us > now
            )
            return [self._holder(key, row, now) for key, row in live[:limit]]

    def force_release(self, key: str) -> Holder | None:
        with self._mutex:
            now = clock.current().wall_us()
            row = self._rows.get(self.prefix + key)
            if row is None or row.expires_us <= now:
                return None
            holder = self._holder(self.prefix + key, row, now)
            row.clear()
        self._wakeups.wake(self.prefix + key)
        return holder

    def sweep(
        self, *, older_than: float, batch_size: int, dry_run: bool = False
    ) -> Iterator[Swept]:
        with self._mutex:
            now = clock.current().wall_us()
            dead = [(key, row) for key, row in self._rows.items() if row.expires_us <= now]
            expired = [self._holder(key, row, now) for key, row in dead if row.owner_id]
            forgotten = [key for key, row in dead if row.fencing_token <= now - to_us(older_than)]
            examined = len(self._rows)
            if not dry_run:
                for _, row in dead:
                    if row.owner_id:
                        row.clear()
                for key in forgotten:
                    del self._rows[key]
        yield Swept(examined=examined, expired=tuple(expired), deleted=len(forgotten))

    def wait(self, denial: Denial, until: float, attempt: int) -> None:
        with self._wakeups.ticket(denial.key) as ticket:
            if self._is_taken(denial.key):
                ticket.wait(until)

    async def await_(self, denial: Denial, until: float, attempt: int) -> None:
        with self._wakeups.ticket(denial.key) as ticket:
            if self._is_taken(denial.key):
                await ticket.wait_async(until)

    async def atry_acquire(self, request: Request) -> Grant | Denial:
        return self.try_acquire(request)

    async def aabandon(self, request: Request) -> None:
        self.abandon(request)

    async def arelease(self, grant: Grant) -> bool:
        return self.release(grant)

    async def aextend(self, extensions: Sequence[Extension]) -> Extended:
        return self.extend(extensions)

    def _is_taken(self, key: str) -> bool:
        with self._mutex:
            row = self._rows.get(key)
            return row is not None and row.expires_us > clock.current().wall_us()

    def _holder(self, key: str, row: _Row, now: int) -> Holder:
        request = row.request
        return Holder(
            key=self.public_key(key),
            owner_id=row.owner_id,
            fencing_token=row.fencing_token,
            since=from_us(row.acquired_us),
            remaining=(row.expires_us - now) / MICROSECOND,
            host=request.host,
            pid=request.pid,
            thread=request.thread,
            label=request.label,
            metadata=request.metadata,
        )
