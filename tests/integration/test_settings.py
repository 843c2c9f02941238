"""Settings of the alias and of its database, as they tell on real databases."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core.signals import request_finished, request_started
from django.db import connections, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel
from django.test import override_settings

from distlocks import LockTimeout, db_lock, locks
from distlocks.models import Lock
from tests.factories import now_us
from tests.testapp.models import Account

pytestmark = pytest.mark.usefixtures("databases")

DATABASE = "distlocks.backends.database.DatabaseBackend"
NUMBERS = itertools.count(1)
STORES = {
    "sqlite": ("default", "auto"),
    "portable_sqlite": ("default", "portable"),
    "postgres": ("postgres", "auto"),
    "portable_postgres": ("postgres", "portable"),
}


@pytest.fixture(params=STORES)
def entry(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """Makes an entry of DISTLOCKS for the store, with some parameters."""
    using, dialect = STORES[request.param]

    def make(**parameters: Any) -> dict[str, Any]:
        options = {"using": using, "dialect": dialect}
        return {"BACKEND": DATABASE, "OPTIONS": options} | parameters

    return make


Entry = Callable[..., dict[str, Any]]


# Of the alias


def test_a_prefix_is_in_the_table_and_nowhere_else(entry: Entry, key: str) -> None:
    with override_settings(DISTLOCKS={"default": entry(KEY_PREFIX="shop é%:")}):
        using = locks["default"].using  # type: ignore[attr-defined]
        rows = Lock.objects.using(using)
        lease = db_lock(key).acquire()
        assert rows.filter(key=f"shop é%:{key}").exists()
        assert not rows.filter(key=key).exists()
        assert lease.keys == (key,)
        assert [*lease.fencing_tokens] == [key]
        assert [holder.key for holder in locks["default"].holders(key)] == [key]
        with pytest.raises(LockTimeout) as caught:
            db_lock(key, timeout=0).acquire()
        assert caught.value.keys == (key,)
        assert caught.value.holders[0].key == key
        assert "shop" not in str(caught.value)
        (forced,) = locks["default"].force_release(key)
        assert forced.key == key
        assert lease.release() is False


def test_aliases_exclude_each_other_exactly_if_they_share_table_and_prefix(
    entry: Entry, key: str
) -> None:
    aliases = {
        "default": entry(KEY_PREFIX="shop:"),
        "same": entry(KEY_PREFIX="shop:"),
        "other": entry(KEY_PREFIX="blog:"),
        "none": entry(),
    }
    with override_settings(DISTLOCKS=aliases), db_lock(key):
        assert db_lock(key, timeout=0, backend="same").try_acquire() is None
        for alias in ("other", "none"):
            with db_lock(key, timeout=0, backend=alias):
                pass
        assert db_lock(f"shop:{key}", timeout=0, backend="none").try_acquire() is None


def test_a_prefixed_list_of_holders_is_the_aliases_own(entry: Entry, key: str) -> None:
    aliases = {"default": entry(KEY_PREFIX="a:"), "other": entry(KEY_PREFIX="a:b:")}
    with override_settings(DISTLOCKS=aliases), db_lock(key), db_lock(key, backend="other"):
        assert [holder.key for holder in locks["other"].holders(key)] == [key]
        # What another alias has is seen under the name that it has here.
        assert [holder.key for holder in locks["default"].holders(f"b:{key}")] == [f"b:{key}"]


def test_the_ttl_of_the_alias_is_the_rows(entry: Entry, key: str) -> None:
    aliases = {"default": entry(TTL=timedelta(seconds=7), MAX_TTL=20, TIMEOUT=0)}
    with override_settings(DISTLOCKS=aliases):
        using = locks["default"].using  # type: ignore[attr-defined]

        def seconds_left() -> float:
            row = Lock.objects.using(using).get(key=key)
            return (row.expires_at - now_us()) / 1_000_000

        with db_lock(key) as lease:
            assert lease.ttl == 7
            assert 5 < seconds_left() <= 7
            lease.extend(20)
            assert 18 < seconds_left() <= 20
            with pytest.raises(LockTimeout, match="at once"):
                db_lock(key).acquire()
        with db_lock(key, ttl=15):
            assert 13 < seconds_left() <= 15


@pytest.mark.parametrize("listen", [True, False])
def test_waiters_get_there_whether_they_listen_or_not(listen: bool, key: str) -> None:
    options = {"using": "postgres", "listen": listen}
    with override_settings(DISTLOCKS={"default": {"BACKEND": DATABASE, "OPTIONS": options}}):
        lease = db_lock(key).acquire()

        def wait() -> int:
            try:
                with db_lock(key, timeout=20) as mine:
                    return mine.fencing_token
            finally:
                connections.close_all()

        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(wait) for _ in range(3)]
            lease.release()
            tokens = {one.result(20) for one in waiting}
        assert len(tokens) == 3
        assert min(tokens) > lease.fencing_token


class ElsewhereRouter:
    """Sends everything to a database that is not there."""

    def db_for_read(self, model: type, **hints: Any) -> str:
        return "nowhere"

    db_for_write = db_for_read


def test_routers_have_no_say_in_where_locks_live(entry: Entry, key: str) -> None:
    routers = [f"{__name__}.ElsewhereRouter"]
    with override_settings(DISTLOCKS={"default": entry()}, DATABASE_ROUTERS=routers):
        with db_lock(key) as lease:
            lease.extend()
            assert db_lock(key, timeout=0).try_acquire() is None
        assert locks["default"].holders(key) == []
        assert locks["default"].force_release(key) == []
        list(locks["default"].sweep(older_than=3600, batch_size=1000))


# Of the database


@pytest.fixture
def altered(databases: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Adds a database like "postgres" with other OPTIONS, and the lock alias "altered" in it."""
    names: list[str] = []
    overridden = []

    def alter(dialect: str = "auto", **options: Any) -> str:
        name = f"altered_{next(NUMBERS)}"
        names.append(name)
        database = dict(connections["postgres"].settings_dict)
        database["OPTIONS"] = database["OPTIONS"] | options
        monkeypatch.setitem(connections.databases, name, database)
        entry = {"BACKEND": DATABASE, "OPTIONS": {"using": name, "dialect": dialect}}
        override = override_settings(DISTLOCKS=settings.DISTLOCKS | {"altered": entry})
        override.enable()
        overridden.append(override)
        return name

    yield alter
    for override in reversed(overridden):
        override.disable()
    for name in names:
        connections[name].close()
        del connections[name]


