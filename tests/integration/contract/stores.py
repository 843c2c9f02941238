"""The stores of the contract, and what tests do to them behind the library's back."""

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from django.conf import settings
from django.core import mail
from django.db import connections
from django.db.models import F, Max
from django.dispatch import Signal

from distlocks import DistlocksError, Lease, NotSupported, clock, db_lock, locks, signals
from distlocks.backends.base import BaseBackend
from distlocks.claims import EXCLUSIVE, Grant, Holder, Request, Swept, claims_on, to_us
from distlocks.identity import new_owner_id
from distlocks.keys import Key, check_key
from distlocks.models import Lock, LockHolder
from distlocks.renewal import renewer
from distlocks.testing import FakeClock, fake_clock, flush_events

# Aliases of DISTLOCKS in tests.settings.
REDIS_STORES = (
    "redis",
    "redis_cache",
    "redis_django",
    "valkey",
    "redis_sentinel",
    "redis_cluster",
)
STORES = (
    "memory",
    "sqlite",
    "portable_sqlite",
    "postgres",
    "portable_postgres",
    "mariadb",
    "portable_mariadb",
    *REDIS_STORES,
)
# While Redis has the authority, and while a database has.
FAST_STORES = ("fastpath", "fastpath_on_postgres", "fastpath_on_mariadb")
# By a majority of servers.
QUORUM_STORES = ("redlock",)
# Apart, so that hazards which do not depend on the store are not run on yet another.
ZOOKEEPER_STORES = ("zookeeper",)
# Whose locks are PostgreSQL's own.
ADVISORY_STORES = ("advisory",)
# Those that several processes can share.
SHARED_STORES = (*STORES[1:], *ZOOKEEPER_STORES)
# One of each kind, for what takes long and does not depend on the statements: with a connection of
# its own to either database, and through the ORM.
KINDS_OF_SHARED_STORES = (
    "sqlite",
    "postgres",
    "portable_postgres",
    "redis",
    "zookeeper",
    *ADVISORY_STORES,
)
DATABASE_STORES = tuple(store for store in STORES[1:] if store not in REDIS_STORES)
# For what takes long: each way to a store once.
FEWER_SHARED_STORES = (
    "sqlite",
    "postgres",
    "portable_postgres",
    "mariadb",
    "redis",
    "redis_cluster",
    *QUORUM_STORES,
    *ZOOKEEPER_STORES,
    *ADVISORY_STORES,
)
SQLITE_STORES = ("sqlite", "portable_sqlite")
POSTGRES_STORES = ("postgres", "portable_postgres")


# Of which an ordinary run shows the like: hazards through the ORM, and where the servers are named
# in another way, or are more; the contract where another database stands behind Redis.
FOR_LONG_RUNS = {
    ".hazards.": (
        "portable_sqlite",
        "portable_postgres",
        "portable_mariadb",
        "redis_cache",
        "redis_django",
        "redis_sentinel",
        "valkey",
    ),
    ".contract.": ("fastpath_on_mariadb",),
}


def for_stores(aliases: Sequence[str]) -> pytest.MarkDecorator:
    """`@for_stores(SHARED_STORES)`: the test runs on these only."""
    return pytest.mark.parametrize("store", aliases, indirect=True)


def ordinary_or_long(stores: Sequence[str], module: str) -> list[Any]:
    """The stores as parameters, some of them only for long runs of tests in this module."""
    rare = [one for part, names in FOR_LONG_RUNS.items() if part in module for one in names]
    return [
        pytest.param(store, marks=[pytest.mark.soak] if store in rare else []) for store in stores
    ]


class StoreClock(clock.Clock):
    """The clock in force, with the wall clock (by which the memory store expires) set apart."""

    def __init__(self, real: clock.Clock, ahead_us: int) -> None:
        self._real = real
        self._ahead_us = ahead_us
        self.now = real.now  # type: ignore[method-assign]
        self.wait = real.wait  # type: ignore[method-assign]
        self.wait_async = real.wait_async  # type: ignore[method-assign]

    def wall_us(self) -> int:
        return self._real.wall_us() + self._ahead_us


