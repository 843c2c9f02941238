"""A holder that stands still, or whose session dies, inside its guarded transaction."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, OperationalError, connections

from distlocks import DistlocksError, Lease, LeaseLost, LockTimeout
from distlocks.testing import fake_clock
from tests.integration.guard.sites import (
    MARIADB,
    POSTGRES,
    SQLITE,
    Site,
    forged,
    now_us,
    wait_for,
)
from tests.servers.children import Child, Spawner
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy

AddAlias = Callable[..., str]
Start = Callable[..., Future[Any]]

TTL = 1


def hold(using: str, backend: str, key: str, then: str) -> str:
    """Enter, write, and wait to be told to go on: with another query, or with the commit."""
    site = Site(using, backend)
    try:
        with site.lock(key, ttl=TTL) as lease, lease.atomic(using):
            site.set_balance(key, 100)
            print("inside", flush=True)  # noqa: T201
            input()
            if then == "query":
                site.deposit(key)
    except (DistlocksError, DatabaseError) as error:
        return type(error).__name__
    return "committed"


class TestPaused:
    @pytest.mark.parametrize("site", [POSTGRES, MARIADB], indirect=True)
    def test_the_next_holder_goes_on_and_the_old_one_has_lost_its_lease(
        self, site: Site, key: str, spawn: Spawner
    ) -> None:
        holders = self.pause_inside(site, spawn, {f"{key}:query": "query", f"{key}:end": "commit"})

        for name in holders:
            with site.lock(name, timeout=20) as lease, lease.atomic(site.using):
                site.deposit(name)

        for holder in holders.values():
            holder.resume()
            holder.send()
        assert {holder.result() for holder in holders.values()} == {"LeaseLost"}
        assert {site.balance(name) for name in holders} == {1}, "of the old one, nothing is left"

    def test_on_sqlite_the_next_holder_waits_for_it(
        self, production: None, add_alias: AddAlias, key: str, spawn: Spawner
    ) -> None:
        """Nothing cuts it off there, and nobody else writes until it ends: both are right."""
        site = Site(SQLITE, "postgres")
        holders = self.pause_inside(site, spawn, {key: "commit"})

        impatient = Site(add_alias(SQLITE, OPTIONS={"timeout": 0.05}), "postgres")
        with impatient.lock(key, timeout=20) as lease:  # after the old one's expiry
            with pytest.raises(LockTimeout, match="SQLite"), lease.atomic(impatient.using):
                impatient.deposit(key)

            holders[key].resume()
            holders[key].send()
            assert holders[key].result() == "committed"
            with lease.atomic(impatient.using):
                impatient.deposit(key)
        assert site.balance(key) == 101

    def test_on_sqlite_with_the_lock_there_too(
        self, production: None, key: str, spawn: Spawner
    ) -> None:
        site = Site(SQLITE, "sqlite")
        holders = self.pause_inside(site, spawn, {key: "commit"})
        with pytest.raises(LockTimeout):
            site.lock(key, timeout=0.1).acquire()
        holders[key].resume()
        holders[key].send()
        assert holders[key].result() == "committed"
        with site.lock(key, timeout=20) as lease, lease.atomic(SQLITE):
            site.deposit(key)
        assert site.balance(key) == 101

    @pytest.mark.parametrize("using", [POSTGRES, MARIADB])
    def test_a_holder_that_was_killed_leaves_nothing_behind(
        self, production: None, key: str, spawn: Spawner, using: str
    ) -> None:
        site = Site(using, using)
        holders = self.pause_inside(site, spawn, {key: "commit"}, pause=False)
        holders[key].kill()
        with site.lock(key, timeout=20) as lease, lease.atomic(using):
            site.deposit(key)
        assert site.balance(key) == 1

    def pause_inside(
        self, site: Site, spawn: Spawner, then: dict[str, str], *, pause: bool = True
    ) -> dict[str, Child]:
        """A holder for each key, standing still in its guarded transaction."""
        holders = {}
        for key, next_step in then.items():
            site.open_account(key)
            holders[key] = spawn(hold, site.using, site.backend, key, next_step)
        for holder in holders.values():
            holder.expect("inside")
            if pause:
                holder.pause()
        return holders

    @pytest.fixture
    def site(self, request: pytest.FixtureRequest, production: None) -> Site:
        return Site(request.param, request.param)


def kill_own_session(using: str) -> None:
    """End the session of this thread's connection, from another one."""
    query, kill = {
        "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%s, 10000)"),
        "mysql": ("SELECT CONNECTION_ID()", "KILL %s"),
    }[connections[using].vendor]
    with connections[using].cursor() as cursor:
        cursor.execute(query)
        session = cursor.fetchone()[0]
    other = connections[using].copy()
    try:
        with other.cursor() as cursor:
            cursor.execute(kill, [session])
            if connections[using].vendor == "mysql":
                wait_for(lambda: session not in sessions(cursor))
    finally:
        other.close()


