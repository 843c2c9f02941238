"""The database of the locks goes away: clear errors, and nothing lost that need not be."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.db import connections
from django.test import override_settings

from distlocks import BackendUnavailable, Lease, LeaseLost, db_lock, locks
from distlocks.clock import lease_now
from distlocks.models import Lock, LockHolder
from distlocks.renewal import renewer
from distlocks.testing import flush_events
from tests.servers import session
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("databases")


@pytest.fixture(scope="module")
def private_server() -> Iterator[PostgresServer]:
    """A server of this module's own: tests kill it, and the next one finds it running again."""
    server = session.private(PostgresServer)
    if server is None:
        pytest.skip("there is no PostgreSQL here that is ours to kill")
    with server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE far")
        yield server


@pytest.fixture(scope="module")
def proxy(private_server: PostgresServer) -> Iterator[FaultProxy]:
    """What lies between the locks and their server."""
    with FaultProxy(private_server.host, private_server.port) as proxy:
        yield proxy


@pytest.fixture
def server(
    databases: None,
    private_server: PostgresServer,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[PostgresServer]:
    """The server of the lock aliases "far" and "far_portable", to be killed at will."""
    private_server.start()
    proxy.mode = "pass"
    database = dict(connections["postgres"].settings_dict)
    database |= private_server.database("far", HOST=proxy.host, PORT=str(proxy.port))
    monkeypatch.setitem(connections.databases, "far", database)
    backend = settings.DISTLOCKS["default"]["BACKEND"]
    aliases = {
        alias: {"BACKEND": backend, "OPTIONS": {"using": "far", "dialect": dialect}}
        for alias, dialect in (("far", "auto"), ("far_portable", "portable"))
    }
    with override_settings(DISTLOCKS=settings.DISTLOCKS | aliases):
        if "distlocks_lock" not in connections["far"].introspection.table_names():
            with connections["far"].schema_editor() as editor:
                editor.create_model(Lock)
                editor.create_model(LockHolder)
        connections["far"].close()
        yield private_server
        # What is still to be given back has nowhere to go.
        proxy.mode = "reset"
        renewer.releases.settle()
        renewer.releases.give_up()
    del connections["far"]


@pytest.fixture
def backend() -> str:
    """The lock alias, where a test does not name several."""
    return "far"


# Both ways to reach the server, where the way may make a difference.
both_ways = pytest.mark.parametrize("backend", ["far", "far_portable"])


def ask(server: PostgresServer, query: str, *params: Any, database: str = "far") -> list[Any]:
    """The rows of an answer of the server itself."""
    with psycopg.connect(server.url, dbname=database, autocommit=True) as connection:
        cursor = connection.execute(query, params)
        return cursor.fetchall() if cursor.description else []


def is_taken(server: PostgresServer, key: str) -> bool:
    query = "SELECT owner_id FROM distlocks_lock WHERE key = %s AND expires_at > 0"
    return bool(ask(server, query, key))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# Down when the lock is asked for


@both_ways
def test_a_lock_that_cannot_be_asked_for_is_an_error_that_says_so(
    server: PostgresServer, backend: str, key: str
) -> None:
    server.stop()
    lock = db_lock(key, timeout=30, backend=backend)
    for attempt in (lock.acquire, lock.try_acquire):
        # Not a time-out, which would say that somebody else has it, and not after 30 seconds.
        with pytest.raises(BackendUnavailable) as caught:
            attempt()
        assert "The database 'far' cannot be used for locks" in str(caught.value)
        assert caught.value.__cause__ is not None
    with pytest.raises(BackendUnavailable), lock:
        pytest.fail("the body ran")
    with pytest.raises(BackendUnavailable):
        locks[backend].holders()
    server.start()
    # The same process goes on, and nothing of the failed tries is in the way.
    with db_lock(key, timeout=10, backend=backend):
        assert is_taken(server, key)
    assert not is_taken(server, key)


async def test_so_it_is_for_a_task(server: PostgresServer, backend: str, key: str) -> None:
    server.stop()
    with pytest.raises(BackendUnavailable, match="cannot be used for locks"):
        await db_lock(key, backend=backend).aacquire()


def test_many_failed_tries_do_not_pile_up_threads(server: PostgresServer, key: str) -> None:
    """A web server under load goes on asking while its database is down."""
    server.stop()
    before = threading.active_count()
    lock = db_lock(key, timeout=0, backend="far")
    for _ in range(60):
        with pytest.raises(BackendUnavailable):
            lock.acquire()
    assert threading.active_count() <= before + 10


@both_ways
def test_a_waiter_whose_database_dies_is_told(
    server: PostgresServer, backend: str, key: str
) -> None:
    lease = db_lock(key, backend=backend).acquire()

    def wait() -> None:
        try:
            db_lock(key, timeout=30, backend=backend).acquire()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        eventually(lambda: locks[backend]._sleepers)  # type: ignore[attr-defined]
        server.stop()
        with pytest.raises(BackendUnavailable, match="cannot be used for locks"):
            waiting.result(20)
    server.start()
    lease.release()


# Down while it is held


@both_ways
def test_a_restart_within_the_lease_loses_nothing(
    server: PostgresServer, backend: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[Lease] = []
    with db_lock(key, ttl=6, backend=backend, on_lost=lost.append) as lease:
        server.kill()
        # A renewal comes due meanwhile, and fails.
        eventually(lambda: any("could not be extended" in said for said in warnings(caplog)))
        assert not lease.lost
        server.start()
        before = lease.deadline
        eventually(lambda: lease.deadline > before)
        assert is_taken(server, key)
    assert not is_taken(server, key)
    flush_events()
    assert lost == []


def test_a_lease_that_cannot_be_extended_is_lost_at_its_deadline(
    server: PostgresServer, backend: str, key: str
) -> None:
    lost: list[tuple[Lease, float]] = []
    lock = db_lock(key, ttl=1, backend=backend, on_lost=lambda le: lost.append((le, lease_now())))
    lease = lock.acquire()
    deadline = lease.deadline
    server.kill()
    assert not lease.lost
    lease.check()
    eventually(lambda: lost)
    ((told, at),) = lost
    assert told is lease
    assert lease.deadline == deadline
    assert at >= deadline
    with pytest.raises(LeaseLost, match="was not extended before its deadline"):
        lease.check()
    with pytest.raises(LeaseLost):
        lease.extend()


def test_at_the_end_of_a_block_a_lost_lease_is_an_error(
    server: PostgresServer, backend: str, key: str
) -> None:
    @db_lock(key, ttl=1, backend=backend)
    def work(fails: bool) -> None:
        server.kill()
        deadline = lease_now() + 1
        eventually(lambda: lease_now() > deadline)
        if fails:
            raise ZeroDivisionError

    with pytest.raises(LeaseLost):
        work(False)
    server.start()
    # The body's own error comes first.
    with pytest.raises(ZeroDivisionError):
        work(True)


def test_a_renewal_that_hangs_hides_no_deadline(
    server: PostgresServer, proxy: FaultProxy, key: str
) -> None:
    lost: list[Lease] = []
    with db_lock(f"{key} elsewhere", ttl=4, backend="postgres") as elsewhere:
        lease = db_lock(key, ttl=1, backend="far", on_lost=lost.append).acquire()
        proxy.mode = "blackhole"
        eventually(lambda: lost == [lease])
        # The server that answers is not kept waiting by the one that does not.
        before = elsewhere.deadline
        eventually(lambda: elsewhere.deadline > before)
        assert not elsewhere.lost
        proxy.mode = "reset"


@both_ways
def test_a_cut_connection_is_opened_anew(
    server: PostgresServer, proxy: FaultProxy, backend: str, key: str
) -> None:
    with db_lock(key, backend=backend) as lease:
        for _ in range(3):
            proxy.cut()
            lease.extend()
            proxy.cut()
            assert db_lock(key, timeout=0, backend=backend).try_acquire() is None
            proxy.cut()
            assert [holder.key for holder in locks[backend].holders(key)] == [key]
        proxy.cut()
    assert not is_taken(server, key)


@both_ways
def test_a_session_ended_by_the_server_is_opened_anew(
    server: PostgresServer, backend: str, key: str
) -> None:
    """As an administrator, or a server's idle time-out, would."""
    with db_lock(key, backend=backend) as lease:
        for _ in range(3):
            ask(
                server,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = 'far' AND pid <> pg_backend_pid()",
            )
            lease.extend()
        with db_lock(f"{key} 2", timeout=0, backend=backend):
            pass
    assert not is_taken(server, key)
    assert not lease.lost


def test_a_read_only_server_is_a_clear_error(server: PostgresServer, key: str) -> None:
    """A standby, or a primary that was just demoted."""
    ask(server, "ALTER DATABASE far SET default_transaction_read_only = on")
    with pytest.raises(BackendUnavailable, match="read-only"):
        db_lock(key, timeout=0, backend="far").acquire()
    ask(server, "ALTER DATABASE far RESET default_transaction_read_only", database="postgres")
    with db_lock(key, timeout=0, backend="far"):
        pass


# Down when it is given back


def test_a_release_that_fails_is_tried_again_until_the_lease_ends(
    server: PostgresServer, backend: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with db_lock(key, ttl=20, backend=backend) as lease:
        server.kill()
    # The work is done and in time: no error for its caller, but a word in the log.
    assert any("could not be released at the end of its block" in said for said in warnings(caplog))
    assert not lease.lost
    server.start()
    assert is_taken(server, key)
    eventually(lambda: not is_taken(server, key))
    assert lease.remaining > 0
    with db_lock(key, timeout=0, backend=backend):
        pass


@both_ways
def test_by_hand_the_second_release_succeeds(
    server: PostgresServer, backend: str, key: str
) -> None:
    lease = db_lock(key, backend=backend).acquire()
    server.stop()
    for _ in range(2):
        with pytest.raises(BackendUnavailable):
            lease.release()
    assert not lease.lost
    server.start()
    assert is_taken(server, key)
    assert lease.release() is True
    assert not is_taken(server, key)


async def test_so_it_does_for_a_task(server: PostgresServer, key: str) -> None:
    lease = await db_lock(key, backend="far").aacquire()
    server.stop()
    with pytest.raises(BackendUnavailable):
        await lease.arelease()
    server.start()
    assert await lease.arelease() is True


def test_a_body_that_fails_while_the_database_is_down_keeps_its_error(
    server: PostgresServer, backend: str, key: str
) -> None:
    @db_lock(key, backend=backend)
    def work() -> None:
        server.stop()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_who_takes_over_after_the_lease_is_not_disturbed_by_the_late_release(
    server: PostgresServer, proxy: FaultProxy, key: str
) -> None:
    """The old holder cannot reach the server; the next one can."""
    old = db_lock(key, ttl=2, backend="far").acquire()
    proxy.mode = "reset"
    with pytest.raises(BackendUnavailable):
        old.release()
    # Who can reach it takes over when the lease has ended.
    takeover = "UPDATE distlocks_lock SET owner_id = 'next', fencing_token = fencing_token + 1"
    ask(server, f"{takeover} WHERE key = %s", key)
    proxy.mode = "pass"
    assert old.release() is False
    assert ask(server, "SELECT owner_id FROM distlocks_lock WHERE key = %s", key) == [("next",)]


@pytest.mark.parametrize("verb", ["acquire", "extend", "release"])
def test_the_error_names_the_keys(server: PostgresServer, key: str, verb: str) -> None:
    lease = db_lock(key, ttl=1, backend="far").acquire()
    verbs: dict[str, Callable[[], object]] = {
        "acquire": db_lock(f"{key} 2", ttl=1, backend="far").acquire,
        "extend": lease.extend,
        "release": lease.release,
    }
    server.stop()
    with pytest.raises(BackendUnavailable) as caught:
        verbs[verb]()
    assert caught.value.keys == ((f"{key} 2",) if verb == "acquire" else (key,))