class Store:
    """One store, as its clients use it and as its owner can change it."""

    # Does a sweep tell who has left leases behind? Not where nothing of them is left.
    reports_the_dead = True
    # Does force_release() take from a holder of several keys the one key only?
    frees_single_keys = True
    # How many leases a process may have at once.
    most_leases = 1000

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._leases: list[Lease] = []
        # Another client: a thread with a connection of its own, so that tests on an event loop
        # can look too.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="beside-the-store")

    @property
    def backend(self) -> BaseBackend:
        return locks[self.alias]

    @property
    def using(self) -> str:
        """The database alias; '' for the memory store."""
        return settings.DISTLOCKS[self.alias].get("OPTIONS", {}).get("using", "")

    def refuses(self, error: NotSupported) -> bool:
        """Whether the error is its refusal, by name, of claims that it says it has not."""
        backend = self.backend
        kinds = {
            "shared locks": backend.supports_shared,
            "permits": backend.supports_permits,
            "tree keys": backend.supports_tree_keys,
        }
        return any(f"has no {kind}" in str(error) for kind, there in kinds.items() if not there)

    # The public API

    def lock(self, *keys: Any, **options: Any) -> db_lock:
        return db_lock(*keys, backend=self.alias, **options)

    def hold(self, *keys: Key, **options: Any) -> Lease:
        """A lease, had at once and released at the test's end."""
        options.setdefault("timeout", 0)
        lease = self.lock(*keys, **options).acquire()
        self._leases.append(lease)
        return lease

    async def ahold(self, *keys: str, **options: Any) -> Lease:
        options.setdefault("timeout", 0)
        lease = await self.lock(*keys, **options).aacquire()
        self._leases.append(lease)
        return lease

    # The verbs

    def request(
        self,
        *keys: str,
        ttl: float = 30,
        min_hold: float = 0,
        mode: str = EXCLUSIVE,
        limit: int = 0,
        **more: Any,
    ) -> Request:
        more.setdefault("owner_id", new_owner_id())
        return Request(
            claims=claims_on([self.backend.prefix + check_key(key) for key in keys], mode, limit),
            ttl_us=to_us(ttl),
            min_hold_us=to_us(min_hold),
            **more,
        )

    def grant(self, *keys: str, **options: Any) -> Grant:
        """What a request for the keys, which are free, is answered."""
        answer = self.backend.try_acquire(self.request(*keys, **options))
        assert isinstance(answer, Grant), answer
        return answer

    def holder(self, key: str) -> Holder | None:
        """Who has the key, or had it last while it cools down; None if it is free."""
        found: list[Holder] = self.aside(lambda: self.backend.holders(key))
        return next((one for one in found if one.key == key), None)

    def owner(self, key: str) -> str:
        """The owner id of who has the key; '' if it is free or cools down."""
        holder = self.holder(key)
        return holder.owner_id if holder else ""

    def is_free(self, key: str) -> bool:
        """Whether the key can be had now."""
        return self.holder(key) is None

    # Behind the library's back

    def aside(self, act: Callable[[], Any]) -> Any:
        """`act()` in the other client's thread."""
        return self._aside.submit(act).result(20)

    def rows(self, *keys: str) -> Any:
        return Lock.objects.using(self.using).filter(
            key__in=[self.backend.prefix + k for k in keys]
        )

    def _all_rows(self, *keys: str) -> list[Any]:
        claims = LockHolder.objects.using(self.using)
        names = [self.backend.prefix + key for key in keys]
        return [self.rows(*keys), claims.filter(key__in=names)]

    def row(self, key: str) -> Lock:
        return self.aside(lambda: self.rows(key).get())

    def age(self, seconds: float, *keys: str) -> None:
        """Make the store believe that so much time has passed since it wrote the keys' rows.

        The holders' own clocks know nothing of it.
        """
        shift = to_us(seconds)
        if self.using:
            times = {"acquired_at": F("acquired_at") - shift, "expires_at": F("expires_at") - shift}
            self.aside(lambda: [rows.update(**times) for rows in self._all_rows(*keys)])
        else:
            clock.replace(StoreClock(clock.current(), shift))

    def expire(self, *keys: str) -> None:
        """Make the leases of the keys expire at the store."""
        self.age(3600, *keys)

    def expire_claims(self, key: str, *leases: Lease) -> None:
        """Make these claims on the key expire at the store, and no others on it."""
        owners = {lease.owner_id for lease in leases}
        name = self.backend.prefix + check_key(key)
        if self.using:
            self.aside(lambda: self._expire_claims(name, owners))
            return
        row = self.backend._rows[name]  # type: ignore[attr-defined]
        for owner_id in owners:
            row.held[owner_id].expires_us = 1

    def _expire_claims(self, name: str, owners: set[str]) -> None:
        claims = LockHolder.objects.using(self.using).filter(key=name)
        claims.filter(owner_id__in=owners).update(expires_at=1)
        # As the row is when time has passed: until the last live claim on it ends.
        latest = claims.aggregate(latest=Max("expires_at"))["latest"]
        Lock.objects.using(self.using).filter(key=name).update(expires_at=latest)

    def shift_all(self, root: str, us: int) -> None:
        """Make the store believe that so much time has passed since it wrote the rows of all keys
        that begin with `root`, or less if it is negative. What is free stays free.
        """
        if self.using:
            self.aside(lambda: self._shift_rows(root, us))
        else:
            clock.replace(StoreClock(clock.current(), us))

    def _shift_rows(self, root: str, us: int) -> None:
        for rows in self._rows_under(root):
            rows.update(acquired_at=F("acquired_at") - us)
            rows.exclude(expires_at=0).update(expires_at=F("expires_at") - us)

    def forget_all(self, root: str) -> None:
        """Delete the rows of all keys that begin with `root`."""
        if self.using:
            self.aside(lambda: [rows.delete() for rows in self._rows_under(root)])

    def _rows_under(self, root: str) -> list[Any]:
        name = self.backend.prefix + root
        return [
            model._base_manager.using(self.using).filter(key__startswith=name)
            for model in (Lock, LockHolder)
        ]

    def sweep(self) -> list[Swept]:
        return list(self.backend.sweep(older_than=86400, batch_size=1000))

    def lose(self, key: str, how: str) -> Lease | None:
        """Take the key from its holder, behind its back; the lease of the next, if there is one."""
        if how == "force-released":
            self.backend.force_release(key)
            return None
        self.expire(key)
        if how == "taken over":
            return self.hold(key, renew=False)
        assert how == "swept"
        list(self.backend.sweep(older_than=86400, batch_size=1000))
        return None

    def set_clock_back(self, seconds: float, *keys: str) -> None:
        """Make the rows of the keys, which are free, look as written before a step of the clock."""
        if self.using:
            self.aside(
                lambda: self.rows(*keys).update(fencing_token=F("fencing_token") + to_us(seconds))
            )
        else:
            self.age(-seconds)

    # The end

    def clean_up(self) -> None:
        for lease in self._leases:
            with suppress(DistlocksError):
                lease.release()
        renewer.releases.settle()
        self._aside.submit(connections.close_all)
        self._aside.shutdown()


