"""The advisory backend: the verbs over sessions and the callers' transactions."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Concatenate, ParamSpec, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError
from django.db.backends.base.base import BaseDatabaseWrapper

from ... import clock
from ...claims import (
    Denial,
    Extended,
    Extension,
    Grant,
    Holder,
    Request,
    Swept,
    to_us,
)
from ...conf import Params, under_test_runner
from ...exceptions import BackendUnavailable
from ...waiting import MAX_SLEEP
from .. import promises
from ..base import BaseBackend, losses
from ..database.channels import unavailable
from .batch import Batch
from .denials import Denials
from .inside import Inside
from .pool import Hold, Pool
from .rows import Missed, Rows
from .session import Broken, NoAnswer, Refused
from .settings import Settings
from .tries import Tries, grant_of
from .waiters import Waiters
from .wire import Wire

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

# So many leases that have ended are remembered: a release that is sent twice is answered alike.
REMEMBERED = 10_000

GONE = "the server has ended the session that had its lock, which may have been taken over"

P = ParamSpec("P")
R = TypeVar("R")


def tidily(
    verb: Callable[Concatenate[AdvisoryBackend, P], R],
) -> Callable[Concatenate[AdvisoryBackend, P], R]:
    """Under a test runner, keep no connection open after `verb` that would stop it from dropping
    the database: a test may have forgotten a lease."""

    @functools.wraps(verb)
    def tidy(backend: AdvisoryBackend, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(backend, *args, **kwargs)
        finally:
            if under_test_runner() and not backend._pool.in_use:
                backend._pool.close_free()
                backend.rows.close()

    return tidy


class AdvisoryBackend(BaseBackend):
    """Locks that PostgreSQL itself keeps: `pg_advisory_lock` and its kin.

    Outside of transactions a lease pins a session of our own, a connection to the server. The
    server ends it when nothing has been heard from it for the lease's ttl (`idle_session_timeout`),
    by its own clock; the holder's deadline comes before that. A session may also end while its
    holder lives and has not been told, and the server frees the lock at once. So a lease that was
    not released is waited out. With OPTIONS `on_session_end` = "free" it is not, unless the server
    was started anew: then a dead holder's lock is had at once, and so may be that of one that is
    about to be told, or has left the network.

    Inside `atomic()` on the same database the lock lives in the caller's transaction, on the
    caller's connection, and ends with it: there is no lease that could run out.

    OPTIONS: `using`, the alias of a PostgreSQL database (default: "default"); `max_sessions`, how
    many sessions this process may have for leases and waiters (default: 32; half of them for
    waiters, the rest of whom poll); `on_session_end`, "wait" (the default) or "free";
    `transactional`, whether locks taken inside `atomic()` live in that transaction (default: True).

    Waiters with a session stand in the server's own queue, first come first served. The server
    knows a key by the first 64 bits of the SHA-256 of its name with the KEY_PREFIX: two keys that
    share them exclude each other, as do a key and an advisory lock that the application itself
    takes by the same number.
    """

    supports_wakeups: ClassVar[bool] = True
    supports_shared: ClassVar[bool] = True
    supports_sweep: ClassVar[bool] = True
    promise = promises.ADVISORY
    option_names: ClassVar[tuple[str, ...]] = (
        "using",
        "max_sessions",
        "transactional",
        "on_session_end",
    )

    def __init__(self, alias: str, params: Params) -> None:
        super().__init__(alias, params)
        self.settings = Settings(alias, self.options)
        self.using = self.settings.using
        # How leases of this process have ended, by owner id: True if by their release.
        self._ended: OrderedDict[str, bool] = OrderedDict()
        # Owner ids whose release went out, and whose session broke before the answer came.
        self._in_doubt: set[str] = set()
        self._inside = Inside(self.using)

    @cached_property
    def rows(self) -> Rows:
        from django.apps import apps

        if not apps.is_installed("distlocks"):
            raise ImproperlyConfigured(
                "The advisory backend of distlocks needs its table: add 'distlocks' to "
                "INSTALLED_APPS and run 'manage.py migrate'."
            )
        return Rows(self.using, waits_out=self.settings.waits_out)

    @cached_property
    def _wire(self) -> Wire:
        return Wire(self.rows)

    @cached_property
    def _pool(self) -> Pool:
        return Pool(
            self.using,
            self.rows.channel.open,
            self.settings.max_sessions,
            prepared=(self.rows.texts.exclusive, self.rows.texts.release),
            lost=self._has_lost,
            turn=lambda hold: self._waiters.wake_owner(hold.owner_id),
        )

    @cached_property
    def _waiters(self) -> Waiters:
        return Waiters(self._pool, self.rows)

    @cached_property
    def _denials(self) -> Denials:
        return Denials(self.rows, self.public_holder, self.settings.max_sessions)

    @cached_property
    def _tries(self) -> Tries:
        return Tries(self._pool, self._wire, self.rows, self._denials, self.settings.max_waiting)

    @tidily
    def try_acquire(self, request: Request) -> Grant | Denial:
        # Whoever asks by the verbs may ask for what there is not.
        self.checked(request.claims)
        grant = self._inside.grant_of(request.owner_id)
        if grant is not None:
            return grant
        wrapper = self._callers(request)
        try:
            if wrapper is not None:
                return self._acquire_inside(wrapper, request)
            return self._tries.acquire(request)
        except (DatabaseError, InterfaceError) as error:
            raise unavailable(self.using, error) from error

    def _callers(self, request: Request) -> BaseDatabaseWrapper | None:
        """The caller's connection, if the lock is to live in the caller's transaction."""
        if not (self.settings.transactional and request.until_commit):
            return None
        return self._inside.wrapper()

    def _acquire_inside(self, wrapper: BaseDatabaseWrapper, request: Request) -> Grant | Denial:
        own = self._inside.own(wrapper, request)
        if own is not None:
            return self._denials.of_itself(own)
        answer = self._inside.take(
            wrapper, request, lambda claim, pid: self.rows.note(claim, request, pid)
        )
        if isinstance(answer, Missed):
            # For what cools down there is nothing to stand in a queue.
            self._inside.is_denied(wrapper, request, None if answer.cools else answer.claim)
            return self._denials.of(answer.claim, request, queued=not answer.cools)
        grant = grant_of(request, answer, inside=True)
        self._inside.keep(wrapper, grant)
        return grant

    def _unavailable(self, error: Exception) -> BackendUnavailable:
        return unavailable(self.using, error)

    # Release

    @tidily
    def abandon(self, request: Request) -> None:
        inside = self._inside.abandon(request.owner_id)
        hold = self._pool.hold_of(request.owner_id)
        if hold is not None:
            with hold.mutex:
                inside = self._abandon(hold) or inside
        try:
            # A caller's session is the caller's; one that was freed may be somebody else's by now.
            self.rows.abandon(request, ending_sessions=not inside)
        finally:
            self._waiters.wake(request.keys)

    def _abandon(self, hold: Hold) -> bool:
        clean = False
        try:
            if self._pool.hold_of(hold.owner_id) is hold:
                if hold.waits_for is not None:
                    self._wire.leave(hold)
                clean = self._wire.free(hold, hold.grant.claims if hold.grant else ())
        except (Broken, NoAnswer, Refused):
            # Closed, it has nothing any more.
            pass
        finally:
            self._pool.end(hold, clean=clean)
        return clean

    @tidily
    def release(self, grant: Grant) -> bool:
        if grant.ends_with_transaction:
            return self._inside.release(grant)
        hold = self._pool.hold_of(grant.owner_id)
        if hold is not None:
            with hold.mutex:
                if self._pool.hold_of(grant.owner_id) is hold:
                    if not hold.has(grant):
                        return False
                    self._release(hold, grant)
            self._waiters.wake(grant.keys)
        if grant.owner_id in self._in_doubt:
            # It was ours to the end if nobody has had it since.
            self._remember(grant.owner_id, released=self.rows.is_last(grant))
            self._in_doubt.discard(grant.owner_id)
        return self._ended.get(grant.owner_id, False)

    def _release(self, hold: Hold, grant: Grant) -> None:
        clean = False
        try:
            clean = self._wire.free(hold, grant.claims)
            self._remember(grant.owner_id, released=clean)
        except Broken as broken:
            if broken.in_doubt:
                self._in_doubt.add(grant.owner_id)
            else:
                self._remember(grant.owner_id, released=False)
        except BaseException as error:
            # Closing the session frees it, as soon as the server learns of that.
            self._in_doubt.add(grant.owner_id)
            if isinstance(error, NoAnswer | Refused):
                raise self._unavailable(error) from error
            raise
        finally:
            self._pool.end(hold, clean=clean)

    def _remember(self, owner_id: str, *, released: bool) -> None:
        self._ended[owner_id] = released
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _has_lost(self, hold: Hold) -> bool:
        """Its session has ended; False if somebody is asking it right now, who must not have it
        closed under its feet."""
        if not hold.mutex.acquire(blocking=False):
            return False
        try:
            if self._pool.hold_of(hold.owner_id) is not hold:
                return True
            self._remember(hold.owner_id, released=False)
            self._pool.end(hold, clean=False)
        finally:
            hold.mutex.release()
        for tell in losses:
            tell(hold.owner_id, GONE)
        self._waiters.wake(hold.grant.keys if hold.grant else ())
        return True

    @tidily
    def force_release(self, key: str) -> list[Holder]:
        name = self.prefix + key
        held = self.rows.force_release(name)
        self._waiters.wake((name,))
        return [self.public_holder(holder) for holder in held]

    def why_over(self, grant: Grant) -> str:
        return self._inside.why_over(grant.owner_id) if grant.ends_with_transaction else ""

    def extend(self, extensions: Sequence[Extension]) -> Extended:
        done: set[str] = set()
        lost: set[str] = set()
        held: list[tuple[Hold, Extension]] = []
        for extension in extensions:
            owner_id = extension.grant.owner_id
            hold = self._pool.hold_of(owner_id)
            if extension.grant.ends_with_transaction:
                (lost if self.why_over(extension.grant) else done).add(owner_id)
            elif hold is None or not hold.has(extension.grant):
                lost.add(owner_id)
            else:
                held.append((hold, extension))
        batch = Batch(self._pool, self._wire)
        batch.extend(held)
        for hold in batch.lost:
            self._remember(hold.owner_id, released=False)
        return Extended(
            extended=frozenset(done | {hold.owner_id for hold in batch.extended}),
            lost=frozenset(lost | {hold.owner_id for hold in batch.lost}),
        )

    # Housekeeping

    @tidily
    def holders(self, prefix: str = "", *, limit: int | None = None) -> list[Holder]:
        return [self.public_holder(one) for one in self.rows.holders(self.prefix + prefix, limit)]

    @property
    def sweep_scope(self) -> object:
        return "advisory locks", self.using

    def sweep(
        self, *, older_than: float, batch_size: int, dry_run: bool = False
    ) -> Iterator[Swept]:
        return self.rows.sweep(to_us(older_than), batch_size, dry_run=dry_run)

    def check_store(self) -> list[CheckMessage]:
        from .checks import check_database

        return check_database(self)

    def close(self) -> None:
        # Only what has been made: closing must not open anything. Leases keep their sessions until
        # they are released.
        if "_pool" in self.__dict__:
            self._pool.close()
        if "rows" in self.__dict__:
            self.rows.close()

    # Waiting

    def wait(self, denial: Denial, until: float, attempt: int) -> None:
        claim = self._inside.waits_for(denial.queued)
        if claim is None:
            self._waiters.sleep(denial, until, attempt)
            return
        try:
            self._inside.wait(denial.queued, claim, min(until - clock.lease_now(), MAX_SLEEP))
        except (DatabaseError, InterfaceError) as error:
            raise unavailable(self.using, error) from error

    async def await_(self, denial: Denial, until: float, attempt: int) -> None:
        await self._waiters.asleep(denial, until, attempt)
