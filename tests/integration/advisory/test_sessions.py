"""Leases in sessions of the server's: they end with them, and the holder knows."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import sha256
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction

from distlocks import (
    BackendUnavailable,
    Lease,
    LeaseLost,
    LockTimeout,
    NotSupported,
    db_lock,
    signals,
)
from distlocks.backends.advisory import sql
from distlocks.backends.advisory.sql import Raw, lock_id
from distlocks.clock import lease_now
from tests.integration.advisory.conftest import Way
from tests.integration.contract.advisory_stores import AdvisoryStore
from tests.integration.contract.stores import Told
from tests.integration.hazards import roles
from tests.servers.children import Spawner
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.waiting import eventually

Start = Callable[..., Future[Any]]
# Far less than any lease here lasts by itself.
AT_ONCE = 2.0


class TestEndOfASession:
    """CASES 39: the lock lived in a connection, and the connection is closed or killed."""

    def test_its_lease_is_lost_at_once_and_no_other(
        self, store: AdvisoryStore, key: str, told: Told
    ) -> None:
        lost: list[Lease] = []
        other = store.hold(f"{key}:other")

        def work(lease: Lease) -> None:
            store.end_sessions(key)
            eventually(lambda: lease.lost, within=AT_ONCE)
            assert lease.remaining > 20

        with (
            pytest.raises(LeaseLost, match="ended the session"),
            store.lock(key, timeout=0, on_lost=lost.append) as lease,
        ):
            work(lease)
        assert len(told.of(signals.lease_lost, key)) == 1
        assert lost == [lease]
        other.extend()
        assert other.release() is True

    def test_the_bodys_own_error_comes_first(self, store: AdvisoryStore, key: str) -> None:
        def work(lease: Lease) -> None:
            store.end_sessions(key)
            eventually(lambda: lease.lost, within=AT_ONCE)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), store.lock(key, timeout=0) as lease:
            work(lease)

    @pytest.mark.parametrize(("alias", "ttl"), [("advisory", 1.5), ("advisory_free", 20)])
    def test_a_killed_holders_lock_is_had_as_its_lease_ends_or_at_once_if_that_is_wished(
        self, store: AdvisoryStore, key: str, spawn: Spawner, start: Start, alias: str, ttl: float
    ) -> None:
        holder = spawn(roles.hold, alias, key, ttl=ttl)
        holder.readline()
        waiter = start(store.lock(key, timeout=20).acquire)
        store.eventually_waiting(key, 1)
        holder.kill()
        killed = lease_now()
        assert waiter.result(10).release()
        assert lease_now() - killed < (ttl if alias == "advisory" else 0) + AT_ONCE

    @pytest.mark.parametrize("ends", ["wait", "free"])
    def test_who_has_not_been_told_does_not_share_its_lock(
        self, store: AdvisoryStore, way: Way, proxy: FaultProxy, key: str, ends: str
    ) -> None:
        """The server has ended the session of a holder that is cut off. Others see by the row what
        the holder's alias says of that."""
        place = {"HOST": proxy.host, "PORT": str(proxy.port)}
        lease = way("cut_off", options={"on_session_end": ends}, **place).hold(key, ttl=2)
        proxy.mode = "blackhole"
        store.end_sessions(key)
        lock = store.lock(key, timeout=0)
        if ends == "wait":
            with pytest.raises(LockTimeout, match="may not know"):
                lock.acquire()
        else:
            assert lock.acquire().release()
        assert not lease.lost

    def test_a_restart_of_the_server_ends_all_and_the_next_grant_is_a_later_one(
        self, mortal: AdvisoryStore, fresh_postgres: PostgresServer, key: str
    ) -> None:
        """Nobody gets in before the lease would have ended; what was released is free."""
        # What comes after makes sure that it is on the server's disk.
        mortal.hold(f"{key}:free").release()
        leases = [mortal.hold(f"{key}:{number}", ttl=2) for number in range(3)]
        deadlines = [lease.deadline for lease in leases]
        fresh_postgres.kill()
        for lease in leases:
            eventually(lambda lease=lease: lease.lost, within=AT_ONCE)
        with pytest.raises(BackendUnavailable):
            mortal.lock(key, timeout=0).acquire()
        fresh_postgres.start()
        assert mortal.hold(f"{key}:free").release()
        with pytest.raises(LockTimeout, match="may not know"):
            mortal.lock(f"{key}:0", timeout=0).acquire()
        # The test's own.
        connections[mortal.using].close()
        with transaction.atomic(using=mortal.using), pytest.raises(LockTimeout, match="not know"):
            mortal.lock(f"{key}:0", shared=True, timeout=0).acquire()
        for lease, deadline in zip(leases, deadlines, strict=True):
            again = mortal.lock(*lease.keys, timeout=10).acquire()
            had = lease_now() - (time.time() - again.acquired_at.timestamp())
            assert deadline < had + 0.001
            assert again.fencing_token > lease.fencing_token
            assert again.release()

    @pytest.mark.parametrize("trusted", [False, True], ids=["", "control"])
    def test_also_where_a_sessions_end_frees_its_locks_no_restart_does(
        self,
        way: Way,
        mortal: AdvisoryStore,
        fresh_postgres: PostgresServer,
        key: str,
        monkeypatch: pytest.MonkeyPatch,
        trusted: bool,
    ) -> None:
        """As when another server takes the place of one that is cut off, together with its clients.
        The control trusts the server, which knows nothing of the lock."""
        if trusted:
            monkeypatch.setattr(sql, "HAUNTED", "false")
        place = {"HOST": fresh_postgres.host, "PORT": str(fresh_postgres.port), "NAME": "postgres"}
        options = {"on_session_end": "free"}
        free = way("free", options=options, **place)
        with FaultProxy(fresh_postgres.host, fresh_postgres.port) as proxy:
            place = {"HOST": proxy.host, "PORT": str(proxy.port), "NAME": "postgres"}
            lease = way("cut_off", options=options, **place).hold(key, ttl=2)
            proxy.mode = "blackhole"
            fresh_postgres.kill()
            fresh_postgres.start()
            rival = free.lock(key, timeout=10).acquire()
            had = lease_now() - (time.time() - rival.acquired_at.timestamp())
            assert (had < lease.deadline) is trusted
            assert rival.release()
            proxy.mode = "pass"
            proxy.cut()
            eventually(lambda: lease.lost)

    def test_an_operator_need_not_wait_for_that(
        self, mortal: AdvisoryStore, fresh_postgres: PostgresServer, key: str
    ) -> None:
        lease = mortal.hold(key)
        fresh_postgres.kill()
        fresh_postgres.start()
        assert [one.key for one in mortal.backend.force_release(key)] == [key]
        assert mortal.hold(key).fencing_token > lease.fencing_token

    def test_readers_from_before_a_restart_keep_a_writer_out(
        self, mortal: AdvisoryStore, fresh_postgres: PostgresServer, key: str
    ) -> None:
        short = mortal.hold(key, shared=True, ttl=1, renew=False)
        long = mortal.hold(key, shared=True, ttl=2, renew=False)
        long.extend()
        deadline = long.deadline
        fresh_postgres.kill()
        fresh_postgres.start()
        writer = mortal.lock(key, timeout=10).acquire()
        had = lease_now() - (time.time() - writer.acquired_at.timestamp())
        assert short.deadline < deadline < had + 0.001
        assert writer.release()

    def test_sessions_kept_from_before_a_restart_are_no_trap(
        self, mortal: AdvisoryStore, fresh_postgres: PostgresServer, key: str
    ) -> None:
        for lease in [mortal.hold(f"{key}:{number}") for number in range(4)]:
            lease.release()
        fresh_postgres.kill()
        fresh_postgres.start()
        leases = [mortal.hold(f"{key}:new {number}") for number in range(4)]
        assert all(lease.release() for lease in leases)


