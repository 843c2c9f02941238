"""Locks and guards where Django's connections are pooled, passed on, or short-lived."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from django.conf import settings
from django.db import close_old_connections, connections, transaction
from django.test import override_settings

from distlocks import LockTimeout, StaleToken
from tests.integration.guard.sites import MARIADB, POSTGRES, Site, wait_for, wait_for_a_waiter
from tests.servers.pgbouncer import PgBouncerServer

AddAlias = Callable[..., str]
Start = Callable[..., Future[Any]]

ROUNDS = 5


@pytest.fixture
def locking_in(production: None) -> Iterator[Callable[[str], Site]]:
    """`locking_in(using)`: locks and data are both reached through this alias."""
    overrides: list[override_settings] = []

    def locking(using: str) -> Site:
        entry = {
            "BACKEND": "distlocks.backends.database.DatabaseBackend",
            "OPTIONS": {"using": using},
        }
        overrides.append(override_settings(DISTLOCKS={**settings.DISTLOCKS, "pooled": entry}))
        overrides[-1].enable()
        return Site(using, "pooled")

    yield locking
    for override in reversed(overrides):
        override.disable()


@pytest.fixture(params=["pgbouncer", "psycopg pool", "closed after use", "kept", "kept a while"])
def site(
    request: pytest.FixtureRequest, add_alias: AddAlias, locking_in: Callable[[str], Site]
) -> Iterator[Site]:
    if request.param == "pgbouncer":
        proxy: PgBouncerServer = request.getfixturevalue("pgbouncer")
        using = add_alias(
            POSTGRES, HOST=proxy.host, PORT=str(proxy.port), DISABLE_SERVER_SIDE_CURSORS=True
        )
    elif request.param == "psycopg pool":
        # As many as there are threads in the tests, and not one more for the locks.
        using = add_alias(POSTGRES, OPTIONS={"pool": {"min_size": 1, "max_size": 3, "timeout": 20}})
    else:
        age = {"closed after use": 0, "kept": None, "kept a while": 60}[request.param]
        using = add_alias(POSTGRES, CONN_MAX_AGE=age)
    yield locking_in(using)
    connections[using].close()
    if "pool" in connections[using].settings_dict["OPTIONS"]:
        connections[using].close_pool()


@pytest.fixture(params=[0, None])
def mariadb_site(
    request: pytest.FixtureRequest, add_alias: AddAlias, locking_in: Callable[[str], Site]
) -> Site:
    return locking_in(add_alias(MARIADB, CONN_MAX_AGE=request.param))


def guarded_deposits(site: Site, key: str) -> None:
    """As several requests would, one after the other."""
    for _ in range(ROUNDS):
        close_old_connections()
        with site.lock(key, timeout=30) as lease, lease.atomic(site.using):
            site.deposit(key)
        close_old_connections()


def unguarded_deposits(site: Site, key: str) -> None:
    for _ in range(ROUNDS):
        close_old_connections()
        with transaction.atomic(using=site.using), site.lock(key, timeout=30):
            site.deposit(key)
        close_old_connections()


class TestPostgreSQL:
    @pytest.mark.parametrize("work", [guarded_deposits, unguarded_deposits])
    def test_threads_lose_no_update(
        self, site: Site, key: str, start: Start, work: Callable[[Site, str], None]
    ) -> None:
        site.open_account(key)
        connections[site.using].close()
        for rival in [start(work, site, key) for _ in range(3)]:
            rival.result(50)
        assert site.balance(key) == 3 * ROUNDS

    def test_a_lease_outlives_the_connection(self, site: Site, key: str, start: Start) -> None:
        site.open_account(key)
        with site.lock(key) as lease:
            for _ in range(3):
                with lease.atomic(site.using):
                    site.deposit(key)
                connections[site.using].close()
                assert start(site.lock(key, timeout=0).try_acquire).result(20) is None
            lease.extend()
        assert site.balance(key) == 3

    def test_who_waits_gets_it_when_it_is_released(
        self, site: Site, key: str, start: Start
    ) -> None:
        with site.lock(key):
            waiter = start(site.lock(key, timeout=30).acquire)
            with pytest.raises(LockTimeout):
                site.lock(key, timeout=0.05).acquire()
            assert not waiter.done()
        assert waiter.result(20).release()

    def test_a_stale_holder_is_refused_and_leaves_no_setting_behind(
        self, site: Site, key: str
    ) -> None:
        def bounds() -> list[str]:
            with connections[site.using].cursor() as cursor:
                found = []
                for name in ("lock_timeout", "idle_in_transaction_session_timeout"):
                    cursor.execute(f"SHOW {name}")
                    found.append(cursor.fetchone()[0])
            return found

        before = bounds()
        with site.lock(key, ttl=5) as lease:
            with lease.atomic(site.using):
                pass
            site.raise_guard(key, lease.fencing_token + 1)
            with pytest.raises(StaleToken), lease.atomic(site.using):
                pass
        # Through a proxy, each of these may be another session.
        assert [bounds() for _ in range(10)] == [before] * 10

    def test_holders_of_one_key_take_turns(self, site: Site, key: str, start: Start) -> None:
        """The lock is passed on while the first transaction is still open."""
        site.open_account(key)

        def next_holder() -> None:
            with site.lock(key, timeout=30) as lease, lease.atomic(site.using):
                site.deposit(key)

        first = site.lock(key).acquire()
        with first.atomic(site.using):
            first.backend.force_release(key)
            rival = start(next_holder)
            wait_for_a_waiter(POSTGRES)
            site.deposit(key)
        rival.result(20)
        assert site.balance(key) == 2


class TestThePool:
    def test_locks_take_no_connection_from_it(
        self, add_alias: AddAlias, locking_in: Callable[[str], Site], key: str, start: Start
    ) -> None:
        """Two threads in a transaction each have the whole pool, and lock all the same."""
        pool = {"min_size": 1, "max_size": 2, "timeout": 10}
        site = locking_in(add_alias(POSTGRES, OPTIONS={"pool": pool}))
        both = threading.Barrier(2)

        def work(name: str) -> None:
            with transaction.atomic(using=site.using):
                site.open_account(name)
                both.wait(20)
                with site.lock(name) as lease:
                    lease.extend()

        try:
            for rival in [start(work, f"{key}:{i}") for i in range(2)]:
                rival.result(30)
        finally:
            connections[site.using].close()
            connections[site.using].close_pool()


class TestMariaDB:
    def test_threads_lose_no_update(self, mariadb_site: Site, key: str, start: Start) -> None:
        mariadb_site.open_account(key)
        connections[mariadb_site.using].close()
        for rival in [start(guarded_deposits, mariadb_site, key) for _ in range(3)]:
            rival.result(50)
        assert mariadb_site.balance(key) == 3 * ROUNDS

    def test_who_waits_gets_it_when_it_is_released(
        self, mariadb_site: Site, key: str, start: Start
    ) -> None:
        with mariadb_site.lock(key):
            waiter = start(mariadb_site.lock(key, timeout=30).acquire)
            wait_for(waiter.running)
        assert waiter.result(20).release()
