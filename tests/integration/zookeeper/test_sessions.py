"""A session is suspended, dies, or is not what was asked for; and a process has but one."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from pytest_django.fixtures import Settings

from distlocks import BackendUnavailable, Lease, LeaseLost, NotSupported, locks
from distlocks.backends.zookeeper import session
from distlocks.claims import Denial, Grant
from distlocks.clock import lease_now
from tests.integration.contract.stores import ZOOKEEPER_STORES, Gate, Store, for_stores
from tests.integration.contract.zookeeper_stores import ZooKeeperStore
from tests.integration.zookeeper.scene import Cut
from tests.servers.proxy import FaultProxy
from tests.waiting import eventually, eventually_on_loop

Start = Callable[..., Future[Any]]
MakeAlias = Callable[..., Store]
pytestmark = for_stores(ZOOKEEPER_STORES)


@pytest.fixture
def other(store: Store, settings: Settings) -> Iterator[MakeAlias]:
    """`other(hosts=…, max_ttl=…)`: another client, with a session of its own."""
    made: list[Store] = []
    backends: list[Any] = []

    def make(max_ttl: float = 30, **options: Any) -> Store:
        alias = f"other{len(made)}"
        entry = settings.DISTLOCKS[store.alias]
        entry = {**entry, "TTL": max_ttl, "OPTIONS": {**entry["OPTIONS"], **options}}
        settings.DISTLOCKS = {**settings.DISTLOCKS, alias: entry}
        made.append(Store(alias))
        backends.append(made[-1].backend)
        return made[-1]

    yield make
    for one in made:
        one.clean_up()
    for backend in backends:
        if backend._session is not None:
            # What a test has left held is not to keep it open.
            backend._session.leases.clear()
        backend.close()


def kill_session(store: Store) -> None:
    """Have the ensemble declare the session of the process dead, as after a long silence."""
    mine = locks[store.alias]._session  # type: ignore[attr-defined]
    client_id = mine._client.client_id
    options = mine.settings
    thief = KazooClient(hosts=options.hosts, timeout=options.session_timeout, client_id=client_id)
    thief.start()
    thief.stop()
    thief.close()
    eventually(lambda: mine.dead)


class TestSuspended:
    """The connection is gone, and nobody knows for how long."""

    @pytest.fixture
    def cut(self, store: ZooKeeperStore, other: MakeAlias) -> Iterator[tuple[Store, FaultProxy]]:
        host, _, port = store.zookeeper.settings.hosts.split(",")[0].partition(":")
        with FaultProxy(host, int(port)) as proxy:
            yield other(hosts=f"{proxy.host}:{proxy.port}", timeout=0.4), proxy
            proxy.mode = "pass"

    def test_nothing_is_extended_and_the_lease_ends_at_its_deadline(
        self, store: Store, cut: tuple[Store, FaultProxy], key: str
    ) -> None:
        cut_off, proxy = cut
        heard: list[Lease] = []
        lease = cut_off.hold(key, ttl=1.5, on_lost=heard.append)
        proxy.mode = "reset"
        deadline = lease.deadline
        with pytest.raises(BackendUnavailable):
            lease.extend()
        assert lease.deadline == deadline
        eventually(lambda: heard == [lease])
        assert lease_now() < deadline + 0.5
        proxy.mode = "pass"

    def test_it_goes_on_when_the_connection_is_back(
        self, store: Store, cut: tuple[Store, FaultProxy], key: str
    ) -> None:
        cut_off, proxy = cut
        lease = cut_off.hold(key, ttl=20, renew=False)
        proxy.mode = "reset"
        with pytest.raises(BackendUnavailable):
            lease.extend()
        proxy.mode = "pass"
        eventually(lambda: _extends(lease))
        assert lease.release()
        assert store.is_free(key)


def _extends(lease: Lease) -> bool:
    try:
        lease.extend()
    except BackendUnavailable:
        return False
    return True


class TestDead:
    """The ensemble has declared the session dead, and its holder is as alive as ever."""

    def test_what_it_had_is_lost_at_once_and_not_had_by_another_before_it_ends(
        self, store: Store, other: MakeAlias, key: str
    ) -> None:
        holder = other()
        lease = holder.hold(key, ttl=20, renew=False)
        kill_session(holder)
        with pytest.raises(LeaseLost):
            lease.extend()
        assert lease_now() < lease.deadline
        # It may still believe in it, as far as anybody else knows.
        denial = store.backend.try_acquire(store.request(key))
        assert isinstance(denial, Denial)
        assert 10 < denial.remaining <= 20
        store.age(20.5, key)
        assert store.hold(key).fencing_token > lease.fencing_token

    def test_the_renewer_tells_before_the_deadline(
        self, other: MakeAlias, store: Store, key: str
    ) -> None:
        heard: list[float] = []
        holder = other()
        lease = holder.hold(key, ttl=3, on_lost=lambda lost: heard.append(lease_now()))
        deadline = lease.deadline
        kill_session(holder)
        eventually(lambda: heard)
        assert heard[0] < deadline

    def test_the_process_goes_on_with_another(
        self, other: MakeAlias, store: Store, key: str
    ) -> None:
        one = other()
        one.hold(f"{key}:before")
        kill_session(one)
        assert one.hold(f"{key}:after").release()
        assert not one.is_free(f"{key}:before")

    def test_who_waits_goes_on_waiting(
        self, other: MakeAlias, store: Store, key: str, start: Start
    ) -> None:
        first = store.hold(key)
        waits = other()
        waiter = start(waits.lock(key, timeout=20).acquire)
        eventually(lambda: len(store.backend.waiters(key)) == 1)
        (before,) = store.backend.waiters(key)
        kill_session(waits)
        eventually(lambda: [w.since for w in store.backend.waiters(key)] > [before.since])
        first.release()
        assert waiter.result(10).release()
        assert store.backend.waiters(key) == []

    def test_a_resent_request_does_not_wait_for_itself(
        self, other: MakeAlias, store: Store, key: str
    ) -> None:
        """Its first try was granted in the session that has died since."""
        one = other()
        request = one.request(key)
        first = one.backend.try_acquire(request)
        assert isinstance(first, Grant)
        kill_session(one)
        again = one.backend.try_acquire(request)
        assert isinstance(again, Grant)
        assert again.fencing_tokens > first.fencing_tokens
        assert len(store.backend.holders(key)) == 1

    def test_an_acquire_that_it_interrupts_is_carried_out_in_the_next(
        self, other: MakeAlias, store: Store, key: str, gate: Callable[..., Gate], start: Start
    ) -> None:
        one = other()
        one.hold(f"{key}:warm")
        before = gate(session.Transaction, "send")
        asking = start(one.lock(key, timeout=0).acquire)
        assert before.arrived.wait(10)
        kill_session(one)
        before.open()
        assert asking.result(10).release()
        assert store.is_free(key)

    def test_when_somebody_has_removed_everything_it_is_made_anew(
        self, other: MakeAlias, store: ZooKeeperStore, key: str
    ) -> None:
        path = f"/gone-{key[-12:]}"
        one = other(path=path)
        lease = one.hold(key, renew=False)
        store.with_client(lambda client: client.delete(path, recursive=True))
        with pytest.raises(LeaseLost):
            lease.extend()
        assert one.hold(key).release()
        assert one.backend.waiters(key) == []

    def test_also_when_only_a_part_is_gone(
        self, other: MakeAlias, store: ZooKeeperStore, key: str
    ) -> None:
        path = f"/gone-{key[-12:]}"
        one = other(path=path)
        one.hold(key).release()
        for part in ("locks", "queue"):
            store.with_client(
                lambda client, part=part: client.delete(f"{path}/{part}", recursive=True)
            )
            held = one.hold(key)
            assert one.lock(key, timeout=0.1).try_acquire() is None
            assert held.release()


class TestLength:
    def test_a_lease_that_would_outlast_it_is_refused(
        self, other: MakeAlias, store: Store, key: str
    ) -> None:
        """The servers of the tests let no session last for longer than a minute."""
        long = other(max_ttl=90)
        with pytest.raises(NotSupported, match="maxSessionTimeout"):
            long.lock(key, ttl=61, timeout=0).acquire()
        lease = long.hold(key, ttl=60, renew=False)
        with pytest.raises(NotSupported, match="maxSessionTimeout"):
            lease.extend(90)
        assert not lease.lost
        (error,) = long.backend.check_store()
        assert error.id == "distlocks.E042"
        assert "60 s" in error.msg

    def test_it_is_as_long_as_the_longest_lease(self, other: MakeAlias, store: Store) -> None:
        backend: Any = other(max_ttl=7).backend
        assert backend.talk(lambda talk: talk.session.timeout) == 7
        assert backend.check_store() == []


class TestOnePerProcess:
    def sessions(self, store: ZooKeeperStore) -> list[str]:
        path = store.zookeeper.paths.sessions
        found: list[str] = store.with_client(lambda client: client.get_children(path))
        return found

    def test_threads_and_tasks_share_it(
        self, store: ZooKeeperStore, other: MakeAlias, key: str, start: Start
    ) -> None:
        store.hold(f"{key}:warm")
        before = set(self.sessions(store))
        one = other()

        async def work(number: int) -> None:
            async with one.lock(f"{key}:{number}"):
                pass

        for future in [start(asyncio.run, work(number)) for number in range(8)]:
            future.result(20)
        assert len(set(self.sessions(store)) - before) == 1

    def test_its_end_is_told_to_the_ensemble(
        self, store: ZooKeeperStore, other: MakeAlias, key: str
    ) -> None:
        store.hold(f"{key}:warm")
        before = set(self.sessions(store))
        one = other()
        one.hold(key).release()
        one.backend.close()
        eventually(lambda: not set(self.sessions(store)) - before)

    def test_it_outlives_a_close_as_long_as_it_has_leases(
        self, store: ZooKeeperStore, other: MakeAlias, key: str
    ) -> None:
        before = set(self.sessions(store))
        one = other()
        lease = one.hold(key, renew=False)
        one.backend.close()
        lease.extend()
        assert lease.release()
        eventually(lambda: not set(self.sessions(store)) - before)

    async def test_many_tasks_that_wait_need_neither_threads_nor_leave_anything(
        self, store: ZooKeeperStore, key: str
    ) -> None:
        held = await store.ahold(key)
        threads = threading.active_count()
        tasks = [asyncio.create_task(store.lock(key, timeout=60).aacquire()) for _ in range(100)]
        await eventually_on_loop(
            lambda: len(store.aside(lambda: store.backend.waiters(key))) == 100
        )
        assert threading.active_count() < threads + 20
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        await eventually_on_loop(lambda: len(store.aside(lambda: store.backend.waiters(key))) == 1)
        await held.arelease()
        async with asyncio.timeout(10):
            lease = await tasks[0]
        await lease.arelease()


class TestAccess:
    def test_the_nodes_are_for_those_who_know_the_secret(
        self, store: ZooKeeperStore, other: MakeAlias, key: str
    ) -> None:
        path = f"/secret-{key[-12:]}"
        ours = other(path=path, auth=("digest", "locks:secret"))
        assert ours.hold(key).release()
        lease = ours.hold(key)

        def look(client: Any) -> None:
            client.get_children(f"{path}/locks")

        with pytest.raises(NoAuthError):
            store.with_client(look)
        theirs = other(path=path)
        with pytest.raises(BackendUnavailable, match="NoAuth") as refused:
            theirs.lock(key, timeout=0).acquire()
        assert "secret" not in str(refused.value)
        assert lease.release()


class TestLagging:
    """The server that a session speaks with is behind the others."""

    # How often it is tried: once in a while the server has caught up before it answers.
    TRIES = 3
    # It has so many changes to learn of before it knows of the release.
    BEHIND = 2000

    def test_what_has_been_released_is_free_for_who_asks_there(
        self, cut: Cut, other: MakeAlias, key: str, start: Start, gate: Callable[..., Gate]
    ) -> None:
        cut.heal()
        follower = cut.ensemble.follower
        path = f"/lag-{key[-12:]}"
        there = other(hosts=follower.address, path=path)
        elsewhere = other(hosts=cut.ensemble.leader.address, path=path)
        there.hold(f"{key}:warm").release()
        for _ in range(self.TRIES):
            lease = elsewhere.hold(key, renew=False)
            assert not there.is_free(key)
            follower.pause()
            try:
                writer = elsewhere.backend._session._client
                changes = [writer.set_async(path, b"") for _ in range(self.BEHIND)]
                changes[-1].get(timeout=10)
                lease.release()
                asked = gate(session.Session, "_answer")
                asking = start(there.lock(key, timeout=0).acquire)
                assert asked.arrived.wait(10)
                asked.open()
            finally:
                follower.resume()
            asking.result(10).release()
            assert there.backend.holders(key) == []