class TestSilentHolder:
    """The server ends the session of a holder from which it has heard nothing for the ttl, by its
    own clock; the holder has given up before that."""

    def test_paused(self, store: AdvisoryStore, key: str, spawn: Spawner, start: Start) -> None:
        holder = spawn(roles.hold, store.alias, key, ttl=1.5)
        holder.readline()
        waiter = start(store.lock(key, timeout=20).acquire)
        store.eventually_waiting(key, 1)
        holder.pause()
        paused = lease_now()
        heir = waiter.result(10)
        assert lease_now() - paused < 1.5 + AT_ONCE
        holder.resume()
        holder.send("lost?")
        holder.expect("lost")
        holder.send("release")
        assert holder.readline() == "released False"
        assert heir.release() is True

    def test_cut_off(
        self, store: AdvisoryStore, proxied: AdvisoryStore, proxy: FaultProxy, key: str
    ) -> None:
        lease = proxied.hold(key, ttl=3)
        first = lease.deadline
        eventually(lambda: lease.deadline > first)
        proxy.mode = "blackhole"
        heir = store.lock(key, timeout=20).acquire()
        had = lease_now() - (time.time() - heir.acquired_at.timestamp())
        assert lease.lost
        # Two clocks were read one after the other.
        assert lease.deadline < had + 0.001
        assert had < lease.deadline + AT_ONCE
        assert heir.release() is True

    def test_one_that_does_not_renew(self, store: AdvisoryStore, key: str) -> None:
        lease = store.hold(key, ttl=1, renew=False)
        heir = store.lock(key, timeout=20).acquire()
        assert lease.lost
        had = lease_now() - (time.time() - heir.acquired_at.timestamp())
        assert lease.deadline < had + 0.001
        assert heir.fencing_token > lease.fencing_token

    def test_a_session_that_is_used_again_is_as_patient_as_its_next_lease(
        self, store: AdvisoryStore, key: str, start: Start
    ) -> None:
        """Neither free nor with a longer lease does it end by the bound of an earlier one."""
        (session,) = self.sessions_of(store, store.hold(key, ttl=1))
        rival = start(store.lock(key, timeout=2).acquire)
        assert store.lock(f"{key}:other", ttl=25, timeout=0).acquire().release()
        with pytest.raises(LockTimeout):
            rival.result(10)
        assert store.sessions(key) == [session], "kept by renewal"

    @staticmethod
    def sessions_of(store: AdvisoryStore, lease: Lease) -> list[int]:
        (key,) = lease.keys
        assert isinstance(key, str)
        return store.sessions(key)

    def test_a_free_session_is_not_ended(self, store: AdvisoryStore, key: str) -> None:
        store.hold(key, ttl=1).release()
        free = store.advisory._pool._free[-1]
        assert free.ask(Raw("SHOW idle_session_timeout"), {}) == [(b"0",)]


