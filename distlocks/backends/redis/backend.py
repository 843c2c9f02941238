"""The Redis backend: the verbs, each a script, and waiting."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from ... import clock
from ...claims import (
    MICROSECOND,
    Claim,
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
from ...exceptions import BackendUnavailable
from ...keys import check_key
from ...waiting import MAX_SLEEP, poll_delay
from .. import promises
from ..base import BaseBackend
from ..offload import submit
from .calls import Answers, asking, ending, lasting, parts, whole, without
from .listing import holders_in, queue_of
from .place import Address
from .records import holder, split, waiter
from .scripts import script
from .server import Servers
from .settings import MAX_CONNECTIONS, NAMES, Settings
from .wire import Reply, packed

if TYPE_CHECKING:
    from django.core.checks import CheckMessage


class NotOpen(Exception):
    """The servers are not, or no longer, open for the epoch that they are asked in."""


# Seconds after which those next in a queue look again: the one before them may have died.
LOOK_AGAIN = 2.5
# Seconds for which a key stays reserved: see RESERVED in common.lua.
RESERVED = 0.5
# Seconds between two looks, at the longest, of who waits without a place in a queue.
POLL_CAP = 0.25


class RedisBackend(BaseBackend):
    """Locks in Redis (6.2 or newer) or Valkey, by the clock of the server.

    OPTIONS name the servers by `url`; by `sentinels`, a list of (host, port), with `service`; by
    `cluster`, a list of (host, port) or a URL; or by `cache`, an alias of CACHES that is
    django-redis' or Django's own, of which only server, password and TLS are used. `connection`
    holds more arguments for redis-py, `db` the database's number (with `cache`: 15, or 14 if the
    cache has that one), `namespace` what all names in Redis begin with, `max_connections` how many
    connections a process may have.

    Who waits is served first come, first served, and sends next to nothing meanwhile.

    A server that restarts, fails over, is flushed or evicts locks cannot grant one twice: it is in
    quarantine for MAX_TTL then, until all leases from before have ended (`incarnation_guard`,
    `quarantine`). The exception is a primary that goes on beside its successor: for that, set
    min-replicas-to-write on the servers, and `failover_lag` to their min-replicas-max-lag and 2 s.
    `min_replicas` makes a grant wait for so many replicas.
    """

    supports_wakeups: ClassVar[bool] = True
    supports_shared: ClassVar[bool] = True
    supports_permits: ClassVar[bool] = True
    supports_tree_keys: ClassVar[bool] = True
    supports_waiters: ClassVar[bool] = True
    supports_quarantine: ClassVar[bool] = True
    supports_sweep: ClassVar[bool] = True
    promise = promises.REDIS
    option_names: ClassVar[tuple[str, ...]] = NAMES

    def __init__(self, alias: str, params: Params) -> None:
        super().__init__(alias, params)
        self.settings = Settings(self)
        self.place = self.settings.place()
        self.servers = Servers(
            self.place,
            namespace=self.settings.namespace,
            guarded=self.settings.guard == "on",
            quarantine_us=to_us(self.settings.quarantine),
            max_connections=(
                self.settings.max_connections or self.place.max_connections or MAX_CONNECTIONS
            ),
            min_replicas=self.settings.min_replicas,
            alias=alias,
        )
        # When all buckets may be asked again whether they are in quarantine.
        self._next_round = 0.0
        self._acquire = script("acquire")
        self._release = script("release")

    # The verbs

    def try_acquire(self, request: Request) -> Grant | Denial:
        claims = request.claims
        hash_name = self.servers.hash_name(claims[0].key)
        if len(claims) == 1 or self._is_one_hash(claims, hash_name):
            mailbox = self.servers.mailbox(hash_name) if request.waits else None
            if mailbox is not None:
                mailbox.forget(request.owner_id)
            words, tail = asking(request, claims, mailbox)
            reply = self.servers.run(hash_name, self._acquire, words, tail)
            return self._answer(request, claims, reply)
        return self._try_in_parts(request)

    async def atry_acquire(self, request: Request) -> Grant | Denial:
        claims = request.claims
        hash_name = self.servers.hash_name(claims[0].key)
        if len(claims) == 1 or self._is_one_hash(claims, hash_name):
            mailbox = self.servers.loop_mailbox(hash_name) if request.waits else None
            if mailbox is not None:
                mailbox.forget(request.owner_id)
            words, tail = asking(request, claims, mailbox)
            reply = await self.servers.arun(hash_name, self._acquire, words, tail)
            return self._answer(request, claims, reply)
        return await self._atry_in_parts(request)

    def _is_one_hash(self, claims: Sequence[Claim], hash_name: bytes) -> bool:
        return all(self.servers.hash_name(claim.key) == hash_name for claim in claims)

    def _answer(self, request: Request, claims: Sequence[Claim], reply: Reply) -> Grant | Denial:
        expired: tuple[Holder, ...] = ()
        if type(reply) is not bytes:
            if reply[0] == b"D":
                return self._denial(request, reply)
            now = int(reply[0][1:17])
            gone = [split(key, record) for key, record in reply[1]]
            if len(reply) > 2:
                gone += reply[2]
            expired = tuple([self._public(fields, now) for fields in gone])
            reply = reply[0]
        if len(claims) == 1:
            tokens: tuple[int, ...] = (int(reply[17:33]),)
        else:
            tokens = tuple([int(reply[at : at + 16]) for at in range(17, len(reply), 16)])
        return Grant(
            claims=tuple(claims),
            owner_id=request.owner_id,
            fencing_tokens=tokens,
            acquired_us=int(reply[1:17]),
            min_hold_us=request.min_hold_us,
            expired=expired,
        )

    def _denial(self, request: Request, reply: Reply) -> Denial:
        _, key, place, left, why, now, told, _ = reply
        remaining = left / MICROSECOND
        reason = ""
        if why == b"A":
            raise NotOpen
        if why == b"Q":
            reason = (
                f"The Redis server's memory of locks is new (a restart, a failover, a flush or an "
                f"eviction): it grants again in {remaining:.1f} s, when all leases from before "
                f"have ended."
            )
            self._begin_all_quarantines()
        elif why == b"B":
            reason = "Others have waited for longer."
        if place >= 2 and why != b"Q":
            # Not all in the same moment.
            remaining = MAX_SLEEP * random.uniform(0.8, 1.0)
        elif place >= 2:
            # Those before it may be gone since, and nobody calls it then.
            remaining += place * RESERVED
        elif place >= 0:
            remaining = min(remaining + place * RESERVED, LOOK_AGAIN)
        return Denial(
            key=key.decode(),
            remaining=remaining,
            holders=tuple([self._public(fields, int(now)) for fields in told]),
            queued=request.owner_id if place >= 0 else "",
            reason=reason,
        )

    # Keys on several servers of a Cluster: taken one after the other, in the order in which
    # everybody takes them, or given back.

    def _try_in_parts(self, request: Request) -> Grant | Denial:
        grants: list[Grant] = []
        for part in parts(self.servers, request):
            try:
                answer = self.try_acquire(part)
            except BackendUnavailable as error:
                error.in_doubt |= bool(grants)
                raise
            if isinstance(answer, Denial):
                # Also what is reserved for it further on, for the next who waits there.
                self.abandon(without(request, part))
                return answer
            grants.append(answer)
        return whole(request, grants)

    async def _atry_in_parts(self, request: Request) -> Grant | Denial:
        grants: list[Grant] = []
        for part in parts(self.servers, request):
            try:
                answer = await self.atry_acquire(part)
            except BackendUnavailable as error:
                error.in_doubt |= bool(grants)
                raise
            if isinstance(answer, Denial):
                await self.aabandon(without(request, part))
                return answer
            grants.append(answer)
        return whole(request, grants)

    # Release and extend

    def abandon(self, request: Request) -> None:
        for hash_name, words, tail, _ in ending(self.servers, request.claims, request.owner_id):
            self.servers.run(hash_name, self._release, words, tail)

    async def aabandon(self, request: Request) -> None:
        for hash_name, words, tail, _ in ending(self.servers, request.claims, request.owner_id):
            await self.servers.arun(hash_name, self._release, words, tail)

    def release(self, grant: Grant) -> bool:
        ours = True
        for hash_name, words, tail, count in ending(
            self.servers, grant.claims, grant.owner_id, grant.fencing_tokens, grant.min_hold_us
        ):
            ours = self.servers.run(hash_name, self._release, words, tail) == count and ours
        return ours

    async def arelease(self, grant: Grant) -> bool:
        ours = True
        for hash_name, words, tail, count in ending(
            self.servers, grant.claims, grant.owner_id, grant.fencing_tokens, grant.min_hold_us
        ):
            reply = await self.servers.arun(hash_name, self._release, words, tail)
            ours = reply == count and ours
        return ours

    def extend(self, extensions: Sequence[Extension]) -> Extended:
        extended = Answers(extensions)
        silent: dict[Address, BackendUnavailable] = {}
        for hash_name, words, tail, owners in lasting(self.servers, extensions):
            address = None
            try:
                address = self.servers.address(hash_name)
                if address not in silent:
                    reply = self.servers.run(hash_name, script("extend"), words, tail)
                    extended.note(owners, reply)
                    continue
                failure = silent[address]
            except BackendUnavailable as error:
                failure = error
            # Leases on the other servers of a Cluster are to last all the same.
            extended.fail(owners, failure)
            if address is not None:
                silent[address] = failure
        return extended.result()

    async def aextend(self, extensions: Sequence[Extension]) -> Extended:
        extended = Answers(extensions)
        for hash_name, words, tail, owners in lasting(self.servers, extensions):
            try:
                reply = await self.servers.arun(hash_name, script("extend"), words, tail)
                extended.note(owners, reply)
            except BackendUnavailable as error:
                extended.fail(owners, error)
        return extended.result()

    # Looking and clearing up

    def holders(self, prefix: str = "", *, limit: int | None = None) -> list[Holder]:
        name = (self.prefix + prefix).encode()
        found = [
            self._public(fields, now)
            for hash_name in self.servers.hashes
            for fields, now in holders_in(self.servers, hash_name, name)
        ]
        found.sort(key=lambda one: (check_key(one.key), one.fencing_token))
        return found[:limit]

    def scan(self) -> Iterator[Holder]:
        for hash_name in self.servers.hashes:
            for fields, now in holders_in(self.servers, hash_name, self.prefix.encode()):
                yield self._public(fields, now)

    def holders_of(self, key: str, *, limit: int | None = None) -> list[Holder]:
        name = self.prefix + key
        told_at, found, _ = self.servers.run(
            self.servers.hash_name(name), script("find"), 1, packed((name.encode(),))
        )
        held = [self._public(fields, int(told_at)) for fields in found]
        return sorted(held, key=lambda one: one.fencing_token)[:limit]

    def waiters(self, key: str) -> list[Waiter]:
        shown = self.public_key(self.prefix + key)
        return [waiter(shown, *one) for one in queue_of(self.servers, self.prefix + key)]

    def force_release(self, key: str) -> list[Holder]:
        name = self.prefix + key
        now, held, _ = self.servers.run(
            self.servers.hash_name(name), script("force"), 1, packed((name.encode(),))
        )
        return [self._public(fields, int(now)) for fields in held]

    def sweep(
        self, *, older_than: float, batch_size: int, dry_run: bool = False
    ) -> Iterator[Swept]:
        for hash_name in self.servers.hashes:
            cursor = b"0"
            while True:
                words = (cursor, b"%d" % batch_size, b"1" if dry_run else b"0")
                cursor, examined, deleted, now, expired = self.servers.run(
                    hash_name, script("sweep"), len(words), packed(words)
                )
                if examined or expired or deleted:
                    yield Swept(
                        examined=examined,
                        expired=tuple([self._public(fields, int(now)) for fields in expired]),
                        deleted=deleted,
                    )
                if cursor == b"0":
                    break

    def _public(self, fields: Sequence[bytes], now: int) -> Holder:
        return self.public_holder(holder(fields, now))

    # Quarantine

    def quarantine(self, *, end: bool = False) -> float:
        words = packed((b"1" if end else b"0",))
        left = [
            self.servers.run(hash_name, script("quarantine"), 1, words)
            for hash_name in self.servers.hashes
        ]
        return float(max(left)) / MICROSECOND

    def _begin_all_quarantines(self) -> None:
        """What one part of a Cluster's memory has lost, others may have too: better find out now
        than one after the other."""
        if len(self.servers.hashes) > 1 and clock.lease_now() >= self._next_round:
            self._next_round = clock.lease_now() + self.settings.quarantine / 2
            submit(self.quarantine)

    # Waiting

    def wait(self, denial: Denial, until: float, attempt: int) -> None:
        hash_name = self.servers.hash_name(denial.key)
        if denial.queued:
            self.servers.mailbox(hash_name).wait(denial.queued, until)
        else:
            clock.current().wait(threading.Event(), next_look(until, attempt))

    async def await_(self, denial: Denial, until: float, attempt: int) -> None:
        hash_name = self.servers.hash_name(denial.key)
        if denial.queued:
            await self.servers.loop_mailbox(hash_name).wait(denial.queued, until)
        else:
            never = asyncio.get_running_loop().create_future()
            await clock.current().wait_async(never, next_look(until, attempt))

    def wake_all(self) -> None:
        """Let everybody in this process who waits look for themselves."""
        self.servers.wake_all()

    # Housekeeping

    def check(self) -> list[CheckMessage]:
        from .checks import check_settings

        return check_settings(self)

    def check_store(self) -> list[CheckMessage]:
        from .checks import check_servers

        return check_servers(self)

    def close(self) -> None:
        self.servers.close()


def next_look(until: float, attempt: int) -> float:
    """When to look again for who has no place in a queue."""
    return min(until, clock.lease_now() + poll_delay(attempt, cap=POLL_CAP))