Alter = Callable[..., str]
dialects = pytest.mark.parametrize("dialect", ["auto", "portable"])


def live(key: str) -> None:
    """All that can be done with a lock."""
    backend = locks["altered"]
    lock = db_lock(key, f"{key} 2", backend="altered", label="é", metadata={"a": [1]})
    with lock as lease:
        lease.extend()
        with pytest.raises(LockTimeout):
            db_lock(key, timeout=0, backend="altered").acquire()
        assert len(backend.holders(key)) == 2
        assert backend.holders(key, limit=1)[0].metadata == {"a": [1]}
    lease = db_lock(key, min_hold=0.01, backend="altered").acquire()

    def wait() -> None:
        with db_lock(key, timeout=20, backend="altered"):
            pass
        connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        lease.release()
        waiting.result(20)
    abandoned = db_lock(key, backend="altered").acquire()
    assert backend.force_release(key)
    assert abandoned.release() is False
    list(backend.sweep(older_than=3600, batch_size=3, dry_run=True))
    list(backend.sweep(older_than=3600, batch_size=1000))


@dialects
def test_parameters_may_be_bound_by_the_server(altered: Alter, key: str, dialect: str) -> None:
    altered(dialect, server_side_binding=True)
    live(key)


@dialects
def test_so_they_may_inside_a_test_case(altered: Alter, key: str, dialect: str) -> None:
    """There, other statements are sent: over the caller's connection, and with no time-outs."""
    name = altered(dialect, server_side_binding=True)
    around_the_test = transaction.atomic(using=name)
    # What TestCase tells Django of its own transaction.
    around_the_test._from_testcase = True
    backend = locks["altered"]
    with around_the_test:
        with db_lock(key, f"{key} 2", backend="altered", metadata={"a": [1]}) as lease:
            lease.extend()
            assert db_lock(key, timeout=0, backend="altered").try_acquire() is None
            assert len(backend.holders(key)) == 2
        abandoned = db_lock(key, min_hold=0.01, backend="altered").acquire()
        assert backend.force_release(key)
        assert abandoned.release() is False
        list(backend.sweep(older_than=3600, batch_size=1000))
        transaction.set_rollback(True, using=name)
    assert not Lock.objects.using("postgres").filter(key=key).exists()