class TestLostAnswers:
    def test_who_asks_again_finds_itself_and_not_a_rival(
        self,
        store: AdvisoryStore,
        proxied: AdvisoryStore,
        proxy: FaultProxy,
        key: str,
        start: Start,
    ) -> None:
        """CASES 2: granted, the answer lost, the connection broken, and asked again."""
        proxied.hold(key).release()
        proxy.answers = "blackhole"
        asking = start(proxied.lock(key, timeout=0).acquire)
        owner = eventually(lambda: store.owner(key))
        proxy.cut()
        proxy.mode = "pass"
        lease = asking.result(20)
        assert lease.owner_id == owner
        assert len(store.sessions(key)) == 1
        assert lease.release()
        assert store.is_free(key)

    def test_of_a_release_it_is_answered_like_one_that_was_heard(
        self,
        store: AdvisoryStore,
        proxied: AdvisoryStore,
        proxy: FaultProxy,
        key: str,
        start: Start,
    ) -> None:
        lease = proxied.hold(key)
        proxy.answers = "blackhole"
        releasing = start(lease.release)
        eventually(lambda: store.is_free(key))
        proxy.cut()
        proxy.mode = "pass"
        assert releasing.result(20) is True
        assert not lease.lost

    def test_and_the_next_holder_is_left_alone(
        self,
        store: AdvisoryStore,
        proxied: AdvisoryStore,
        proxy: FaultProxy,
        key: str,
        start: Start,
    ) -> None:
        """CASES 3."""
        lease = proxied.hold(key)
        proxy.answers = "blackhole"
        releasing = start(lease.release)
        eventually(lambda: store.is_free(key))
        again = store.hold(key)
        proxy.cut()
        proxy.mode = "pass"
        assert releasing.result(20) is False, "somebody has had it since, for all that is known"
        again.extend()
        assert again.release() is True

    def test_an_extension_that_comes_too_late_is_no_extension(
        self, store: AdvisoryStore, proxied: AdvisoryStore, proxy: FaultProxy, key: str
    ) -> None:
        """The lease is what it was; what arrives late is not counted from the wrong moment."""
        lease = proxied.hold(key, ttl=2, renew=False)
        first = lease.deadline
        proxy.answers = "blackhole"
        with pytest.raises(BackendUnavailable):
            lease.extend()
        assert lease.deadline == first
        proxy.mode = "pass"
        asked = lease_now()
        lease.extend()
        assert asked < lease.deadline - 1.9
        assert lease.release() is True

    def test_a_server_that_is_not_there_is_an_error(
        self, proxied: AdvisoryStore, proxy: FaultProxy, key: str
    ) -> None:
        proxy.mode = "reset"
        with pytest.raises(BackendUnavailable, match="cannot be used for locks"):
            proxied.lock(key, timeout=5).acquire()


