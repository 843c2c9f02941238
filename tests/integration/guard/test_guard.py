"""lease.atomic(): who may enter, what runs, and what is left as it was."""

import threading
import unittest
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.core.exceptions import ObjectDoesNotExist
from django.db import IntegrityError, OperationalError, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, TestCase, override_settings
from django.urls import path

from distlocks import (
    BackendUnavailable,
    Lease,
    LeaseLost,
    LockTimeout,
    NotSupported,
    StaleToken,
    db_lock,
    locks,
    signals,
)
from distlocks.checks import check_stores
from distlocks.testing import flush_events
from tests.integration.guard.sites import (
    DATABASES,
    DAY_US,
    MARIADB,
    POSTGRES,
    SQLITE,
    Site,
    forged,
    now_us,
    statements,
    wait_for_a_waiter,
)
from tests.testapp.models import Account

Start = Callable[..., Future[Any]]
AddAlias = Callable[..., str]


def scalar(using: str, query: str) -> Any:
    with connections[using].cursor() as cursor:
        cursor.execute(query)
        return cursor.fetchone()[0]


def run(using: str, query: str) -> None:
    with connections[using].cursor() as cursor:
        cursor.execute(query)


class TestEntering:
    def test_it_commits(self, site: Site, key: str, start: Start) -> None:
        site.open_account(key, balance=10)
        with site.lock(key) as lease, lease.atomic(site.using):
            site.deposit(key)
        assert start(site.balance, key).result() == 11
        assert site.guard(key) == lease.fencing_token
        assert not connections[site.using].in_atomic_block

    def test_the_first_statement_raises_the_fence_and_it_is_the_only_one_more(
        self, site: Site, key: str
    ) -> None:
        site.open_account(key)
        with site.lock(key) as lease:
            with lease.atomic(site.using):  # what is asked once per connection has been asked
                pass
            with site.queries() as plain, transaction.atomic(using=site.using):
                site.deposit(key)
            with site.queries() as guarded, lease.atomic(site.using):
                site.deposit(key)

        begin, *rest = statements(plain)
        assert begin == "BEGIN"
        inside = ["BEGIN", "guard", *rest]
        if site.vendor == "mysql":
            # How long it may be idle is a setting of the session there: set before, reset after.
            assert statements(guarded) == ["SET", *inside, "SET"]
        else:
            assert statements(guarded) == inside

    def test_a_stale_holder_is_refused_before_anything_has_run(self, site: Site, key: str) -> None:
        site.open_account(key)
        with site.lock(key) as lease:
            site.raise_guard(key, lease.fencing_token + 1)
            with (
                site.queries() as captured,
                pytest.raises(StaleToken) as caught,
                lease.atomic(site.using),
            ):
                pytest.fail("the body must not run")

        assert caught.value.keys == (key,)
        assert [s for s in statements(captured) if s != "SET"] == ["BEGIN", "guard", "ROLLBACK"]
        assert site.balance(key) == 0
        assert site.guard(key) == lease.fencing_token + 1
        assert not connections[site.using].in_atomic_block

    def test_a_lease_enters_as_often_as_it_likes(self, site: Site, key: str) -> None:
        site.open_account(key)
        with site.lock(key) as lease:
            for _ in range(3):
                with lease.atomic(site.using):
                    site.deposit(key)
        assert site.balance(key) == 3
        assert site.guard(key) == lease.fencing_token

    def test_the_next_holder_enters_and_then_the_old_one_no_more(
        self, database: Site, key: str
    ) -> None:
        database.open_account(key)
        old, new = forged(key, token=now_us()), forged(key, token=now_us() + 1_000_000)
        for lease in (old, new):
            with lease.atomic(database.using):
                database.deposit(key)
        with pytest.raises(StaleToken), old.atomic(database.using):
            database.deposit(key)
        with new.atomic(database.using):
            database.deposit(key)
        assert database.balance(key) == 3

    def test_several_keys_are_raised_in_the_order_that_everybody_keeps(
        self, site: Site, key: str
    ) -> None:
        keys = [f"{key}:{letter}" for letter in "cab"]
        with site.lock(*keys) as lease, site.queries() as captured, lease.atomic(site.using):
            pass
        raised = [q["sql"] for q in captured.captured_queries if "distlocks_lockguard" in q["sql"]]
        assert [k for sql in raised for k in sorted(keys) if k in sql] == sorted(keys)
        assert {k: site.guard(k) for k in keys} == lease.fencing_tokens

    def test_one_stale_key_of_several_refuses_all(self, site: Site, key: str) -> None:
        first, second = f"{key}:1", f"{key}:2"
        with site.lock(first, second) as lease:
            site.raise_guard(second, lease.fencing_tokens[second] + 1)
            with pytest.raises(StaleToken), lease.atomic(site.using):
                pass
        assert site.guard(first) is None, "rolled back with the rest"

    def test_a_lost_lease_does_not_begin(self, site: Site, key: str) -> None:
        lease = forged(key, token=now_us(), ttl=2, age=10)
        with site.queries() as captured, pytest.raises(LeaseLost):
            lease.atomic(site.using).__enter__()
        assert statements(captured) == []

    def test_a_released_lease_does_not_begin(self, site: Site, key: str) -> None:
        with site.lock(key) as lease:
            pass
        with pytest.raises(LeaseLost, match="released"), lease.atomic(site.using):
            pass
        assert site.guard(key) is None

    def test_a_token_beyond_the_retention_of_guards_is_refused(
        self, database: Site, key: str
    ) -> None:
        """Its guard row may have been swept, so nobody knows who has been there since."""
        too_old = forged(key, token=now_us() - 31 * DAY_US)
        with pytest.raises(StaleToken, match="30 days"), too_old.atomic(database.using):
            pass
        assert database.guard(key) is None

    def test_a_token_within_the_retention_of_guards_enters(self, database: Site, key: str) -> None:
        lease = forged(key, token=now_us() - 29 * DAY_US)
        with lease.atomic(database.using):
            pass
        assert database.guard(key) == lease.fencing_token

    def test_keys_are_guarded_exactly(self, database: Site, key: str) -> None:
        """Guards of keys that differ in case, an accent or a trailing space are different rows."""
        higher = now_us() + 1_000_000
        for other in (f"{key}:A", f"{key}:a ", f"{key}:á"):
            with forged(other, token=higher).atomic(database.using):
                pass
        with forged(f"{key}:a", token=now_us()).atomic(database.using):
            pass

    def test_the_prefix_of_the_alias_is_part_of_the_guards_key(
        self, database: Site, key: str
    ) -> None:
        prefixed = {"BACKEND": "distlocks.backends.memory.MemoryBackend", "KEY_PREFIX": "shop:"}
        with (
            override_settings(DISTLOCKS={"default": prefixed}),
            db_lock(key) as lease,
            lease.atomic(database.using),
        ):
            pass
        assert lease.keys == (key,)
        assert database.guard(f"shop:{key}") == lease.fencing_token
        assert database.guard(key) is None


