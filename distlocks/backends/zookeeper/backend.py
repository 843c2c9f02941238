"""The ZooKeeper backend: the verbs, and waiting."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar

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
)
from ...clock import lease_now
from ...conf import Params
from ...exceptions import BackendUnavailable, NotSupported
from ...identity import pid
from ...keys import SEPARATOR
from .. import promises
from ..base import BaseBackend
from ..offload import offload
from ..wakeups import Wakeups
from . import acquiring, ending, listing, sweeping
from .session import Interrupted, Paths, Session, Talk, unavailable
from .settings import NAMES, Settings
from .table import Judge

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

T = TypeVar("T")

# Seconds that a verb may take, even if its asker has no time left.
LEAST = 0.1
# Seconds after which a verb that was interrupted is carried out again.
AGAIN = 0.03
# Sessions of processes that forked: they are theirs. Finalising them would speak on their sockets.
_inherited: list[Session] = []
# Seconds for which a thread lets another one of this process go first with a key.
IN_LANE = 0.5


class ZooKeeperBackend(BaseBackend):
    """Locks in a ZooKeeper ensemble (3.5 or newer), by its sessions and its clock.

    OPTIONS: `hosts`, the servers as "zk1:2181,zk2:2181,zk3:2181" or a list of such; `path`, below
    which everything is ("/distlocks"); `timeout`, how many seconds a verb may take, a change of the
    leader among them (5, or a third of MAX_TTL); `auth`, a pair of scheme and credential or a list
    of such; `acl`, "creator" (the default with `auth`), "open", or a list of kazoo.security.ACL;
    `connection`, further arguments for KazooClient, as for TLS.

    A process has one session with the ensemble, which is to last MAX_TTL without a sign of life;
    no lease may be longer than what the servers make of that (their maxSessionTimeout). A lease is
    extended only by a transaction in which its session is found to live. While the connection is
    suspended nothing is extended, and what a dead session had is lost. A lock that its holder left
    behind comes free when the session is dead *and* the lease has passed by the servers' clock, or
    when another process has seen it unchanged for the whole of its ttl: see table.Judge.

    Who waits has a place in a queue and is served first come, first served; it watches nothing but
    the place before its own, and the first of them the key.
    """

    supports_wakeups: ClassVar[bool] = True
    supports_shared: ClassVar[bool] = True
    supports_permits: ClassVar[bool] = True
    supports_tree_keys: ClassVar[bool] = True
    supports_waiters: ClassVar[bool] = True
    supports_sweep: ClassVar[bool] = True
    promise = promises.ZOOKEEPER
    option_names: ClassVar[tuple[str, ...]] = NAMES

    def __init__(self, alias: str, params: Params) -> None:
        super().__init__(alias, params)
        self.settings = Settings(self)
        self.paths = Paths(self.settings.path)
        self._reset()

    def _reset(self) -> None:
        self._pid = pid()
        self.judge = Judge()
        self._mutex = threading.Lock()
        self._session: Session | None = None
        # By key, or the root of a tree: who asks for it in this process, one after the other.
        self._lanes: weakref.WeakValueDictionary[str, threading.Lock] = (
            weakref.WeakValueDictionary()
        )
        # Whether it is to end when it is done with, and how many verbs are under way.
        self._closing = False
        self._talks = 0
        self.wakeups = Wakeups()

    # The session

    def talk(self, verb: Callable[[Talk], T], until: float = math.inf) -> T:
        """Carry out a verb, if need be over another connection or in another session.

        It must be one that may be carried out twice. Raises BackendUnavailable; when the lease
        clock shows `until`, at the latest.
        """
        longest = min(self.settings.timeout, max(until - lease_now(), LEAST))
        give_up = time.monotonic() + longest
        self._check_process()
        with self._mutex:
            self._talks += 1
        try:
            return self._try_until(give_up, verb)
        finally:
            with self._mutex:
                self._talks -= 1
                closing = self._closing
            if closing:
                self.close()

    def _try_until(self, give_up: float, verb: Callable[[Talk], T]) -> T:
        in_doubt = False
        while True:
            try:
                return verb(Talk(self._ready_session(give_up), give_up))
            except Interrupted as error:
                in_doubt |= error.in_doubt
                if time.monotonic() < give_up:
                    time.sleep(AGAIN)
                    continue
                failure = unavailable(self.settings, str(error))
                failure.in_doubt = in_doubt
                raise failure from error
            except BackendUnavailable as failure:
                failure.in_doubt |= in_doubt
                raise

    def _check_process(self) -> None:
        if self._pid != pid():
            if self._session is not None:
                _inherited.append(self._session)
            self._reset()

    def _ready_session(self, give_up: float) -> Session:
        with self._mutex:
            session = self._session
            if session is None or session.dead:
                session = self._session = Session(self.settings, self.paths, self.wakeups.wake_all)
        session.be_ready(give_up)
        return session

    def close(self) -> None:
        """End the session; while it has leases, which would be lost, with the last of them."""
        self._check_process()
        with self._mutex:
            self._closing = True
            session = self._session
            if session is None or self._talks:
                return
            if rest := session.leases_last:
                # Of one that nobody releases, nobody tells.
                timer = threading.Timer(rest, self.close)
                timer.daemon = True
                timer.start()
                return
            self._session = None
        session.close()

    # The verbs

    def try_acquire(self, request: Request) -> Grant | Denial:
        self._refuse_longer(request.ttl_us)
        # A grant changes the version of the key, and of those above it, that others go by: threads
        # of one process that want the same do not outrun each other.
        with self._mutex:
            lane = self._lanes.setdefault(request.keys[0].partition(SEPARATOR)[0], threading.Lock())
        is_ours = lane.acquire(timeout=IN_LANE)
        try:
            return self.talk(lambda talk: acquiring.attempt(self, talk, request))
        finally:
            if is_ours:
                lane.release()

    def _refuse_longer(self, ttl_us: int) -> None:
        lasts = self.talk(lambda talk: talk.session.timeout)
        if ttl_us > lasts * MICROSECOND:
            raise NotSupported(
                f"A lease of {ttl_us / MICROSECOND:g} s would outlast its ZooKeeper session: the "
                f"servers of {self.alias!r} let a session last {lasts:g} s without a sign of life. "
                f"Ask for a shorter ttl (TTL, MAX_TTL), or raise maxSessionTimeout on the servers."
            )

    def abandon(self, request: Request) -> None:
        self.talk(lambda talk: ending.abandon(talk, request))

    def release(self, grant: Grant) -> bool:
        return self.talk(lambda talk: ending.release(talk, grant))

    def extend(self, extensions: Sequence[Extension]) -> Extended:
        if not extensions:
            return Extended(extended=frozenset(), lost=frozenset())
        self._refuse_longer(max(extension.ttl_us for extension in extensions))
        return self.talk(lambda talk: ending.extend(self.judge, talk, extensions))

    # Looking and clearing up

    def holders(self, prefix: str = "", *, limit: int | None = None) -> list[Holder]:
        return self.talk(lambda talk: listing.holders(self, talk, self.prefix + prefix, limit))

    def holders_of(self, key: str, *, limit: int | None = None) -> list[Holder]:
        name = self.prefix + key
        return self.talk(lambda talk: listing.holders_of(self, talk, name))[:limit]

    def waiters(self, key: str) -> list[Waiter]:
        return self.talk(lambda talk: listing.waiters(self, talk, self.prefix + key))

    def force_release(self, key: str) -> list[Holder]:
        return self.talk(lambda talk: sweeping.force_release(self, talk, self.prefix + key))

    def sweep(
        self, *, older_than: float, batch_size: int, dry_run: bool = False
    ) -> Iterator[Swept]:
        return sweeping.sweep(self, older_than, batch_size, dry_run)

    def check_store(self) -> list[CheckMessage]:
        from .checks import check_servers

        return check_servers(self)

    # Waiting

    def wait(self, denial: Denial, until: float, attempt: int) -> None:
        path = self._to_watch(denial, until)
        if path is not None:
            with self.wakeups.ticket(path) as ticket:
                if self._watched(denial, path, until):
                    ticket.wait(until)

    async def await_(self, denial: Denial, until: float, attempt: int) -> None:
        path = await offload(lambda: self._to_watch(denial, until))
        if path is not None:
            with self.wakeups.ticket(path) as ticket:
                if await offload(lambda: self._watched(denial, path, until)):
                    await ticket.wait_async(until)

    def _to_watch(self, denial: Denial, until: float) -> str | None:
        try:
            return self.talk(partial(acquiring.what_to_watch, denial), until)
        except BackendUnavailable:
            # The next try, which may take longer, tells.
            return None

    def _watched(self, denial: Denial, path: str, until: float) -> bool:
        try:
            return self.talk(partial(acquiring.watch, self, denial, path), until)
        except BackendUnavailable:
            return False