class TestStatementsInTheWrongSession:
    def test_nothing_is_taken_nor_freed_there(
        self, store: AdvisoryStore, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As through a proxy that has begun to pool transactions since we looked."""
        lease = store.hold(f"{key}:held")
        session = store.advisory._pool.holds()[0].session
        monkeypatch.setattr(session, "pid", session.pid + 1)
        with pytest.raises(LeaseLost):
            lease.extend()
        store.hold(key).release()
        free = store.advisory._pool._free[-1]
        monkeypatch.setattr(free, "pid", free.pid + 1)
        with pytest.raises(NotSupported, match="proxy"):
            store.lock(key, timeout=0).acquire()
        assert store.is_free(key)
        assert store.sessions(key) == []


class TestHolders:
    def test_what_their_sessions_do(self, store: AdvisoryStore, key: str) -> None:
        store.hold(key, label="nightly")
        holder = store.holder(key)
        assert holder is not None
        (session,) = store.sessions(key)
        assert holder.activity["pid"] == session
        assert holder.activity["state"] == "idle"
        assert holder.activity["query_start"]
        assert holder.activity["application"] == "distlocks"

    def test_a_lock_of_the_applications_own_is_named(
        self, store: AdvisoryStore, postgres_server: PostgresServer, key: str
    ) -> None:
        """Its number is the same, by chance or on purpose: nobody can keep them apart."""
        name = connections[store.using].settings_dict["NAME"]
        with psycopg.connect(
            postgres_server.url, dbname=name, application_name="importer", autocommit=True
        ) as foreign:
            foreign.execute("SELECT pg_advisory_lock(%s)", [lock_id(key)])
            with pytest.raises(LockTimeout, match="importer"):
                store.lock(key, timeout=0).acquire()
        eventually(lambda: store.lock(key, timeout=0).try_acquire()).release()

    def test_what_a_free_session_had_last_is_not_shown(
        self, store: AdvisoryStore, key: str
    ) -> None:
        store.hold(key).release()
        store.hold(f"{key}:other")
        assert [holder.key for holder in store.backend.holders(key)] == [f"{key}:other"]


class TestNumbers:
    def test_a_key_is_known_by_its_digest_with_the_prefix(self) -> None:
        assert lock_id("order:42") == int.from_bytes(sha256(b"order:42").digest()[:8], signed=True)
        assert len({lock_id(f"order:{number}") for number in range(10_000)}) == 10_000

    def test_it_is_what_the_server_shows(self, store: AdvisoryStore, key: str) -> None:
        store.hold(key)
        assert len(store.sessions(key)) == 1


class TestPool:
    def test_a_cycle_is_one_statement_each_in_the_same_session(
        self, store: AdvisoryStore, key: str
    ) -> None:
        store.hold(key).release()
        before = {session.pid for session in store.advisory._pool._free}
        for _ in range(5):
            store.hold(key).release()
        assert {session.pid for session in store.advisory._pool._free} == before

    def test_more_leases_than_sessions_wait_for_one(self, way: Way, key: str, start: Start) -> None:
        few = way("few", options={"max_sessions": 2})
        first, second = few.hold(f"{key}:1"), few.hold(f"{key}:2")
        with pytest.raises(LockTimeout, match="max_sessions"):
            few.lock(f"{key}:3", timeout=0).acquire()
        waiter = start(few.lock(f"{key}:3", timeout=20).acquire)
        first.release()
        assert waiter.result(10).release()
        assert second.release()

    def test_closing_leaves_leases_alone(self, store: AdvisoryStore, key: str) -> None:
        lease = store.hold(key)
        store.backend.close()
        lease.extend()
        assert lease.release() is True
        assert store.is_free(key)
        assert store.advisory._pool._free == []

    def test_free_sessions_are_closed_in_time(
        self, store: AdvisoryStore, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for lease in [store.hold(f"{key}:{number}") for number in range(4)]:
            lease.release()
        pool = store.advisory._pool
        assert len(pool._free) == 4
        for session in pool._free[:3]:
            monkeypatch.setattr(session, "idle_since", lease_now() - 100)
        db_lock(key, backend=store.alias, timeout=0).acquire().release()
        assert len(pool._free) == 1