class TestEnding:
    def test_the_bodys_error_rolls_back_and_is_what_the_caller_sees(
        self, site: Site, key: str
    ) -> None:
        site.open_account(key)
        error = ValueError("no")

        def fail() -> None:
            with site.lock(key) as lease, lease.atomic(site.using):
                site.deposit(key)
                raise error

        with pytest.raises(ValueError, match="no") as caught:
            fail()
        assert caught.value is error
        assert site.balance(key) == 0

    def test_a_database_error_is_what_the_caller_sees(self, site: Site, key: str) -> None:
        site.open_account(key)

        def fail() -> None:
            with site.lock(key) as lease, lease.atomic(site.using):
                site.deposit(key)
                site.open_account(key)

        with pytest.raises(IntegrityError):
            fail()
        assert site.balance(key) == 0
        assert not connections[site.using].in_atomic_block

    def test_an_error_leaves_its_own_cause_alone(self, site: Site, key: str) -> None:
        lease = forged(key, token=now_us())
        site.raise_guard(key, lease.fencing_token + 1)
        with pytest.raises(StaleToken) as caught, lease.atomic(site.using):
            pass
        assert caught.value.__cause__ is not caught.value

    def test_savepoints_inside(self, site: Site, key: str) -> None:
        site.open_account(key)
        with site.lock(key) as lease, lease.atomic(site.using):
            site.deposit(key)
            with suppress(ZeroDivisionError), transaction.atomic(using=site.using):
                site.set_balance(key, 100)
                raise ZeroDivisionError
            with transaction.atomic(using=site.using):
                site.deposit(key)
        assert site.balance(key) == 2

    def test_commit_hooks_run_after_the_commit(self, site: Site, key: str, start: Start) -> None:
        site.open_account(key)
        seen: list[int] = []

        def look() -> None:
            seen.append(start(site.balance, key).result())

        with site.lock(key) as lease, lease.atomic(site.using):
            site.deposit(key)
            transaction.on_commit(look, using=site.using)
        assert seen == [1]

    # A lock on SQLite cannot be lost to others while a transaction there is open.
    @pytest.mark.parametrize(
        "site",
        [(SQLITE, "memory"), (POSTGRES, "postgres"), (MARIADB, "mariadb")],
        ids=lambda pair: f"{pair[1]} lock, {pair[0]} data",
        indirect=True,
    )
    def test_a_commit_stands_although_the_lease_was_lost_meanwhile(
        self, site: Site, key: str
    ) -> None:
        """An error at the end of the block would invite doing it again. The signal tells."""
        site.open_account(key)
        with lost_leases() as lost:
            with site.lock(key) as lease, lease.atomic(site.using):
                site.deposit(key)
                locks[site.backend].force_release(key)
            flush_events()
        assert site.balance(key) == 1
        assert lost == [lease.owner_id]

    def test_unguarded_work_is_told_that_its_lease_was_lost(self, site: Site, key: str) -> None:
        site.open_account(key)

        def work() -> None:
            with site.lock(key):
                site.deposit(key)
                locks[site.backend].force_release(key)

        with pytest.raises(LeaseLost):
            work()

    def test_guarded_work_that_rolled_back_does_not_hide_a_loss(self, site: Site, key: str) -> None:
        def work() -> None:
            with site.lock(key) as lease:
                with suppress(ZeroDivisionError), lease.atomic(site.using):
                    raise ZeroDivisionError
                locks[site.backend].force_release(key)

        with pytest.raises(LeaseLost):
            work()


