"""What is particular to locks on MariaDB."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from django.core import mail
from django.db import connections, transaction

from distlocks import BackendUnavailable, DistlocksError, Lease, LockTimeout, db_lock, locks
from distlocks.backends.database.mariadb import US, MariaDB
from distlocks.claims import Extension
from distlocks.models import Lock
from tests.servers.children import Spawner
from tests.servers.mariadb import MariaDBServer
from tests.servers.processes import wait_until
from tests.statements import watched

ALIAS = "mariadb"

pytestmark = pytest.mark.usefixtures("production")


@pytest.fixture
def production(databases: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As outside of test runners, where a connection to the store is kept."""
    monkeypatch.delattr(mail, "outbox", raising=False)
    yield
    locks.close_all()


def scalar(query: str, *params: object) -> Any:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(query, params or None)
        return cursor.fetchone()[0]


def run(query: str, *params: object) -> None:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(query, params or None)


def lock(*keys: str, **options: Any) -> db_lock:
    return db_lock(*keys, backend=ALIAS, **options)


@contextmanager
def counted() -> Iterator[list[str]]:
    """The statements of connections that are opened in the block."""
    sent: list[str] = []

    def note(execute: Any, sql: str, *args: Any) -> Any:
        sent.append(" ".join(sql.split()))
        return execute(sql, *args)

    locks.close_all()
    with watched(note, ALIAS):
        yield sent


def test_it_has_a_dialect_of_its_own() -> None:
    assert isinstance(locks[ALIAS].dialect, MariaDB)  # type: ignore[attr-defined]


class TestKeys:
    def test_each_is_a_lock_of_its_own(self, key: str) -> None:
        """The default collation of MariaDB compares all of these as equal."""
        variants = [
            f"{key}:{end}" for end in ("a", "A", "á", "a ", "a  ", "ª", "a\u0301", "\uff41")
        ]
        leases = [lock(variant, timeout=0).acquire() for variant in variants]
        assert {h.key for h in locks[ALIAS].holders(key)} == set(variants)
        assert [lease.release() for lease in leases] == [True] * len(leases)
        assert not locks[ALIAS].holders(key)

    @pytest.mark.parametrize("wide", ["🔒", "\U0010ffff", "ß", "漢字"])
    def test_any_unicode(self, key: str, wide: str) -> None:
        name = f"{key}:{wide}"
        with lock(name, timeout=0):
            with pytest.raises(LockTimeout) as caught:
                lock(name, timeout=0).acquire()
            (holder,) = caught.value.holders
            assert holder.key == name

    def test_holders_of_a_prefix_are_compared_exactly(self, key: str) -> None:
        with lock(f"{key}:A%"), lock(f"{key}:a_"):
            assert [h.key for h in locks[ALIAS].holders(f"{key}:A")] == [f"{key}:A%"]
            assert [h.key for h in locks[ALIAS].holders(f"{key}:a_")] == [f"{key}:a_"]
            assert locks[ALIAS].holders(f"{key}:_") == []


class TestStatements:
    def test_an_uncontended_cycle_takes_two(self, key: str) -> None:
        with counted() as sent:
            with lock(key):
                pass
            sent.clear()
            for _ in range(3):
                with lock(key):
                    pass
        assert len(sent) == 3 * 2, sent

    def test_the_first_cycle_of_a_key_too(self, key: str) -> None:
        with counted() as sent:
            with lock(f"{key}:before"):
                pass
            sent.clear()
            with lock(key):
                pass
        assert len(sent) == 2, sent

    def test_a_try_on_a_held_key_takes_one(self, key: str) -> None:
        with counted() as sent, lock(key):
            sent.clear()
            assert lock(key, timeout=0).try_acquire() is None
            assert len(sent) == 1, sent

    def test_a_denied_try_changes_nothing(self, key: str) -> None:
        with lock(key, label="the holder's", metadata={"n": 1}):
            before = Lock.objects.using(ALIAS).filter(key=key).values().get()
            for _ in range(3):
                assert lock(key, timeout=0, label="a rival's").try_acquire() is None
            assert Lock.objects.using(ALIAS).filter(key=key).values().get() == before


