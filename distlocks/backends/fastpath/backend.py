"""The fast path: which store is asked, and what is told while none may grant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NoReturn

from ... import clock, signals
from ...claims import (
    MICROSECOND,
    Denial,
    Extended,
    Extension,
    Grant,
    Holder,
    Request,
    Swept,
    Waiter,
    to_us,
)
from ...conf import Params
from ...exceptions import BackendUnavailable, NotSupported
from ...keys import check_key
from .. import promises
from ..base import BaseBackend
from ..database import DatabaseBackend
from ..offload import offload
from ..phases import CLOSING, DATABASE, DRAIN, REDIS
from ..redis import RedisBackend
from ..redis.backend import NotOpen
from ..redis.links import TooManyConnections
from .answers import ByStore, nobody_grants, running_out
from .authority import Authority
from .changes import Mode
from .row import AuthorityRow, Row
from .servers import Servers
from .settings import NAMES, Settings

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

# What grants and denials are marked with that are not the Redis half's: the database half's, and
# those that are nobody's, while the authority changes or Redis does not answer.
OF_DATABASE, UNANSWERED = "database", "unanswered"
# In which phase it makes sense to go on waiting beside what was denied.
PHASES = {"": REDIS, UNANSWERED: REDIS, OF_DATABASE: DATABASE, DRAIN: DRAIN, CLOSING: CLOSING}
# Seconds after which who has had no answer from Redis tries again.
TRY_AGAIN = 0.2
# Seconds for which a waiter sleeps in the database, at the longest, without a look at who grants.
SLICE = 1.0
FORGOTTEN = (
    "Redis has lost its memory of locks (a restart, a failover, a flush or an eviction), or grants "
    "for others already"
)


class FastPathBackend(BaseBackend):
    """Redis grants while it is healthy, the database takes over when it is not; never do both
    admit an owner of one key.

    OPTIONS: `redis` and `database`, aliases of DISTLOCKS whose settings the two halves have (TTL,
    MAX_TTL and KEY_PREFIX are the fast path's own); `namespace`, what its names in Redis begin
    with; `mode_lease`, for how many seconds a process trusts what it has read about who grants (5);
    `drift`, by which share clocks may run apart (0.01); `skew`, by how many seconds the clocks of
    the two stores may differ (1); `return_after`, for how many seconds Redis must have been healthy
    before it grants again (30).

    When Redis fails, nobody grants for (mode_lease + MAX_TTL) * (1 + 2 * drift) + skew seconds:
    until every lease from there has ended. On the way back, nobody is granted anything until the
    leases of the database have ended, for MAX_TTL as a rule. Leases run to their deadlines and are
    not extended across a change. Without the database, Redis grants for `mode_lease` seconds more.

    What it relies on: clocks that run at the same speed within `drift`, and a database that does
    not forget a committed change (no failover to a replica that lags). Processes may stand still
    for any time: the guard (lease.atomic()) catches what they still believe then.
    """

    supports_wakeups: ClassVar[bool] = True
    supports_shared: ClassVar[bool] = True
    supports_permits: ClassVar[bool] = True
    supports_tree_keys: ClassVar[bool] = True
    supports_waiters: ClassVar[bool] = True
    supports_sweep: ClassVar[bool] = True
    supports_authority: ClassVar[bool] = True
    promise = promises.FAST_PATH
    option_names: ClassVar[tuple[str, ...]] = NAMES

    def __init__(self, alias: str, params: Params) -> None:
        super().__init__(alias, params)
        settings = Settings(self)
        self.settings = settings
        self._longest_us = to_us(params.max_ttl)
        self.redis = settings.half(RedisBackend, "redis", settings.redis)
        self.database = settings.half(DatabaseBackend, "database", settings.database)
        settings.check_database(self.database)
        # Until it is known to have the authority it vouches for nothing.
        self.redis.servers.speak(b"e0")
        self.authority = Authority(
            AuthorityRow(settings.name, self.prefix, self.database),
            Servers(self.redis),
            settings.terms,
            alias=alias,
            open_redis=self.redis.servers.speak,
            changed=self._tell,
        )

    # The verbs

    def try_acquire(self, request: Request) -> Grant | Denial:
        mode = self.authority.known()
        if mode is None:
            mode = self.authority.awaited()
        if request.min_hold_us > self._longest_us:
            self._refuse_hold(request)
        phase = mode.row.phase
        if phase == REDIS:
            try:
                answer = self.redis.try_acquire(request)
            except (BackendUnavailable, NotOpen) as error:
                return self._unanswered(request, mode, error)
            self.authority.succeeded()
            return answer
        if phase == DATABASE:
            in_epoch = replace(request, authority=(self.settings.name, mode.epoch))
            return self._of_database(self.database.try_acquire(in_epoch))
        return nobody_grants(request, mode, self.settings.terms)

    async def atry_acquire(self, request: Request) -> Grant | Denial:
        mode = self.authority.known()
        if mode is None:
            mode = await offload(self.authority.awaited)
        if request.min_hold_us > self._longest_us:
            self._refuse_hold(request)
        phase = mode.row.phase
        if phase == REDIS:
            try:
                answer = await self.redis.atry_acquire(request)
            except (BackendUnavailable, NotOpen) as error:
                return self._unanswered(request, mode, error)
            self.authority.succeeded()
            return answer
        if phase == DATABASE:
            in_epoch = replace(request, authority=(self.settings.name, mode.epoch))
            return self._of_database(await self.database.atry_acquire(in_epoch))
        return nobody_grants(request, mode, self.settings.terms)

    def _refuse_hold(self, request: Request) -> NoReturn:
        raise NotSupported(
            f"min_hold={request.min_hold_us / MICROSECOND:g} s is longer than the MAX_TTL of "
            f"{self.alias!r} ({self.params.max_ttl:g} s): a change of the authority between Redis "
            f"and the database would forget it. Raise MAX_TTL, or take another backend.",
            keys=tuple(map(self.public_key, request.keys)),
        )

    def _unanswered(self, request: Request, mode: Mode, error: Exception) -> Denial:
        """Who waits goes on waiting; the database may take over meanwhile."""
        if isinstance(error, BackendUnavailable):
            self._failed(mode, error)
            if not request.waits:
                raise error
            reason, unanswered = str(error), True
        else:
            self.authority.accuse(mode, f"{FORGOTTEN}.")
            reason, unanswered = f"{FORGOTTEN}: the database is about to take over.", False
        return Denial(
            key=request.claims[0].key,
            remaining=TRY_AGAIN,
            reason=reason,
            store=UNANSWERED,
            unanswered=unanswered,
        )

    def _failed(self, mode: Mode, error: BackendUnavailable) -> None:
        # That no connection is left says nothing about the server.
        if not isinstance(error, TooManyConnections):
            self.authority.failed(mode, error)

    def _of_database(self, answer: Grant | Denial) -> Grant | Denial:
        if isinstance(answer, Denial) and not answer.holders:
            # Perhaps it may not grant any more.
            self.authority.doubt()
        return replace(answer, store=OF_DATABASE)

    # Release and extend

    def abandon(self, request: Request) -> None:
        mode = self.authority.known() or self.authority.last
        if mode is None or mode.phase == REDIS:
            self.redis.abandon(request)
        elif mode.phase != DRAIN:
            self.database.abandon(request)

    async def aabandon(self, request: Request) -> None:
        mode = self.authority.known() or self.authority.last
        if mode is None or mode.phase == REDIS:
            await self.redis.aabandon(request)
        elif mode.phase != DRAIN:
            await self.database.aabandon(request)

    def release(self, grant: Grant) -> bool:
        if grant.store:
            return self.database.release(grant)
        mode = self.authority.known()
        if self._runs_out(mode):
            return True
        try:
            return self.redis.release(grant)
        except BackendUnavailable as error:
            if mode is not None:
                self._failed(mode, error)
            raise

    async def arelease(self, grant: Grant) -> bool:
        if grant.store:
            return await self.database.arelease(grant)
        mode = self.authority.known()
        if self._runs_out(mode):
            return True
        try:
            return await self.redis.arelease(grant)
        except BackendUnavailable as error:
            if mode is not None:
                self._failed(mode, error)
            raise

    @staticmethod
    def _runs_out(mode: Mode | None) -> bool:
        """Whether a lease from Redis just runs out: nobody else is let in before its deadline, and
        nobody would notice its release."""
        return mode is not None and mode.phase != REDIS

    def release_when_next_used(self, grant: Grant) -> None:
        self.database.release_when_next_used(grant)

    def extend(self, extensions: Sequence[Extension]) -> Extended:
        answers = ByStore()
        for part in self._parts(extensions):
            try:
                answers.add(self._extend(part))
            except BackendUnavailable as error:
                answers.failure = error
        return answers.result()

    async def aextend(self, extensions: Sequence[Extension]) -> Extended:
        return await offload(lambda: self.extend(extensions))

    @staticmethod
    def _parts(extensions: Sequence[Extension]) -> list[list[Extension]]:
        """Those of each store."""
        stores: dict[str, list[Extension]] = {}
        for extension in extensions:
            stores.setdefault(extension.grant.store, []).append(extension)
        return list(stores.values())

    def _extend(self, extensions: Sequence[Extension]) -> Extended:
        mode = self.authority.known()
        if mode is None:
            mode = self.authority.awaited()
        row = mode.row
        if extensions[0].grant.store:
            if row.phase == CLOSING and row.ends_leases:
                return running_out(extensions, "the authority returns to Redis", row.why)
            return self.database.extend(extensions)
        if row.phase != REDIS:
            return running_out(extensions, "the database takes over from Redis", row.why)
        try:
            extended = self.redis.extend(extensions)
        except BackendUnavailable as error:
            self._failed(mode, error)
            raise
        if not extended.ending:
            self.authority.succeeded()
            return extended
        self.authority.accuse(mode, f"{FORGOTTEN}.")
        return replace(extended, ending=dict.fromkeys(extended.ending, FORGOTTEN))

    # Looking and clearing up

    def holders(self, prefix: str = "", *, limit: int | None = None) -> list[Holder]:
        phase = self.authority.awaited().phase
        found = self.database.holders(prefix, limit=limit)
        if phase in (REDIS, DRAIN):
            try:
                found += self.redis.holders(prefix, limit=limit)
            except BackendUnavailable:
                if phase == REDIS:
                    raise
        found.sort(key=lambda one: (check_key(one.key), one.fencing_token))
        return found[:limit]

    def holders_of(self, key: str, *, limit: int | None = None) -> list[Holder]:
        phase = self.authority.awaited().phase
        found = self.database.holders_of(key, limit=limit)
        if phase in (REDIS, DRAIN):
            try:
                found += self.redis.holders_of(key, limit=limit)
            except BackendUnavailable:
                if phase == REDIS:
                    raise
        return found[:limit]

    def waiters(self, key: str) -> list[Waiter]:
        phase = self.authority.awaited().phase
        if phase == REDIS:
            return self.redis.waiters(key)
        return self.database.waiters(key) if self.database.supports_waiters else []

    def force_release(self, key: str) -> list[Holder]:
        phase = self.authority.awaited().phase
        held = self.database.force_release(key)
        if phase in (REDIS, DRAIN):
            try:
                held += self.redis.force_release(key)
            except BackendUnavailable:
                if phase == REDIS:
                    raise
        return held

    def sweep(
        self, *, older_than: float, batch_size: int, dry_run: bool = False
    ) -> Iterator[Swept]:
        halves: list[BaseBackend] = [self.database]
        if self.authority.awaited().phase == REDIS:
            halves.insert(0, self.redis)
        for half in halves:
            yield from half.sweep(older_than=older_than, batch_size=batch_size, dry_run=dry_run)

    # Waiting

    def wait(self, denial: Denial, until: float, attempt: int) -> None:
        for mode, end in self._slices(denial, until):
            if denial.store == OF_DATABASE:
                self.database.wait(denial, end, attempt)
            elif not denial.store:
                self.redis.wait(denial, end, attempt)
            else:
                self.authority.wait_for_change(mode, end)
            if clock.lease_now() < end:
                return

    async def await_(self, denial: Denial, until: float, attempt: int) -> None:
        for mode, end in self._slices(denial, until):
            if denial.store == OF_DATABASE:
                await self.database.await_(denial, end, attempt)
            elif not denial.store:
                await self.redis.await_(denial, end, attempt)
            else:
                await self.authority.await_change(mode, end)
            if clock.lease_now() < end:
                return

    def _slices(self, denial: Denial, until: float) -> Iterator[tuple[Mode, float]]:
        """Until when to sleep at a time, as long as it is the right place to do so."""
        slice = SLICE if denial.store else self.settings.terms.mode_lease / 2
        while (now := clock.lease_now()) < until:
            mode = self.authority.known()
            if mode is None or mode.phase != PHASES[denial.store]:
                return
            yield mode, min(until, now + slice)

    # Who grants

    def _tell(self, row: Row, made_here: bool) -> None:
        self.tell(
            signals.authority_changed,
            keys=(),
            authority=row.phase,
            epoch=row.epoch,
            reason=row.why,
            made_here=made_here,
        )
        # Whoever sleeps in the wrong place is to come out.
        self.redis.wake_all()
        self.database.wake_all()

    # Housekeeping

    def check(self) -> list[CheckMessage]:
        from .checks import check_settings

        return check_settings(self)

    def check_store(self) -> list[CheckMessage]:
        from .checks import check_servers

        return check_servers(self)

    def close(self) -> None:
        self.authority.close()
        self.redis.close()
        self.database.close()