@contextmanager
def lost_leases() -> Iterator[list[str]]:
    """The owner ids of leases that the signal tells of."""
    lost: list[str] = []

    def hear(owner_id: str, **_: object) -> None:
        lost.append(owner_id)

    signals.lease_lost.connect(hear)
    yield lost
    signals.lease_lost.disconnect(hear)


def guarded_view(request: HttpRequest, using: str, key: str) -> HttpResponse:
    with db_lock(key, backend="memory") as lease, lease.atomic(using):
        Site(using, "memory").deposit(key)
    return HttpResponse("done")


def decorated_view(request: HttpRequest, using: str, key: str) -> HttpResponse:
    return guarded_view(request, using, key)


for _using in DATABASES:
    decorated_view = transaction.non_atomic_requests(using=_using)(decorated_view)

urlpatterns = [
    path("atomic/<using>/<key>", guarded_view),
    path("decorated/<using>/<key>", decorated_view),
]


class TestOpenTransactions:
    def test_inside_atomic_it_is_refused(self, site: Site, key: str) -> None:
        site.open_account(key)
        with site.lock(key) as lease, transaction.atomic(using=site.using):
            advice = r"@transaction\.non_atomic_requests"
            with pytest.raises(NotSupported, match=advice), lease.atomic(site.using):
                site.deposit(key)
            site.deposit(key)
        assert site.balance(key) == 1, "the transaction that was open goes on"

    def test_another_databases_transaction_is_no_obstacle(self, database: Site, key: str) -> None:
        database.open_account(key)
        other = next(alias for alias in DATABASES if alias != database.using)
        with (
            transaction.atomic(using=other),
            forged(key, token=now_us()).atomic(database.using),
        ):
            database.deposit(key)
        assert database.balance(key) == 1

    def test_under_atomic_requests_the_error_says_what_to_do(
        self, database: Site, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = key.rpartition(":")[2]
        database.open_account(key)
        monkeypatch.setitem(connections.databases[database.using], "ATOMIC_REQUESTS", True)
        with override_settings(ROOT_URLCONF=__name__):
            with pytest.raises(NotSupported) as caught:
                Client().get(f"/atomic/{database.using}/{key}")
            answer = Client().get(f"/decorated/{database.using}/{key}")
        assert "@transaction.non_atomic_requests" in str(caught.value)
        assert answer.status_code == 200
        assert database.balance(key) == 1

    def test_with_autocommit_off_it_is_refused(self, database: Site, key: str) -> None:
        lease = forged(key, token=now_us())
        transaction.set_autocommit(False, using=database.using)
        try:
            with pytest.raises(NotSupported, match="Autocommit"), lease.atomic(database.using):
                pass
        finally:
            transaction.rollback(using=database.using)
            transaction.set_autocommit(True, using=database.using)

    def test_not_durable_joins_on_postgresql_at_read_committed(
        self, production: None, key: str
    ) -> None:
        site = Site(POSTGRES, "postgres")
        site.open_account(key)
        with site.lock(key) as lease, transaction.atomic(using=POSTGRES):
            with lease.atomic(POSTGRES, durable=False):
                site.deposit(key)
            assert site.guard(key) == lease.fencing_token
            transaction.set_rollback(True, using=POSTGRES)
        assert site.balance(key) == 0
        assert site.guard(key) is None, "it belonged to the outer transaction"

    def test_not_durable_refuses_the_stale(self, production: None, key: str) -> None:
        site = Site(POSTGRES, "postgres")
        site.open_account(key)
        lease = forged(key, token=now_us())
        site.raise_guard(key, lease.fencing_token + 1)
        with transaction.atomic(using=POSTGRES):
            with pytest.raises(StaleToken), lease.atomic(POSTGRES, durable=False):
                pass
            site.deposit(key)
        assert site.balance(key) == 1, "the transaction that was open goes on"

    @pytest.mark.parametrize("using", [SQLITE, MARIADB])
    def test_not_durable_is_refused_elsewhere(self, production: None, key: str, using: str) -> None:
        with (
            transaction.atomic(using=using),
            pytest.raises(NotSupported, match="READ COMMITTED"),
            forged(key, token=now_us()).atomic(using, durable=False),
        ):
            pass

    @pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
    def test_not_durable_is_refused_with_a_snapshot(
        self, add_alias: AddAlias, key: str, level: str
    ) -> None:
        using = isolated(add_alias, level)
        with (
            transaction.atomic(using=using),
            pytest.raises(NotSupported, match="READ COMMITTED"),
            forged(key, token=now_us()).atomic(using, durable=False),
        ):
            pass

    def test_not_durable_opens_one_where_none_is_open(self, database: Site, key: str) -> None:
        database.open_account(key)
        with forged(key, token=now_us()).atomic(database.using, durable=False):
            database.deposit(key)
        assert database.balance(key) == 1


def isolated(add_alias: AddAlias, level: str) -> str:
    """An alias of the PostgreSQL database at an isolation level."""
    from django.db.backends.postgresql.psycopg_any import IsolationLevel

    return add_alias(POSTGRES, OPTIONS={"isolation_level": getattr(IsolationLevel, level)})


class TestSettingsOfTheSession:
    """What bounds the wait at the guard, and the idleness after it, is not left to the user."""

    @pytest.mark.parametrize("lock_timeout", ["0", "1234ms"])
    def test_the_users_lock_timeout_governs_the_block(
        self, production: None, key: str, lock_timeout: str
    ) -> None:
        run(POSTGRES, f"SET lock_timeout = '{lock_timeout}'")
        with forged(key, token=now_us()).atomic(POSTGRES):
            assert scalar(POSTGRES, "SHOW lock_timeout") == lock_timeout
        assert scalar(POSTGRES, "SHOW lock_timeout") == lock_timeout

    def test_the_lock_timeout_is_the_users_after_a_refusal(
        self, production: None, key: str
    ) -> None:
        run(POSTGRES, "SET lock_timeout = '1234ms'")
        lease = forged(key, token=now_us())
        Site(POSTGRES, "memory").raise_guard(key, lease.fencing_token + 1)
        with pytest.raises(StaleToken), lease.atomic(POSTGRES):
            pass
        assert scalar(POSTGRES, "SHOW lock_timeout") == "1234ms"

    @pytest.mark.parametrize(
        ("users", "inside"), [("0", "7s"), ("5s", "5s"), ("1min", "7s"), ("7s", "7s")]
    )
    def test_idleness_is_bounded_by_the_ttl_or_by_less(
        self, production: None, key: str, users: str, inside: str
    ) -> None:
        run(POSTGRES, f"SET idle_in_transaction_session_timeout = '{users}'")
        idle = "SHOW idle_in_transaction_session_timeout"
        with forged(key, token=now_us(), ttl=7).atomic(POSTGRES):
            assert scalar(POSTGRES, idle) == inside
        assert scalar(POSTGRES, idle) == users

    @pytest.mark.parametrize(("users", "inside"), [(0, 7), (5, 5), (60, 7)])
    def test_idleness_is_bounded_by_the_ttl_or_by_less_on_mariadb(
        self, add_alias: AddAlias, key: str, users: int, inside: int
    ) -> None:
        variable = "idle_transaction_timeout"
        using = add_alias(MARIADB, OPTIONS={"init_command": f"SET SESSION {variable} = {users}"})
        with forged(key, token=now_us(), ttl=6.5).atomic(using):
            assert scalar(using, f"SELECT @@SESSION.{variable}") == inside
        assert scalar(using, f"SELECT @@SESSION.{variable}") == users

        stale = forged(key, token=now_us() - DAY_US)
        with pytest.raises(StaleToken), stale.atomic(using):
            pass
        assert scalar(using, f"SELECT @@SESSION.{variable}") == users

        with pytest.raises(ZeroDivisionError), forged(key, token=now_us()).atomic(using):
            raise ZeroDivisionError
        assert scalar(using, f"SELECT @@SESSION.{variable}") == users

    def test_a_session_that_dies_after_the_commit_does_not_undo_it_on_mariadb(
        self, production: None, key: str
    ) -> None:
        """What is left to do then is to put back a setting of that session."""
        site = Site(MARIADB, "memory")
        site.open_account(key)
        began = False

        def die_at_the_end(execute: Any, sql: str, *args: Any) -> Any:
            nonlocal began
            if "idle_transaction_timeout" in sql and began:
                raise OperationalError(2013, "Lost connection")
            began = began or "lockguard" in sql
            return execute(sql, *args)

        with (
            connections[MARIADB].execute_wrapper(die_at_the_end),
            forged(key, token=now_us()).atomic(MARIADB),
        ):
            site.deposit(key)
        assert site.balance(key) == 1

    def test_the_users_wait_for_rows_governs_the_block_on_mariadb(
        self, production: None, key: str
    ) -> None:
        run(MARIADB, "SET SESSION innodb_lock_wait_timeout = 12")
        with forged(key, token=now_us()).atomic(MARIADB):
            assert scalar(MARIADB, "SELECT @@SESSION.innodb_lock_wait_timeout") == 12


class TestTurns:
    """An earlier holder's transaction is open while the next one comes."""

    @pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
    def test_who_waited_sees_what_was_committed_on_postgresql(
        self, add_alias: AddAlias, start: Start, key: str, level: str
    ) -> None:
        self.take_turns(isolated(add_alias, level), start, key)

    @pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
    def test_who_waited_sees_what_was_committed_on_mariadb(
        self, add_alias: AddAlias, start: Start, key: str, level: str
    ) -> None:
        self.take_turns(add_alias(MARIADB, OPTIONS={"isolation_level": level}), start, key)

    def take_turns(self, using: str, start: Start, key: str) -> None:
        site = Site(using, "memory")
        site.open_account(key, balance=10)
        # Present, so that there is a row to wait for.
        site.raise_guard(key, 1)
        bodies: list[int] = []

        def next_holder() -> None:
            with forged(key, token=now_us() + 1_000_000).atomic(using):
                bodies.append(site.balance(key))
                site.deposit(key)

        with forged(key, token=now_us()).atomic(using):
            rival = start(next_holder)
            wait_for_a_waiter(using)
            site.deposit(key)
        rival.result(20)
        assert bodies == [11], "once, and after the commit"
        assert site.balance(key) == 12

    @pytest.mark.parametrize("using", [POSTGRES, MARIADB])
    def test_who_waits_for_the_first_holder_of_a_key_sees_its_commit_too(
        self, production: None, start: Start, key: str, using: str
    ) -> None:
        """No guard row is there yet: the wait is for the insertion of another."""
        site = Site(using, "memory")
        site.open_account(key)

        def next_holder() -> None:
            with forged(key, token=now_us() + 1_000_000).atomic(using):
                site.deposit(key)

        with forged(key, token=now_us()).atomic(using):
            rival = start(next_holder)
            wait_for_a_waiter(using)
            site.deposit(key)
        rival.result(20)
        assert site.balance(key) == 2

    @pytest.mark.parametrize("using", [POSTGRES, MARIADB])
    def test_an_old_holder_that_waits_for_a_later_one_is_refused(
        self, production: None, start: Start, key: str, using: str
    ) -> None:
        site = Site(using, "memory")
        site.open_account(key)

        def old_holder() -> None:
            with forged(key, token=now_us() - 1_000_000).atomic(using):
                site.deposit(key)

        with forged(key, token=now_us()).atomic(using):
            rival = start(old_holder)
            wait_for_a_waiter(using)
            site.deposit(key)
        with pytest.raises(StaleToken):
            rival.result(20)
        assert site.balance(key) == 1

    @pytest.mark.parametrize("using", [POSTGRES, MARIADB])
    def test_the_wait_ends_with_the_lease(
        self, production: None, start: Start, key: str, using: str
    ) -> None:
        site = Site(using, "memory")
        site.open_account(key)

        def next_holder() -> None:
            with forged(key, token=now_us() + 1_000_000, ttl=1.2).atomic(using):
                site.deposit(key)

        with forged(key, token=now_us()).atomic(using):
            with pytest.raises((LockTimeout, LeaseLost)):
                start(next_holder).result(20)
            site.deposit(key)
        assert site.balance(key) == 1

    def test_other_keys_do_not_wait(self, production: None, start: Start, key: str) -> None:
        for using in (POSTGRES, MARIADB):
            site = Site(using, "memory")
            for name in (f"{key}:1", f"{key}:2"):
                site.open_account(name)
                site.raise_guard(name, 1)

            def other_holder(site: Site = site) -> None:
                with forged(f"{key}:2", token=now_us()).atomic(site.using):
                    site.deposit(f"{key}:2")

            with forged(f"{key}:1", token=now_us()).atomic(using):
                start(other_holder).result(20)


class TestTestCases:
    """In a test case's transaction it works like elsewhere, and vanishes with it."""

    def test_in_djangos_testcase(self, databases: None, key: str) -> None:
        names = {f"{key}:{u}:{b}": Site(u, b) for u, s in DATABASES.items() for b in (s, "memory")}
        tried: list[str] = []

        class Guarded(TestCase):
            databases = frozenset(DATABASES)

            def test_it(self) -> None:
                for name, site in names.items():
                    self.try_all(name, site)
                    tried.append(name)

            def try_all(self, name: str, site: Site) -> None:
                site.open_account(name)
                with site.lock(name) as lease:
                    for _ in range(2):
                        with lease.atomic(site.using):
                            site.deposit(name)
                    assert site.guard(name) == lease.fencing_token
                    with pytest.raises(ZeroDivisionError), lease.atomic(site.using):
                        site.set_balance(name, 1 // (site.balance(name) - 2))
                    with (
                        transaction.atomic(using=site.using),
                        pytest.raises(NotSupported),
                        lease.atomic(site.using),
                    ):
                        pass
                stale = forged(name, token=lease.fencing_token - 1)
                with pytest.raises(StaleToken), stale.atomic(site.using):
                    pass
                assert site.balance(name) == 2

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Guarded).run(result)
        assert not [text for _, text in result.errors + result.failures]
        assert tried == list(names)
        for name, site in names.items():
            assert site.guard(name) is None
            with pytest.raises(ObjectDoesNotExist):
                site.balance(name)

    @pytest.mark.django_db(databases=list(DATABASES))
    @pytest.mark.parametrize("using", DATABASES)
    def test_in_pytests(self, key: str, using: str, seen_from_outside: Callable[..., Any]) -> None:
        site = Site(using, DATABASES[using])
        site.open_account(key)
        with site.lock(key) as lease, lease.atomic(using):
            site.deposit(key)
        assert site.balance(key) == 1
        assert site.guard(key) == lease.fencing_token
        assert seen_from_outside(site.guard, key) is None

    @pytest.fixture
    def seen_from_outside(self) -> Iterator[Callable[..., Any]]:
        """Looks over another thread's connection."""
        with ThreadPoolExecutor(1) as pool:
            yield lambda look, *args: pool.submit(look, *args).result(20)
            pool.submit(connections.close_all).result(20)


class TestMissingTable:
    @pytest.fixture(params=DATABASES)
    def bare(
        self, request: pytest.FixtureRequest, add_alias: AddAlias, tmp_path: Any
    ) -> Iterator[str]:
        """A database with somebody's table in it, and without the tables of distlocks."""
        like = request.param
        if like == SQLITE:
            using = add_alias(SQLITE, NAME=str(tmp_path / "bare.sqlite3"))
            drop = "DROP TABLE somebodys"
        elif like == POSTGRES:
            run(POSTGRES, "CREATE SCHEMA bare")
            using = add_alias(POSTGRES, OPTIONS={"options": "-c search_path=bare"})
            drop = "DROP SCHEMA bare CASCADE"
        else:
            name = f"{connections[MARIADB].settings_dict['NAME']}_bare"
            run(MARIADB, f"CREATE DATABASE `{name}`")
            using = add_alias(MARIADB, NAME=name)
            drop = f"DROP DATABASE `{name}`"
        run(using, "CREATE TABLE somebodys (id integer)")
        yield using
        run(using, drop)

    def test_the_error_says_what_to_do(self, bare: str, key: str) -> None:
        with (
            pytest.raises(BackendUnavailable, match=f"migrate --database {bare}"),
            forged(key, token=now_us()).atomic(bare),
        ):
            pass
        assert not connections[bare].in_atomic_block

    def test_the_system_check_says_so_before(self, bare: str) -> None:
        guarded = {"BACKEND": "distlocks.backends.memory.MemoryBackend", "GUARD_DATABASES": [bare]}
        with override_settings(DISTLOCKS={"default": guarded}):
            (message,) = check_stores(databases=[bare])
            assert check_stores(databases=[]) == []
        assert message.id == "distlocks.W004"
        assert bare in message.msg
        assert f"--database {bare}" in (message.hint or "")

    def test_the_system_check_is_content_where_the_table_is(self, database: Site) -> None:
        guarded = {
            "BACKEND": "distlocks.backends.memory.MemoryBackend",
            "GUARD_DATABASES": [database.using],
        }
        with override_settings(DISTLOCKS={"default": guarded}):
            assert check_stores(databases=[database.using]) == []


class TestThreads:
    def test_threads_of_one_lease_take_turns(
        self, production: None, start: Start, key: str
    ) -> None:
        """A lease that is handed to several threads guards each one's transaction."""
        for using in (POSTGRES, MARIADB):
            site, lease = Site(using, "memory"), forged(key, token=now_us())
            site.open_account(key)
            site.raise_guard(key, 1)
            together = threading.Barrier(4)

            def work(site: Site = site, lease: Lease = lease, together: Any = together) -> None:
                together.wait(20)
                for _ in range(5):
                    with lease.atomic(site.using):
                        site.deposit(key)

            for rival in [start(work) for _ in range(4)]:
                rival.result(30)
            assert site.balance(key) == 20


def test_the_default_is_the_default_database(production: None, key: str) -> None:
    Account.objects.create(name=key)
    with forged(key, token=now_us()).atomic():
        Account.objects.filter(name=key).update(balance=1)
    assert Site(SQLITE, "memory").guard(key) is not None