class TestClock:
    """Leases are counted in UTC: no server's time zone makes one an hour longer."""

    @pytest.mark.parametrize("zone", ["+00:00", "+05:30", "-11:00", "SYSTEM"])
    def test_the_sessions_time_zone_does_not_matter(self, zone: str) -> None:
        run("SET SESSION time_zone = %s", zone)
        before = time.time_ns() // 1000
        reading = scalar(f"SELECT {US}")
        assert before - 1_000_000 < reading < time.time_ns() // 1000 + 1_000_000

    def test_it_goes_on_when_summer_time_ends(self, mariadb_server: MariaDBServer) -> None:
        """The control goes back by an hour there, and a lease would last an hour too long."""
        with summer_time_ends(mariadb_server) as (zone, end):
            run("SET SESSION time_zone = %s", zone)
            readings, naive = [], []
            for seconds in (-1800, -1, 0, 1, 1800, 3600):
                run("SET SESSION timestamp = %s", end + seconds)
                readings.append(scalar(f"SELECT {US}"))
                naive.append(scalar("SELECT UNIX_TIMESTAMP(NOW(6))"))
        assert readings == [(end + s) * 1_000_000 for s in (-1800, -1, 0, 1, 1800, 3600)]
        assert naive != sorted(naive)

    def test_locks_are_right_in_a_session_of_another_zone(
        self, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(
            connections.databases[ALIAS],
            "OPTIONS",
            connections.databases[ALIAS]["OPTIONS"]
            | {"init_command": "SET SESSION time_zone = '+11:00'"},
        )
        locks.close_all()
        connections[ALIAS].close()
        with lock(key) as lease:
            assert abs(lease.fencing_token - time.time_ns() // 1000) < 60_000_000
            (holder,) = locks[ALIAS].holders(key)
            assert 25 < holder.remaining <= 30
            lease.extend()


@contextmanager
def summer_time_ends(server: MariaDBServer) -> Iterator[tuple[str, int]]:
    """A time zone of the server's that leaves summer time, and when, in seconds since the epoch."""
    if not server.owned:
        pytest.skip(f"the time zones of {server.url_variable} are not ours to change")
    zone, end = "Tests/Autumn", 1_700_000_000
    try:
        # Read anew by sessions that have not used the zone before.
        server.ask("INSERT INTO mysql.time_zone (use_leap_seconds) VALUES ('N')")
        found = server.ask("SELECT max(time_zone_id) FROM mysql.time_zone")[0][0]
        server.ask("INSERT INTO mysql.time_zone_name VALUES (%s, %s)", zone, found)
        for kind, offset, summer in ((0, 3600, 0), (1, 7200, 1)):
            server.ask(
                "INSERT INTO mysql.time_zone_transition_type VALUES (%s, %s, %s, %s, 'T')",
                *(found, kind, offset, summer),
            )
        for moment, kind in ((end - 10_000_000, 1), (end, 0)):
            server.ask(
                "INSERT INTO mysql.time_zone_transition VALUES (%s, %s, %s)", found, moment, kind
            )
        yield zone, end
    finally:
        for table in ("time_zone", "time_zone_transition", "time_zone_transition_type"):
            server.ask(f"DELETE FROM mysql.{table} WHERE time_zone_id = %s", found)
        server.ask("DELETE FROM mysql.time_zone_name WHERE name = %s", zone)


class TestBusyRows:
    """A row in another transaction's hands is not waited for inside a statement."""

    @pytest.fixture
    def in_hands(self, key: str) -> Iterator[Callable[..., None]]:
        """Holds the row of the key in a transaction until `let_go` is set, and tells when it has
        gone. The table is small: nothing else is in it.
        """
        Lock.objects.using(ALIAS).all().delete()
        with lock(key):
            pass
        taken, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            try:
                with transaction.atomic(using=ALIAS):
                    Lock.objects.using(ALIAS).select_for_update().get(key=key)
                    taken.set()
                    assert let_go.wait(30)
            finally:
                connections.close_all()

        with ThreadPoolExecutor(1) as pool:
            holder = pool.submit(hold)
            assert taken.wait(20)
            yield let_go.set
            let_go.set()
            holder.result(20)

    def test_one_try_is_over_soon_and_says_that_it_is_held(
        self, key: str, in_hands: Callable[..., None]
    ) -> None:
        with pytest.raises(LockTimeout) as caught:
            lock(key, timeout=0).acquire()
        assert caught.value.holders == ()

    def test_who_waits_has_it_when_the_row_is_let_go(
        self, key: str, in_hands: Callable[..., None]
    ) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(lock(key, timeout=30).acquire)
            assert wait_until(waiter.running, 10)
            in_hands()
            assert waiter.result(20).release()

    def test_a_release_gets_through_when_the_row_is_let_go(self, key: str) -> None:
        lease = lock(key).acquire()
        with ThreadPoolExecutor(1) as pool:
            with transaction.atomic(using=ALIAS):
                Lock.objects.using(ALIAS).select_for_update().get(key=key)
                releasing = pool.submit(lease.release)
                assert wait_until(releasing.running, 10)
            assert releasing.result(20)
        assert lock(key, timeout=0).acquire().release()

    def test_an_extension_is_refused_as_busy_and_the_lease_goes_on(self, key: str) -> None:
        with lock(key) as lease:
            with transaction.atomic(using=ALIAS):
                Lock.objects.using(ALIAS).select_for_update().get(key=key)
                with pytest.raises(BackendUnavailable, match="Try again"):
                    lease.extend()
            assert not lease.lost
            lease.extend()

    def test_one_busy_row_does_not_keep_others_from_being_extended(self, key: str) -> None:
        busy, other = lock(f"{key}:busy").acquire(), lock(f"{key}:other").acquire()
        with transaction.atomic(using=ALIAS):
            Lock.objects.using(ALIAS).select_for_update().get(key=f"{key}:busy")
            answer = locks[ALIAS].extend(
                [Extension(grant=lease._grant, ttl_us=30_000_000) for lease in (busy, other)]
            )
        assert answer.extended == {other.owner_id}
        assert answer.lost == set()
        for lease in (busy, other):
            assert lease.release()

    def test_several_keys_are_denied_whole(self, key: str, in_hands: Callable[..., None]) -> None:
        first = f"{key[:-1]}"  # comes before the key, and is taken first
        assert lock(first, key, timeout=0).try_acquire() is None
        assert lock(first, timeout=0).acquire().release()

    def test_a_sweep_passes_it_by(self, key: str, in_hands: Callable[..., None]) -> None:
        """However small the table: a DELETE or UPDATE of most of it would read, and wait for, all
        of it.
        """
        old, left_behind = (
            [f"{key}:old:{i}" for i in range(30)],
            [f"{key}:dead:{i}" for i in range(30)],
        )
        for name in (*old, *left_behind):
            with lock(name):
                pass
        rows = Lock.objects.using(ALIAS)
        rows.filter(key__in=old).update(fencing_token=1)
        rows.filter(key__in=left_behind).update(owner_id="gone", expires_at=1)
        swept = list(locks[ALIAS].sweep(older_than=86400, batch_size=1000))
        assert sum(batch.deleted for batch in swept) == 30
        assert {holder.key for batch in swept for holder in batch.expired} >= set(left_behind)
        assert rows.filter(key=key).exists()

    def test_most_of_a_small_table_is_extended_past_it(
        self, key: str, in_hands: Callable[..., None]
    ) -> None:
        leases = [lock(f"{key}:{i}", renew=False).acquire() for i in range(30)]
        wanted = [Extension(grant=lease._grant, ttl_us=30_000_000) for lease in leases]
        assert locks[ALIAS].extend(wanted).extended == {lease.owner_id for lease in leases}
        assert all(lease.release() for lease in leases)


class TestSweep:
    def test_keys_are_deleted_exactly(self, key: str) -> None:
        odd = ('quote"', "back\\slash", "a", "é", "🔒", "'%", "a ")
        names = [f"{key}:{end}" for end in odd]
        for name in (*names, f"{key}:A", f"{key}:e", f"{key}:a  "):
            with lock(name):
                pass
        rows = Lock.objects.using(ALIAS).filter(key__startswith=key)
        for name in names:
            assert rows.filter(key=name).update(fencing_token=1) == 1
        list(locks[ALIAS].sweep(older_than=86400, batch_size=1000))
        assert {row.key for row in rows} == {f"{key}:A", f"{key}:e", f"{key}:a  "}


class TestCrowd:
    def test_no_deadlock_and_never_two_owners(
        self, key: str, spawn: Spawner, mariadb_server: MariaDBServer
    ) -> None:
        """Six processes on three keys, singly and in pairs, and a sweep of everything meanwhile."""
        keys = [f"{key}:{i}" for i in range(3)]
        before = deadlocks(mariadb_server)
        workers = [spawn(contend, keys, seed, 2.0) for seed in range(6)]
        for worker in workers:
            worker.expect("ready")
        for worker in workers:
            worker.send()
        while any(worker.running for worker in workers):
            list(locks[ALIAS].sweep(older_than=0, batch_size=50))
        grants: list[tuple[str, int, float, float]] = []
        for worker in workers:
            held = worker.result(30)
            assert held, "everybody gets a turn"
            grants += map(tuple, held)
        assert deadlocks(mariadb_server) == before
        for name in keys:
            mine = sorted((g for g in grants if g[0] == name), key=lambda g: g[1])
            for (_, token, _, until), (_, later, since, _) in pairwise(mine):
                assert token < later
                assert until <= since, "the next one has begun before this one's end"


def contend(keys: list[str], seed: int, seconds: float) -> list[tuple[str, int, float, float]]:
    """Key, token, beginning and end of each hold."""
    random.seed(seed)
    held = []
    with lock(f"{keys[0]}:{seed}"):
        print("ready", flush=True)  # noqa: T201
        input()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        wanted = random.sample(keys, random.choice((1, 1, 2)))
        lease: Lease | None = lock(*wanted, timeout=1).try_acquire()
        if lease is None:
            continue
        since = time.monotonic()
        time.sleep(random.random() * 0.002)
        until = time.monotonic()
        held += [(k, token, since, until) for k, token in lease.fencing_tokens.items()]
        lease.release()
    return held


def deadlocks(server: MariaDBServer) -> int:
    rows = dict(server.ask("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'"))
    return int(rows["Innodb_deadlocks"])


class TestSessions:
    def test_a_session_that_was_ended_is_opened_anew(self, key: str) -> None:
        lease = lock(key).acquire()
        end_other_sessions()
        lease.extend()
        end_other_sessions()
        assert lease.release()
        end_other_sessions()
        assert lock(key, timeout=0).acquire().release()

    def test_an_isolation_level_of_the_alias_is_for_its_users(
        self, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(
            connections.databases[ALIAS],
            "OPTIONS",
            connections.databases[ALIAS]["OPTIONS"] | {"isolation_level": "serializable"},
        )
        locks.close_all()
        connections[ALIAS].close()
        assert scalar("SELECT @@SESSION.tx_isolation") == "SERIALIZABLE"
        level = "SELECT @@SESSION.tx_isolation"
        levels = locks[ALIAS]._run(lambda session: session.execute(level))  # type: ignore[attr-defined]
        assert list(levels) == [("READ-COMMITTED",)]

    def test_a_lock_taken_in_a_transaction_outlives_its_rollback_until_then(self, key: str) -> None:

        def work() -> None:
            with transaction.atomic(using=ALIAS):
                with lock(key):
                    pass
                assert locks[ALIAS].holders(key), "until the transaction's end"
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            work()
        assert wait_until(lambda: not locks[ALIAS].holders(key), 10)


def end_other_sessions() -> None:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(
            "SELECT id FROM information_schema.processlist "
            "WHERE db = DATABASE() AND id <> CONNECTION_ID()"
        )
        for (session,) in cursor.fetchall():
            cursor.execute("KILL %s", [session])


def test_a_server_that_is_gone_is_an_error_of_ours(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.databases[ALIAS], "PORT", "1")
    locks.close_all()
    connections[ALIAS].close()
    with pytest.raises(DistlocksError) as caught:
        lock(key, timeout=0).acquire()
    assert isinstance(caught.value, BackendUnavailable)
