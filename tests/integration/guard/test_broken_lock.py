"""The lock is broken, the guard holds: no acknowledged update is lost. And without it, they are.

Each control below is a schedule that is forced, in which somebody's update is lost unless the
guard is there, is the first statement, and is in the same transaction as the read.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction

from distlocks import StaleToken
from distlocks.fences import raise_fence
from distlocks.fencing import fenced_update
from tests.integration.guard.broken import Shared, soak_seconds, work
from tests.integration.guard.sites import DATABASES, MARIADB, POSTGRES, SQLITE, Site, forged, now_us
from tests.servers.children import Child, Spawner
from tests.servers.processes import wait_until
from tests.testapp.models import Report

AddAlias = Callable[..., str]
Start = Callable[..., Future[Any]]

WORKERS = 4
# Enough to have met every fault several times.
GRANTS, SECONDS, STALE = 80, 10, 3


class TestWorkers:
    """Processes that are let in two at a time, stopped, and cut off from the database."""

    @pytest.mark.parametrize("using", DATABASES)
    def test_no_acknowledged_update_is_lost(
        self, production: None, using: str, key: str, spawn: Spawner, tmp_path: Path
    ) -> None:
        shared = Shared(tmp_path / "lock.json")

        def enough() -> bool:
            state = shared.read()
            return (
                state["grants"] >= GRANTS
                and state["seconds"] >= SECONDS
                and state["stale"] >= STALE
            )

        # One pause outlasts the lease, whatever comes of the others.
        pauses = iter([0.05, 1.2, 0.1])
        torment(using, key, spawn, shared, pauses, enough)

    @pytest.mark.soak
    @pytest.mark.parametrize("using", DATABASES)
    def test_none_is_lost_for_long(
        self, production: None, using: str, key: str, spawn: Spawner, tmp_path: Path
    ) -> None:
        end = time.monotonic() + soak_seconds() / len(DATABASES)
        shared = Shared(tmp_path / "lock.json")
        pauses = iter(lambda: random.choice((0.05, 0.1, 0.9, 1.5)), None)
        torment(using, key, spawn, shared, pauses, lambda: time.monotonic() > end)


def torment(
    using: str,
    key: str,
    spawn: Spawner,
    shared: Shared,
    pauses: Any,
    enough: Callable[[], bool],
) -> None:
    site, keys = Site(using, "broken"), [f"{key}:1", f"{key}:2"]
    for name in keys:
        site.open_account(name)
    ours = sessions(using)
    workers = [spawn(work, using, str(shared.path), keys, seed) for seed in range(WORKERS)]
    for worker in workers:
        worker.expect("ready")
    for seconds in pauses:
        stop_one(random.choice(workers), seconds, shared)
        cut_off_one(using, ours)
        if enough():
            break
    assert wait_until(enough, 40), shared.read()
    with shared.open() as state:
        state["stop"] = True

    results = [worker.result(40) for worker in workers]
    for name in keys:
        acknowledged = sum(result["acknowledged"][name] for result in results)
        in_doubt = sum(result["in doubt"][name] for result in results)
        assert acknowledged, "it must be possible to work"
        assert acknowledged <= site.balance(name) <= acknowledged + in_doubt


def stop_one(worker: Child, seconds: float, shared: Shared) -> None:
    # Never one that is inside the lock's own file: all others would stand still with it.
    with shared.open():
        worker.pause()
    time.sleep(seconds)
    worker.resume()


def sessions(using: str) -> set[int]:
    """The server's sessions on the database; empty where there is no server."""
    query = {
        "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = current_database()",
        "mysql": "SELECT id FROM information_schema.processlist WHERE db = DATABASE()",
        "sqlite": "SELECT 1 WHERE 0",
    }[connections[using].vendor]
    with connections[using].cursor() as cursor:
        cursor.execute(query)
        return {row[0] for row in cursor.fetchall()}


def cut_off_one(using: str, ours: set[int]) -> None:
    if others := sorted(sessions(using) - ours):
        kill = "SELECT pg_terminate_backend(%s)" if using == POSTGRES else "KILL %s"
        with connections[using].cursor() as cursor, suppress(DatabaseError):  # it has gone before
            cursor.execute(kill, [random.choice(others)])


