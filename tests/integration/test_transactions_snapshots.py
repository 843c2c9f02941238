"""A lock taken when the transaction has already decided what it sees."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from distlocks import db_lock
from tests.integration.test_transactions_end import Lane, is_free
from tests.testapp.models import Account

pytestmark = pytest.mark.usefixtures("databases")

# The isolation level must not be taken over by the connection of the locks.
BACKENDS = ["postgres", "portable_postgres", "sqlite", "memory"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def isolated(
    databases: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A database alias whose transactions run at the level that the test is parametrised with."""
    database = dict(connections["postgres_other"].settings_dict)
    database["OPTIONS"] = {"isolation_level": request.param}
    monkeypatch.setitem(connections.databases, "isolated", database)
    yield "isolated"
    connections["isolated"].close()
    del connections["isolated"]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [r for r in caplog.records if r.name.startswith("distlocks")]
    return [r.getMessage() for r in ours if r.levelno >= logging.WARNING]


strict = pytest.mark.parametrize(
    "isolated", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE], indirect=True
)
lenient = pytest.mark.parametrize(
    "isolated", [IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED], indirect=True
)


@strict
def test_with_a_snapshot_from_before_the_lock_there_is_a_warning(
    isolated: str, backend: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with transaction.atomic(using=isolated):
        Account.objects.using(isolated).count()
        with db_lock(key, backend=backend):
            pass
    assert is_free(key, Lane(backend, isolated))
    (message,) = warned(caplog)
    assert "inside a transaction on 'isolated' whose snapshot is older than the lock" in message
    assert "Take the lock before the transaction begins" in message


@strict
def test_before_the_first_query_there_is_no_snapshot_yet(
    isolated: str, backend: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with transaction.atomic(using=isolated), db_lock(key, backend=backend):
        Account.objects.using(isolated).count()
    assert is_free(key, Lane(backend, isolated))
    assert warned(caplog) == []


@strict
def test_around_the_transaction_all_is_well(
    isolated: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    Account.objects.using(isolated).count()
    with db_lock(key, backend="postgres"), transaction.atomic(using=isolated):
        Account.objects.using(isolated).count()
    assert warned(caplog) == []


@lenient
def test_where_each_statement_sees_the_newest_there_is_no_warning(
    isolated: str, backend: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with transaction.atomic(using=isolated):
        Account.objects.using(isolated).count()
        with db_lock(key, backend=backend):
            pass
    assert is_free(key, Lane(backend, isolated))
    assert warned(caplog) == []


@strict
def test_a_lock_that_was_not_had_warns_of_nothing(
    isolated: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with db_lock(key, backend="postgres"), transaction.atomic(using=isolated):
        Account.objects.using(isolated).count()
        assert db_lock(key, timeout=0, backend="postgres").try_acquire() is None
    assert warned(caplog) == []


@strict
def test_the_warning_is_right_and_so_is_its_way_out(isolated: str, key: str) -> None:
    """What was read before the lock is stale, what is read in a transaction after it is not."""
    accounts = Account.objects.using(isolated)
    accounts.create(name=key)

    def anothers_turn() -> None:
        with db_lock(key, backend="postgres"):
            Account.objects.using("postgres_other").filter(name=key).update(balance=1)
        connections.close_all()

    with transaction.atomic(using=isolated):
        assert accounts.get(name=key).balance == 0
        with ThreadPoolExecutor(1) as pool:
            pool.submit(anothers_turn).result(20)
        with db_lock(key, backend="postgres"):
            assert accounts.get(name=key).balance == 0
    with db_lock(key, backend="postgres"), transaction.atomic(using=isolated):
        assert accounts.get(name=key).balance == 1
