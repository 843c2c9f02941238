"""The database backend: the verbs over a dialect, and waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from django.db import DatabaseError, connections

from ... import clock
from ...claims import (
    EXCLUSIVE,
    Claim,
    Denial,
    Extended,
    Extension,
    Grant,
    Holder,
    Request,
    Swept,
    to_us,
)
from ...conf import under_test_runner
from ...exceptions import BackendUnavailable
from .. import promises
from ..base import RESERVED_LONGER
from ..offload import offload
from .channels import NotAll, Session
from .connected import ConnectedBackend, in_testcase
from .dialect import BUSY, Batch, Dialect, Freed, Held, Taken
from .extensions import Extensions

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

T = TypeVar("T")

# So many of a key's holders are told of in a denial.
TOLD_HOLDERS = 100


class DatabaseBackend(ConnectedBackend):
    """Locks in the table of the `Lock` model, by the clock of the database server.

    OPTIONS: `using`, the database alias (default: "default"); `dialect`, "auto" or "portable" (the
    ORM path even where a faster one exists); `listen`, whether waiters on PostgreSQL may be woken
    by notifications (default: True; they poll where notifications do not arrive); `wakeup`, the
    alias of a Redis backend through which waiters queue and are called in their turn.

    Statements run on a connection of our own in autocommit, so that a lock is visible to others
    at once and outlives a rollback. The exceptions, where the caller's own connection is used:
    inside a test case's transaction, and on SQLite inside `atomic()` or in memory, where a second
    connection could not write. A grant made there is not renewed.
    """

    supports_shared: ClassVar[bool] = True
    supports_permits: ClassVar[bool] = True
    supports_tree_keys: ClassVar[bool] = True
    supports_sweep: ClassVar[bool] = True
    promise = promises.DATABASE

    # The verbs

    def try_acquire(self, request: Request) -> Grant | Denial:
        answer = self._run(lambda session: self._acquire(session, request))
        if isinstance(answer, Grant):
            self._sleepers.done(request, granted=True)
        elif self._sleepers.denied(request, answer):
            return replace(answer, queued=request.owner_id)
        return answer

    def _acquire(self, session: Session, request: Request) -> Grant | Denial:
        answers: list[Taken | Held] = []
        first = request.claims[0]
        if len(request.claims) == 1 and first.mode == EXCLUSIVE:
            answers.append(self._take(session, first, request))
        else:
            for claim in request.claims:
                if claim.mode != EXCLUSIVE and (
                    held := self.dialect.several.peek(session, claim, request)
                ):
                    return self._denial(session, request, claim, held)
            try:
                self.dialect.all_or_none(session, lambda: self._take_all(session, request, answers))
            except NotAll:
                pass
            except DatabaseError as error:
                self._raise_unless_busy(session, error)
                answers = [BUSY]
        last = answers[-1]
        if isinstance(last, Held):
            return self._denial(session, request, request.claims[len(answers) - 1], last)
        taken = [answer for answer in answers if isinstance(answer, Taken)]
        for claim, one in zip(request.claims, taken, strict=True):
            if one.awaited:
                self._sleepers.announce(session, claim.key)
                self._sleepers.wake(claim.key, request.owner_id)
        return Grant(
            claims=request.claims,
            owner_id=request.owner_id,
            fencing_tokens=tuple(one.fencing_token for one in taken),
            acquired_us=taken[0].acquired_us,
            min_hold_us=request.min_hold_us,
            in_transaction=session.is_callers,
            in_testcase=session.is_callers and in_testcase(session.wrapper),
            expired=tuple([self.public_holder(one.expired) for one in taken if one.expired]),
        )

    def _take_all(self, session: Session, request: Request, answers: list[Taken | Held]) -> None:
        answers.clear()
        if request.authority and not self.dialect.has_authority(session, request.authority):
            answers.append(Held())
            raise NotAll
        for claim in request.claims:
            answers.append(self._take(session, claim, request))
            if isinstance(answers[-1], Held):
                raise NotAll

    def _take(self, session: Session, claim: Claim, request: Request) -> Taken | Held:
        if claim.mode != EXCLUSIVE:
            return self.dialect.several.take(session, claim, request)
        try:
            return self.dialect.acquire(session, claim.key, request)
        except DatabaseError as error:
            self._raise_unless_busy(session, error)
            return BUSY

    def _raise_unless_busy(self, session: Session, error: DatabaseError) -> None:
        """Raise an error that is more than a row in others' hands, or that broke the caller's
        transaction."""
        if session.in_callers_transaction or not self.dialect.is_busy(error):
            raise error

    def _denial(self, session: Session, request: Request, claim: Claim, held: Held) -> Denial:
        holders = [held.holder] if held.holder else []
        if held.several:
            holders = self.dialect.several.on_key(session, claim.key, TOLD_HOLDERS)
            if not holders:
                # It is held exclusively, or was until a moment ago.
                found = self.dialect.holders(session, claim.key, 1)
                holders = [holder for holder in found if holder.key == claim.key]
        reason, can_wait = held.reason, True
        if session.in_callers_transaction and self.dialect.one_writer:
            # Whoever holds the key could never release it while we hold the write lock.
            can_wait = False
            reason = (
                "Waiting inside a transaction on SQLite would keep the holder from releasing it: "
                "take the lock before the transaction begins, or use timeout=0."
            )
        return Denial(
            key=claim.key,
            remaining=held.remaining,
            holders=tuple(map(self.public_holder, holders)),
            starves=request.owner_id if held.starves else "",
            version=held.version,
            reason=reason,
            can_wait=can_wait,
        )

    def release_when_next_used(self, grant: Grant) -> None:
        self._deferred.grants = [*getattr(self._deferred, "grants", ()), grant]

    def _release_deferred(self, session: Session) -> None:
        grants, self._deferred.grants = getattr(self._deferred, "grants", ()), []
        for grant in grants:
            for claim, token in zip(grant.claims, grant.fencing_tokens, strict=True):
                self._end(session, claim, grant.owner_id, token, grant.min_hold_us)

    def abandon(self, request: Request) -> None:
        self._sleepers.done(request, granted=False)
        for claim in request.claims:
            self._free(claim, request.owner_id, None, 0)

    def release(self, grant: Grant) -> bool:
        if grant.in_transaction and connections[self.using].closed_in_transaction:
            return False
        ours = [
            self._free(claim, grant.owner_id, token, grant.min_hold_us)
            for claim, token in zip(grant.claims, grant.fencing_tokens, strict=True)
        ]
        return all(ours)

    def _free(self, claim: Claim, owner_id: str, token: int | None, min_hold_us: int) -> bool:
        def free(session: Session) -> Freed:
            freed = self._end(session, claim, owner_id, token, min_hold_us)
            if freed.awaited:
                # A statement of its own: notifying in the one that commits serialises commits.
                self._sleepers.announce(session, claim.key)
            return freed

        freed = self._when_not_busy(lambda: self._run(free))
        self._sleepers.wake(claim.key, owner_id)
        return freed.ours

    def _end(
        self, session: Session, claim: Claim, owner_id: str, token: int | None, min_hold_us: int
    ) -> Freed:
        key = claim.key
        if claim.mode == EXCLUSIVE:
            freed = self.dialect.release(session, key, owner_id, token, min_hold_us)
            if freed.ours or token is None:
                return freed
            # An earlier release may have got through although its answer was lost.
            return Freed(ours=self.dialect.is_freed(session, key, token))
        return self.dialect.all_or_none(
            session,
            lambda: self.dialect.several.release(session, key, owner_id, token, min_hold_us),
        )

    def extend(self, extensions: Sequence[Extension]) -> Extended:
        batch = Extensions(self.dialect, extensions, self._raise_unless_busy)
        if extensions:
            self._run(batch.run, renewal=True)
        return batch.result()

    def holders(self, prefix: str = "", *, limit: int | None = None) -> list[Holder]:
        def find(session: Session) -> list[Holder]:
            name = self.prefix + prefix
            exclusive = self.dialect.holders(session, name, limit)
            several = self.dialect.several.holders(session, name, limit)
            return sorted([*exclusive, *several], key=lambda one: (one.key, one.fencing_token))

        return [self.public_holder(holder) for holder in self._run(find)[:limit]]

    def holders_of(self, key: str, *, limit: int | None = None) -> list[Holder]:
        name = self.prefix + key

        def find(session: Session) -> list[Holder]:
            exclusive = self.dialect.holders(session, name, 1)
            return [
                *[holder for holder in exclusive if holder.key == name],
                *self.dialect.several.on_key(session, name, limit),
            ]

        return [self.public_holder(holder) for holder in self._run(find)[:limit]]

    def force_release(self, key: str) -> list[Holder]:
        full = self.prefix + key

        def free(session: Session) -> list[Holder]:
            holder, awaited = self.dialect.force_release(session, full)
            held = [holder] if holder else []
            if not held:
                held, awaited = self.dialect.all_or_none(
                    session, lambda: self.dialect.several.force_release(session, full)
                )
            if awaited:
                self._sleepers.announce(session, full)
            return held

        held = self._when_not_busy(lambda: self._run(free))
        self._sleepers.wake(full, None)
        return [self.public_holder(holder) for holder in held]

    def sweep(
        self, *, older_than: float, batch_size: int, dry_run: bool = False
    ) -> Iterator[Swept]:
        after, older_than_us = "", to_us(older_than)
        while True:
            batch = self._run(
                lambda session, after=after: self._sweep(  # type: ignore[misc]
                    session, after, batch_size, older_than_us, dry_run
                )
            )
            if batch is None:
                return
            for holder in batch.expired:
                self._sleepers.wake(str(holder.key), None)
            yield Swept(
                examined=batch.examined,
                expired=tuple(map(self.public_holder, batch.expired)),
                deleted=batch.deleted,
            )
            after = batch.last_key

    def _sweep(
        self, session: Session, after: str, batch_size: int, older_than_us: int, dry_run: bool
    ) -> Batch | None:
        batch = self.dialect.sweep(session, after, batch_size, older_than_us, dry_run)
        if batch is None:
            return None
        # Look first: a batch with nothing to do must not take a lock, which on SQLite is one on
        # the whole file.
        left_behind, any_ended = self.dialect.several.ended(session, after, batch.last_key)
        if any_ended and not dry_run:
            left_behind = self.dialect.all_or_none(
                session, lambda: self.dialect.several.sweep(session, after, batch.last_key)
            )
        return replace(batch, expired=[*batch.expired, *left_behind])

    # Waiting

    def wait(self, denial: Denial, until: float, attempt: int) -> None:
        if denial.starves:
            self._reserve(denial, until)
        self._sleepers.sleep(denial, until, attempt)

    async def await_(self, denial: Denial, until: float, attempt: int) -> None:
        if denial.starves:
            await offload(lambda: self._reserve(denial, until))
        await self._sleepers.asleep(denial, until, attempt)

    def wake_all(self) -> None:
        """Let everybody in this process who waits look for themselves."""
        self._sleepers.wakeups.wake_all()

    def _reserve(self, denial: Denial, until: float) -> None:
        """Keep newcomers out until the asker's next try, or until just after it has given up."""
        life_us = to_us(max(until - clock.lease_now(), 0.0) + RESERVED_LONGER)
        with suppress_busy(self.dialect):
            self._run(
                lambda session: self.dialect.all_or_none(
                    session,
                    lambda: self.dialect.several.reserve(
                        session, denial.key, denial.starves, life_us
                    ),
                )
            )

    # Async twins: inside a test case's transaction, only the thread that owns it sees the locks.

    async def atry_acquire(self, request: Request) -> Grant | Denial:
        return await self._offload(lambda: self.try_acquire(request), undo=self.abandoning(request))

    async def aabandon(self, request: Request) -> None:
        await self._offload(lambda: self.abandon(request))

    async def arelease(self, grant: Grant) -> bool:
        return await self._offload(lambda: self.release(grant))

    async def aextend(self, extensions: Sequence[Extension]) -> Extended:
        return await self._offload(lambda: self.extend(extensions))

    async def _offload(self, verb: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        if under_test_runner():
            from asgiref.sync import sync_to_async

            if await sync_to_async(self._callers_connection, thread_sensitive=True)():
                return await sync_to_async(verb, thread_sensitive=True)()
        return await offload(verb, undo=undo)

    # Housekeeping

    def check(self) -> list[CheckMessage]:
        from .checks import check_settings

        return check_settings(self)

    def check_store(self) -> list[CheckMessage]:
        from .checks import check_database

        return check_database(self)


@contextmanager
def suppress_busy(dialect: Dialect) -> Iterator[None]:
    """Do without what the block was to do if others have the row in their hands."""
    try:
        yield
    except BackendUnavailable as error:
        if not dialect.is_busy(error.__cause__):
            raise