@dialects
def test_a_stricter_isolation_of_the_alias_does_not_reach_the_locks(
    altered: Alter, key: str, dialect: str
) -> None:
    altered(dialect, isolation_level=IsolationLevel.SERIALIZABLE)
    compete(key)


@pytest.mark.parametrize(
    ("dialect", "level"),
    [("auto", "repeatable read"), ("auto", "serializable"), ("portable", "serializable")],
)
def test_nor_does_one_that_the_server_sets(
    altered: Alter, key: str, dialect: str, level: str
) -> None:
    quoted = level.replace(" ", "\\ ")
    altered(dialect, options=f"-c default_transaction_isolation={quoted}")
    live(key)
    compete(key)


def compete(key: str) -> None:
    """Three threads count together, each step under the lock."""
    accounts = Account.objects.using("postgres_other")
    accounts.create(name=key)
    start = threading.Barrier(3)

    def work() -> None:
        start.wait(20)
        try:
            for _ in range(5):
                with db_lock(key, timeout=30, backend="altered"):
                    account = accounts.get(name=key)
                    account.balance += 1
                    account.save()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(work) for _ in range(3)]:
            one.result(50)
    assert accounts.get(name=key).balance == 15


@dialects
def test_connections_that_live_for_one_request_are_not_the_locks(
    altered: Alter, key: str, dialect: str
) -> None:
    """CONN_MAX_AGE and health checks are for the caller's connection."""
    name = altered(dialect)
    connections.databases[name]["CONN_MAX_AGE"] = 0
    connections.databases[name]["CONN_HEALTH_CHECKS"] = True
    with db_lock(key, backend="altered") as lease:
        for signal in (request_started, request_finished):
            signal.send(type(None))
        lease.extend()
        assert not lease.lost


@dialects
def test_tables_may_lie_in_another_schema(altered: Alter, key: str, dialect: str) -> None:
    with connections["postgres"].cursor() as cursor:
        cursor.execute("CREATE SCHEMA elsewhere")
        cursor.execute("CREATE TABLE elsewhere.distlocks_lock (LIKE distlocks_lock INCLUDING ALL)")
    try:
        altered(dialect, options="-c search_path=elsewhere,public")
        with db_lock(key, backend="altered"):
            assert not Lock.objects.using("postgres").filter(key=key).exists()
            # So the two do not exclude each other.
            with db_lock(key, timeout=0, backend="postgres"):
                pass
        live(key)
    finally:
        with connections["postgres"].cursor() as cursor:
            cursor.execute("DROP SCHEMA elsewhere CASCADE")


@dialects
def test_atomic_requests_are_not_for_the_locks(altered: Alter, key: str, dialect: str) -> None:
    name = altered(dialect)
    connections.databases[name]["ATOMIC_REQUESTS"] = True
    with transaction.atomic(using=name), db_lock(key, backend="altered"):
        assert Lock.objects.using("postgres").filter(key=key).exists()
