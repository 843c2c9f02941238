"""Renewals that fail, hang, come late, or meet a release on the way."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
from django.db import connections
from pytest_django.fixtures import Settings

from distlocks import BackendUnavailable, Lease, LeaseLost, db_lock, signals
from distlocks.claims import Extended
from distlocks.clock import lease_now
from distlocks.testing import FakeClock, flush_events
from tests.integration.contract.stores import (
    SQLITE_STORES,
    Gate,
    Store,
    Told,
    for_stores,
)
from tests.integration.hazards import roles
from tests.integration.hazards.conftest import zookeeper_servers
from tests.integration.hazards.proxied import PROXIED_STORES, Proxied
from tests.servers.base import Server
from tests.servers.children import Spawner
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.waiting import eventually


class TestFailingRenewal:
    """A renewal fails: not a reason to give up before the deadline, nor to go on after it."""

    def test_one_error_is_made_up_for(
        self,
        store: Store,
        key: str,
        moved_clock: FakeClock,
        told: Told,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        lease = store.hold(key, ttl=10)
        real = store.backend.extend
        errors = iter([BackendUnavailable("once"), RuntimeError("and of another kind")])

        def extend(extensions: Any) -> Extended:
            if error := next(errors, None):
                raise error
            return real(extensions)

        monkeypatch.setattr(store.backend, "extend", extend)
        moved_clock.advance(60)
        assert next(errors, None) is None
        assert not lease.lost
        assert told.of(signals.lease_lost, key) == []
        assert lease.release() is True

    def test_until_the_leases_own_deadline_and_no_longer(
        self, store: Store, key: str, moved_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heard: list[Any] = []
        tries: list[float] = []

        def extend(extensions: Any) -> Extended:
            tries.append(moved_clock.now())
            raise BackendUnavailable("The network is down.")

        monkeypatch.setattr(store.backend, "extend", extend)
        lease = store.hold(key, ttl=10, on_lost=heard.append)
        rest = lease.deadline - moved_clock.now()
        moved_clock.advance(rest - 0.1)
        assert not lease.lost
        assert heard == []
        assert len(tries) > 3, "it did not give up after the first"
        moved_clock.advance(0.2)
        assert lease.lost
        assert heard == [lease]
        count = len(tries)
        moved_clock.advance(60)
        assert len(tries) == count, "what is lost is not renewed"

    @for_stores(PROXIED_STORES)
    def test_a_broken_connection_costs_no_lock(self, proxied: Proxied, key: str) -> None:
        with proxied.lock(key, ttl=4, timeout=0) as lease:
            first = lease.deadline
            proxied.proxy.cut()
            eventually(lambda: lease.deadline > first)
            lease.check()

    @for_stores(("postgres", "redis"))
    def test_nor_does_a_store_that_is_away_for_less_than_a_lease(
        self, proxied: Proxied, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with proxied.lock(key, ttl=3, timeout=0) as lease:
            first = lease.deadline
            proxied.proxy.mode = "reset"
            eventually(lambda: "could not be extended" in caplog.text)
            proxied.proxy.mode = "pass"
            eventually(lambda: lease.deadline > first)
            lease.check()

    @for_stores(SQLITE_STORES)
    def test_nor_does_another_writer(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        """A transaction that keeps the whole database locked for less than a lease."""
        lease = store.hold(key, ttl=4)
        first = lease.deadline
        began = lease_now()

        def write_for_a_while() -> None:
            with closing(connections[store.using].copy()) as other, other.cursor() as cursor:
                cursor.execute("BEGIN IMMEDIATE")
                eventually(lambda: lease_now() > began + 1.5)
                cursor.execute("ROLLBACK")

        start(write_for_a_while).result(20)
        eventually(lambda: lease.deadline > first)
        lease.check()
        assert lease.release() is True


class TestTellingOfALoss:
    """Who works under a lease that is gone is told at once, in all three ways, and can ask."""

    @pytest.mark.parametrize("how", ["force-released", "taken over", "swept"])
    def test_with_the_next_renewal(
        self, store: Store, key: str, moved_clock: FakeClock, told: Told, how: str
    ) -> None:
        heard: list[Any] = []
        lease = store.hold(key, ttl=10, on_lost=heard.append, label="nightly")
        store.lose(key, how)
        moved_clock.advance(4)
        assert lease.lost
        assert heard == [lease]
        (said,) = told.of(signals.lease_lost, key)
        assert said["sender"] is type(store.backend)
        assert (said["alias"], said["keys"]) == (store.alias, (key,))
        assert (said["owner_id"], said["label"]) == (lease.owner_id, "nightly")
        assert said["fencing_tokens"] == (lease.fencing_token,)
        assert said["reason"]
        with pytest.raises(LeaseLost):
            lease.check()

    @for_stores(("memory", "sqlite", "postgres", "redis"))
    def test_in_real_time_and_during_the_body(self, store: Store, key: str) -> None:
        lost = threading.Event()

        def work(lease: Lease) -> None:
            store.backend.force_release(key)
            assert lost.wait(10)
            assert lease.lost
            assert lease_now() < lease.deadline, "it was told before its deadline"

        lock = store.lock(key, ttl=4, timeout=0, on_lost=lambda lease: lost.set())
        with pytest.raises(LeaseLost), lock as lease:
            work(lease)

    def test_of_several_only_the_lost_one_is_told(
        self, store: Store, key: str, moved_clock: FakeClock, told: Told
    ) -> None:
        leases = [store.hold(f"{key}:{number}", ttl=10) for number in range(3)]
        store.backend.force_release(f"{key}:1")
        moved_clock.advance(60)
        assert [lease.lost for lease in leases] == [False, True, False]
        lost = [len(told.of(signals.lease_lost, f"{key}:{number}")) for number in range(3)]
        assert lost == [0, 1, 0]


class TestHungRenewal:
    """A store that does not answer does not hide that the time is up."""

    def must_be_known(self, lease: Any, heard: list[Any], told: Told) -> None:
        # The callback and the signal come from another thread, right after the deadline.
        eventually(lambda: heard, within=lease.remaining + 5)
        assert lease_now() >= lease.deadline
        assert heard == [lease]
        assert lease.lost
        with pytest.raises(LeaseLost):
            lease.check()
        (said,) = told.of(signals.lease_lost, lease.keys[0])
        assert "deadline" in said["reason"]

    @for_stores(("memory", "portable_postgres"))
    def test_when_the_answer_hangs_nor_does_it_revive_the_lease_later(
        self, store: Store, key: str, gate: Callable[..., Gate], told: Told
    ) -> None:
        """The store has extended it, but the holder has already been told that it is over."""
        heard: list[Any] = []
        hanging = gate(store.backend, "extend", after=True)
        lease = store.hold(key, ttl=3, on_lost=heard.append)
        assert hanging.arrived.wait(5)
        assert not lease.lost
        self.must_be_known(lease, heard, told)
        hanging.open()
        flush_events()
        assert lease.lost
        assert heard == [lease]

    def test_when_an_extension_by_hand_is_answered_too_late(
        self,
        store: Store,
        key: str,
        gate: Callable[..., Gate],
        start: Callable[..., Future[Any]],
        moved_clock: FakeClock,
    ) -> None:
        hanging = gate(store.backend, "extend", after=True)
        lease = store.hold(key, ttl=10, renew=False)
        extending = start(lease.extend)
        assert hanging.arrived.wait(10)
        moved_clock.advance(10)
        hanging.open()
        with pytest.raises(LeaseLost, match="deadline"):
            extending.result(10)
        assert lease.lost

    @for_stores(PROXIED_STORES)
    def test_when_the_server_is_paused(
        self,
        store: Store,
        key: str,
        postgres_server: PostgresServer,
        redis_server: RedisServer,
        told: Told,
    ) -> None:
        heard: list[Any] = []
        lease = store.hold(key, ttl=1, on_lost=heard.append)
        servers: list[Server] = [redis_server if store.alias == "redis" else postgres_server]
        if store.alias == "zookeeper":
            servers = [*zookeeper_servers()]
        for server in servers:
            server.pause()
        try:
            self.must_be_known(lease, heard, told)
        finally:
            for server in servers:
                server.resume()

    @for_stores(SQLITE_STORES)
    def test_when_another_writer_keeps_the_database_locked(
        self, store: Store, key: str, told: Told
    ) -> None:
        heard: list[Any] = []
        lease = store.hold(key, ttl=1, on_lost=heard.append)
        with closing(connections[store.using].copy()) as other, other.cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            self.must_be_known(lease, heard, told)
            cursor.execute("ROLLBACK")

    @for_stores(("postgres", "redis"))
    def test_when_the_network_swallows_everything_other_stores_leases_are_kept(
        self, proxied: Proxied, key: str, told: Told
    ) -> None:
        heard: list[Any] = []
        kept = db_lock(f"{key}:kept", backend="sqlite", ttl=2.5, timeout=0).acquire()
        first = kept.deadline
        hung = proxied.hold(key, ttl=3, on_lost=heard.append)
        proxied.proxy.mode = "blackhole"
        self.must_be_known(hung, heard, told)
        assert lease_now() > first
        kept.check()
        assert kept.release() is True
        proxied.heal()


class TestReleaseMeetsRenewal:
    """A release overtakes a renewal: the lock must not come back."""

    @pytest.fixture
    def mover(
        self, moved_clock: FakeClock, start: Callable[..., Future[Any]]
    ) -> Callable[[float], Future[Any]]:
        """Moves the clock in another thread, which then stands in the renewal."""
        return lambda seconds: start(moved_clock.advance, seconds)

    @pytest.mark.parametrize("after", [False, True], ids=["before the store", "after the store"])
    def test_a_renewal_under_way_does_not_bring_the_lock_back(
        self,
        store: Store,
        key: str,
        mover: Callable[[float], Future[Any]],
        gate: Callable[..., Gate],
        told: Told,
        after: bool,
    ) -> None:
        """The renewal has begun, its request or its answer is on the way, the lock is released."""
        lease = store.hold(key, ttl=10)
        under_way = gate(store.backend, "extend", after=after)
        moved = mover(4)
        assert under_way.arrived.wait(10)
        assert lease.release() is True
        assert store.is_free(key)
        under_way.open()
        moved.result(10)
        assert store.is_free(key)
        assert not lease.lost
        assert told.of(signals.lease_lost, key) == [], "a released lease is not a lost one"

    def test_nor_is_it_renewed_again(
        self,
        store: Store,
        key: str,
        moved_clock: FakeClock,
        mover: Callable[[float], Future[Any]],
        gate: Callable[..., Gate],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        lease = store.hold(key, ttl=10)
        under_way = gate(store.backend, "extend", after=True)
        moved = mover(4)
        assert under_way.arrived.wait(10)
        lease.release()
        under_way.open()
        moved.result(10)
        renewed: list[str] = []
        monkeypatch.setattr(
            store.backend,
            "extend",
            lambda extensions: renewed.extend(e.grant.owner_id for e in extensions),
        )
        moved_clock.advance(60)
        assert lease.owner_id not in renewed

    def test_the_next_holder_is_not_touched(
        self,
        store: Store,
        key: str,
        mover: Callable[[float], Future[Any]],
        gate: Callable[..., Gate],
    ) -> None:
        lease = store.hold(key, ttl=10)
        under_way = gate(store.backend, "extend")
        moved = mover(4)
        assert under_way.arrived.wait(10)
        lease.release()
        heir = store.hold(key, ttl=3, renew=False)
        under_way.open()
        moved.result(10)
        holder = store.holder(key)
        assert holder is not None
        assert holder.owner_id == heir.owner_id
        assert holder.remaining <= 3
        assert heir.release() is True

    def test_an_extension_by_hand_of_what_is_released_meanwhile_says_so(
        self,
        store: Store,
        key: str,
        gate: Callable[..., Gate],
        start: Callable[..., Future[Any]],
        told: Told,
    ) -> None:
        lease = store.hold(key, ttl=10, renew=False)
        under_way = gate(store.backend, "extend")
        extending = start(lease.extend)
        assert under_way.arrived.wait(10)
        assert lease.release() is True
        under_way.open()
        with pytest.raises(LeaseLost, match="released"):
            extending.result(10)
        assert store.is_free(key)
        assert told.of(signals.lease_lost, key) == []

    def test_a_lease_released_at_once_is_never_renewed(
        self, store: Store, key: str, moved_clock: FakeClock, gate: Callable[..., Gate]
    ) -> None:
        under_way = gate(store.backend, "extend")
        for number in range(20):
            store.hold(f"{key}:{number}", ttl=10).release()
        moved_clock.advance(60)
        assert not under_way.arrived.is_set()
        assert store.backend.holders(f"{key}:") == []


# It is one thread, whatever the store.
@for_stores(("postgres",))
class TestTheRenewerGoesOn:
    """Nothing that happens to one lock keeps the next one from being renewed."""

    def renews(self, store: Store, key: str) -> None:
        lease = store.hold(f"{key}:next", ttl=4)
        first = lease.deadline
        eventually(lambda: lease.deadline > first)
        assert lease.release() is True

    def test_after_a_lock_was_lost(self, store: Store, key: str) -> None:
        lost = store.hold(key, ttl=1)
        store.backend.force_release(key)
        eventually(lambda: lost.lost)
        self.renews(store, key)

    def test_after_an_unexpected_error(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failed = threading.Event()

        def fail(extensions: Any) -> Extended:
            failed.set()
            raise RuntimeError("of the driver")

        with monkeypatch.context() as patched:
            patched.setattr(store.backend, "extend", fail)
            store.hold(key, ttl=1)
            assert failed.wait(5)
        self.renews(store, key)

    def test_after_the_settings_changed(self, store: Store, key: str, settings: Settings) -> None:
        """Backends are rebuilt then; a lease of an earlier one goes on."""
        lease = store.hold(key, ttl=4)
        first = lease.deadline
        settings.DISTLOCKS = {**settings.DISTLOCKS, "another": {}}
        eventually(lambda: lease.deadline > first)
        assert lease.release() is True
        self.renews(store, key)


class TestThreadsOfOurs:
    """In processes of their own, where nothing else keeps the threads alive."""

    def test_one_that_had_nothing_to_do_and_ended_is_started_again(self, spawn: Spawner) -> None:
        assert spawn(roles.renew_after_the_renewer_ended).result() is True

    def test_they_are_not_ended_by_code_that_calls_sys_exit(self, spawn: Spawner) -> None:
        """In a callback of the user's, or deep in a driver."""
        child = spawn(roles.go_on_after_code_that_exits)
        assert child.result() == {"called": True, "renewed": True}