class TestControls:
    """Two holders, A with the older token; each reads 0 and writes 1 more than it has read."""

    def test_without_the_guard_an_update_is_lost(
        self, database: Site, key: str, start: Start
    ) -> None:
        database.open_account(key)
        read_by_a = database.balance(key)
        start(database.deposit, key).result(20)  # B
        database.set_balance(key, read_by_a + 1)
        assert database.balance(key) == 1, "of two acknowledged"

    def test_with_the_guard_it_is_not(self, database: Site, key: str, start: Start) -> None:
        """The same order; A's part comes whole or not at all."""
        database.open_account(key)
        a, b = self.holders(key)
        with b.atomic(database.using):
            database.deposit(key)
        with pytest.raises(StaleToken), a.atomic(database.using):
            database.deposit(key)
        assert database.balance(key) == 1, "of one acknowledged"

    def test_a_fence_that_is_checked_only_at_the_write_loses_one(
        self, database: Site, key: str
    ) -> None:
        report = Report.objects.using(database.using).create(name=key)
        read_by_b = Report.objects.using(database.using).get(name=key).views
        a, b = self.holders(key)
        # A has the older token, yet no higher one has written.
        assert fenced_update(a, report, views=report.views + 1) == 1
        assert fenced_update(b, report, views=read_by_b + 1) == 1
        report.refresh_from_db()
        assert report.views == 1, "of two acknowledged"

    def test_a_guard_after_the_read_loses_one_on_postgresql(
        self, production: None, key: str, start: Start
    ) -> None:
        """What has been read before does not count: the documented limit of durable=False."""
        site = Site(POSTGRES, "memory")
        site.open_account(key)
        a, b = self.holders(key)
        with transaction.atomic(using=POSTGRES):
            read_by_b = site.balance(key)
            start(self.guarded_deposit, site, a, key).result(20)
            with b.atomic(POSTGRES, durable=False):
                site.set_balance(key, read_by_b + 1)
        assert site.balance(key) == 1, "of two acknowledged"

    def test_a_read_after_the_guard_does_not_lose_it(
        self, production: None, key: str, start: Start
    ) -> None:
        site = Site(POSTGRES, "memory")
        site.open_account(key)
        a, b = self.holders(key)
        with transaction.atomic(using=POSTGRES):
            site.balance(key)
            start(self.guarded_deposit, site, a, key).result(20)
            with b.atomic(POSTGRES, durable=False):
                site.deposit(key)
        assert site.balance(key) == 2

    @pytest.mark.parametrize("level", ["read committed", "repeatable read"])
    def test_a_guard_after_the_read_loses_one_on_mariadb(
        self, add_alias: AddAlias, key: str, start: Start, level: str
    ) -> None:
        """Why durable=False is refused there."""
        site = self.old_snapshots(add_alias, level)
        site.open_account(key)
        a, b = self.holders(key)
        with transaction.atomic(using=site.using):
            read_by_b = site.balance(key)
            start(self.guarded_deposit, site, a, key).result(20)
            self.raise_by_hand(site, key, b.fencing_token)
            site.set_balance(key, read_by_b + 1)
        assert site.balance(key) == 1, "of two acknowledged"

    def test_a_guard_after_any_read_loses_one_on_mariadb(
        self, add_alias: AddAlias, key: str, start: Start
    ) -> None:
        """At REPEATABLE READ, reads after the guard show the time of the first read of all."""
        site = self.old_snapshots(add_alias, "repeatable read")
        site.open_account(key)
        a, b = self.holders(key)
        with transaction.atomic(using=site.using):
            site.guard("of another key")
            start(self.guarded_deposit, site, a, key).result(20)
            self.raise_by_hand(site, key, b.fencing_token)
            site.deposit(key)
        assert site.balance(key) == 1, "of two acknowledged"

    def test_a_guard_that_only_looks_passes_on_an_old_snapshot_on_sqlite(
        self, add_alias: AddAlias, key: str
    ) -> None:
        """Why the guard is a write."""
        using = add_alias(SQLITE, OPTIONS={"transaction_mode": "DEFERRED"})
        site, other = Site(using, "memory"), Site(SQLITE, "memory")
        a, b = self.holders(key)
        site.raise_guard(key, a.fencing_token)
        with transaction.atomic(using=using):
            site.guard("of another key")
            with b.atomic(other.using):
                pass
            assert site.guard(key) == a.fencing_token, "it would let the stale holder pass"
        with pytest.raises(StaleToken), a.atomic(using):
            pass

    def holders(self, key: str) -> tuple[Any, Any]:
        older = now_us()
        return forged(key, token=older), forged(key, token=older + 1_000)

    def guarded_deposit(self, site: Site, lease: Any, key: str) -> None:
        with lease.atomic(site.using):
            site.deposit(key)

    def old_snapshots(self, add_alias: AddAlias, level: str) -> Site:
        """MariaDB as it is by default before 11.6."""
        options = {"isolation_level": level}
        with connections[MARIADB].cursor() as cursor:
            cursor.execute("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")
            if cursor.fetchone():
                options["init_command"] = "SET SESSION innodb_snapshot_isolation = OFF"
        return Site(add_alias(MARIADB, OPTIONS=options), "memory")

    def raise_by_hand(self, site: Site, key: str, token: int) -> None:
        raise_fence(connections[site.using], key, token, wait=20, idle=20)
