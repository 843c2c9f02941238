"""CASES 38: a proxy that passes sessions on between transactions stands in the way."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest
from django.db import connections, transaction

from distlocks import LockTimeout, NotSupported, locks
from distlocks.backends.advisory.sql import lock_id
from tests.integration.advisory.conftest import Start, Way
from tests.integration.contract.advisory_stores import AdvisoryStore
from tests.servers import finding
from tests.servers.pgbouncer import PgBouncerServer
from tests.servers.postgres import PostgresServer

Behind = Callable[..., AdvisoryStore]


@pytest.fixture
def behind(way: Way, postgres_server: PostgresServer) -> Iterator[Behind]:
    """`behind("transaction")`: the store, through a PgBouncer with this pool_mode."""
    with ExitStack() as running:

        def make(pool_mode: str, settings: str = "") -> AdvisoryStore:
            program = finding.find([PgBouncerServer])[PgBouncerServer]
            proxy = PgBouncerServer(
                program, target=postgres_server, pool_mode=pool_mode, settings=settings
            )
            running.enter_context(proxy)
            store = way(
                "behind",
                HOST=proxy.host,
                PORT=str(proxy.port),
                DISABLE_SERVER_SIDE_CURSORS=True,
            )
            # Its sessions end before it does.
            running.callback(connections.close_all)
            running.callback(locks.close_all)
            return store

        yield make


def nothing_is_stranded(postgres_server: PostgresServer, key: str) -> bool:
    query = """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
               AND (classid::bigint << 32) | objid::bigint = %s"""
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        return connection.execute(query, [lock_id(key)]).fetchone() == (0,)


@pytest.mark.parametrize(
    ("pool_mode", "settings"),
    [
        ("transaction", ""),
        # The session that was given back first is taken first, among several.
        ("transaction", "server_round_robin = 1\nmin_pool_size = 4"),
        ("transaction", "default_pool_size = 2"),
        ("statement", ""),
    ],
    ids=["last one first", "first one first", "few", "statement"],
)
def test_one_that_pools_transactions_is_refused(
    behind: Behind, postgres_server: PostgresServer, key: str, pool_mode: str, settings: str
) -> None:
    store = behind(pool_mode, settings)
    for _ in range(3):
        with pytest.raises(NotSupported, match="pool_mode = transaction"):
            store.lock(key, timeout=0).acquire()
    assert nothing_is_stranded(postgres_server, key)
    settings_of = "SELECT name FROM pg_settings WHERE source = 'session' AND name LIKE '%timeout%'"
    with connections[store.using].cursor() as cursor:
        for _ in range(8):
            cursor.execute(settings_of)
            assert cursor.fetchall() == [], "what is set would be others' too"
    (message,) = store.backend.check_store()
    assert message.id == "distlocks.E034"


def test_also_beside_other_clients(
    behind: Behind, postgres_server: PostgresServer, key: str
) -> None:
    """Who hold sessions, and give them back meanwhile."""
    store = behind("transaction")
    entry = connections.databases[store.using]
    with ExitStack() as clients:
        others = [
            clients.enter_context(
                psycopg.connect(
                    host=entry["HOST"],
                    port=entry["PORT"],
                    user=entry["USER"],
                    dbname=entry["NAME"],
                    prepare_threshold=None,
                )
            )
            for _ in range(3)
        ]
        for number, other in enumerate(others):
            other.execute("SELECT 1")
            if number:
                other.commit()
        with pytest.raises(NotSupported):
            store.lock(key, timeout=0).acquire()
    assert nothing_is_stranded(postgres_server, key)


def test_one_that_pools_sessions_does_no_harm(behind: Behind, key: str, start: Start) -> None:
    store = behind("session")
    assert store.backend.check_store() == []
    with store.lock(key, timeout=0) as lease:
        lease.extend()
        with pytest.raises(LockTimeout):
            store.lock(key, timeout=0.1).acquire()
        waiter = start(store.lock(key, timeout=20).acquire)
        store.eventually_waiting(key, 1)
    assert waiter.result(10).release()


def test_inside_a_transaction_locks_are_had_all_the_same(
    behind: Behind, postgres_server: PostgresServer, key: str, start: Start
) -> None:
    """The server's session is ours while the transaction lasts."""
    store = behind("transaction")

    def rival() -> bool:
        with transaction.atomic(using=store.using):
            return store.lock(key, timeout=0).try_acquire() is None

    with transaction.atomic(using=store.using):
        lease = store.lock(key, timeout=0).acquire()
        assert start(rival).result(10)
        assert lease.release() is True
    assert nothing_is_stranded(postgres_server, key)