def sessions(cursor: Any) -> set[int]:
    cursor.execute("SELECT id FROM information_schema.processlist")
    return {row[0] for row in cursor.fetchall()}


@pytest.mark.parametrize("using", [POSTGRES, MARIADB])
class TestKilledSessions:
    @pytest.mark.parametrize("then", ["query", "commit"])
    def test_nothing_is_half_done(self, production: None, key: str, using: str, then: str) -> None:
        site = Site(using, using)
        site.open_account(key)

        def work(lease: Lease) -> None:
            with lease.atomic(using):
                site.set_balance(key, 100)
                kill_own_session(using)
                if then == "query":
                    site.deposit(key)

        with site.lock(key) as lease:
            with pytest.raises((OperationalError, InterfaceError)):
                work(lease)
            with lease.atomic(using):
                site.deposit(key)
        assert site.balance(key) == 1

    def test_between_two_transactions(self, production: None, key: str, using: str) -> None:
        """As for any code: the first query fails, the connection is opened anew after that."""
        site = Site(using, using)
        site.open_account(key)
        with site.lock(key) as lease:
            with lease.atomic(using):
                site.deposit(key)
            kill_own_session(using)
            with suppress(DatabaseError, InterfaceError), lease.atomic(using):
                site.deposit(key)
            connections[using].close_if_unusable_or_obsolete()
            with lease.atomic(using):
                site.deposit(key)
        assert site.balance(key) in (2, 3)
        assert site.guard(key) == lease.fencing_token

    def test_a_query_that_swallows_the_error_does_not_commit_the_rest(
        self, production: None, key: str, using: str
    ) -> None:
        """The driver may renew a session by itself: what follows must not run outside."""
        site = Site(using, using)
        site.open_account(key)

        def work() -> None:
            with site.lock(key) as lease, lease.atomic(using):
                site.set_balance(key, 100)
                kill_own_session(using)
                with suppress(DatabaseError, InterfaceError):
                    site.balance(key)
                site.set_balance(key, 200)

        with pytest.raises((DatabaseError, InterfaceError, LeaseLost)):
            work()
        assert site.balance(key) == 0

    def test_a_commit_whose_answer_was_lost_is_not_called_undone(
        self,
        production: None,
        key: str,
        using: str,
        add_alias: AddAlias,
        start: Start,
        postgres_server: PostgresServer,
        mariadb_server: MariaDBServer,
    ) -> None:
        """The lease's time is over and the session is gone, yet the data is committed."""
        server = postgres_server if using == POSTGRES else mariadb_server
        site = Site(using, "memory")
        site.open_account(key)
        with FaultProxy(server.host, server.port) as proxy:
            proxied = Site(add_alias(using, HOST=proxy.host, PORT=str(proxy.port)), "memory")

            def work() -> None:
                with fake_clock() as clock, forged(key, token=now_us()).atomic(proxied.using):
                    proxied.deposit(key)
                    clock.advance(31)
                    proxy.answers = "blackhole"

            holder = start(work)
            wait_for(lambda: site.balance(key) == 1)
            proxy.cut()
            proxy.mode = "pass"
            with pytest.raises((LeaseLost, OperationalError)) as caught:
                holder.result(20)
        assert "did not commit" not in str(caught.value)
        assert "rolled it back" not in str(caught.value)