@pytest.fixture
def store(
    request: pytest.FixtureRequest, databases: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """A store, used as in production.

    Under Django's test environment, connections are closed whenever no lease is held; how that
    works is tested elsewhere.
    """
    monkeypatch.delattr(mail, "outbox", raising=False)
    real_clock = clock.current()
    if request.param in REDIS_STORES:
        from tests.integration.contract.redis_stores import RedisStore

        store: Store = RedisStore(request.param)
    elif request.param in ADVISORY_STORES:
        from tests.integration.contract.advisory_stores import AdvisoryStore

        store = AdvisoryStore(request.param)
    elif request.param.startswith("fastpath"):
        from tests.integration.contract.fast_stores import fast_store

        store = fast_store(request.param)
    elif request.param in QUORUM_STORES:
        from tests.integration.contract.redlock_store import RedlockStore

        store = RedlockStore(request.param)
    elif request.param in ZOOKEEPER_STORES:
        from tests.integration.contract.zookeeper_stores import ZooKeeperStore

        store = ZooKeeperStore(request.param)
    else:
        store = Store(request.param)
    yield store
    clock.replace(real_clock)
    store.clean_up()
    locks.close_all()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test of claims that the store has not ends where they are refused."""
    try:
        return (yield)
    except NotSupported as refused:
        store = pyfuncitem.funcargs.get("store")
        if isinstance(store, Store) and store.refuses(refused):
            return True
        raise


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run on every store what does not say for which it is."""
    if "store" in metafunc.fixturenames and not any(
        "store" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")
    ):
        stores: tuple[str, ...] = STORES
        if ".hazards." in metafunc.module.__name__:
            stores = (*STORES, *QUORUM_STORES, *ADVISORY_STORES)
        if ".contract." in metafunc.module.__name__:
            stores = (
                *STORES,
                *FAST_STORES,
                *QUORUM_STORES,
                *ZOOKEEPER_STORES,
                *ADVISORY_STORES,
            )
        metafunc.parametrize(
            "store", ordinary_or_long(stores, metafunc.module.__name__), indirect=True
        )


@pytest.fixture
def moved_clock(store: Store) -> Iterator[FakeClock]:
    """A lease clock in the test's hands; a wait moves it on. For tests of a single thread."""
    with fake_clock() as moved:
        yield moved


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    """`start(function, *args)` in a thread; the test ends when all threads have."""
    threads: list[threading.Thread] = []

    def run(future: Future[Any], function: Callable[..., Any], *args: Any) -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    def start(function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        # One that hangs must fail its test, not keep the run from ending.
        thread = threading.Thread(target=run, args=(future, function, *args), daemon=True)
        thread.start()
        threads.append(thread)
        return future

    yield start
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads), "a thread of the test hangs"


class Told:
    """What the signals have told, in order."""

    def __init__(self) -> None:
        self._heard: list[tuple[Signal, dict[str, Any]]] = []

    def hear(self, signal: Signal, **arguments: Any) -> None:
        self._heard.append((signal, arguments))

    def of(self, signal: Signal, key: str) -> list[dict[str, Any]]:
        """The arguments of what was sent by `signal` about `key`."""
        flush_events()
        return [said for sent, said in self._heard if sent is signal and key in said["keys"]]


@pytest.fixture
def told() -> Iterator[Told]:
    """Hears every signal."""
    heard = Told()
    every = (
        signals.lock_acquired,
        signals.lock_denied,
        signals.lock_released,
        signals.lease_lost,
    )
    for signal in every:
        signal.connect(heard.hear)
    yield heard
    for signal in every:
        signal.disconnect(heard.hear)


class Gate:
    """Stands before or after one call of a method: `arrived` tells that it came, `open` lets it on.

    Calls beyond the first `times` pass.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        target: object,
        name: str,
        *,
        after: bool = False,
        times: int = 1,
    ) -> None:
        self.arrived = threading.Event()
        self.opened = threading.Event()
        self._left = times
        self._mutex = threading.Lock()
        real = getattr(target, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if not self._stops():
                return real(*args, **kwargs)
            if after:
                result = real(*args, **kwargs)
                self._stand()
                return result
            self._stand()
            return real(*args, **kwargs)

        monkeypatch.setattr(target, name, guarded)

    def open(self) -> None:
        self.opened.set()

    def _stops(self) -> bool:
        with self._mutex:
            self._left -= 1
            return self._left >= 0

    def _stand(self) -> None:
        self.arrived.set()
        if not self.opened.wait(20):
            raise AssertionError("Nobody has opened the gate.")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Gate]]:
    """`gate(backend, "release")` makes a Gate; all are opened at the test's end."""
    gates: list[Gate] = []

    def make(target: object, name: str, **options: Any) -> Gate:
        gates.append(Gate(monkeypatch, target, name, **options))
        return gates[-1]

    yield make
    for one in gates:
        one.open()


class LoopGate:
    """A Gate for a verb's async twin that runs on the event loop itself."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, target: object, name: str, *, after: bool = False
    ) -> None:
        self.arrived = threading.Event()
        self._opened = asyncio.Event()
        self._passed = False
        real = getattr(target, name)

        async def guarded(*args: Any) -> Any:
            if self._passed:
                return await real(*args)
            self._passed = True
            result = await real(*args) if after else None
            self.arrived.set()
            await self._opened.wait()
            return result if after else await real(*args)

        monkeypatch.setattr(target, name, guarded)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def stop(
    store: Store, gate: Callable[..., Gate], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Gate | LoopGate]:
    """`stop("release")` makes a gate before, or after, the verb that an event loop calls."""

    def make(verb: str, **options: Any) -> Gate | LoopGate:
        if store.alias in REDIS_STORES:
            return LoopGate(monkeypatch, store.backend, f"a{verb}", **options)
        return gate(store.backend, verb, **options)

    return make
