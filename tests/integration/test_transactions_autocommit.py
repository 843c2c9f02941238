"""With autocommit off nobody can tell when the user will commit: locks end with their block."""

import logging
from collections.abc import Iterator

import pytest
from django.db import connections, transaction

from distlocks import db_lock, transactions
from tests.integration.test_transactions_end import Lane, is_free
from tests.testapp.models import Account

pytestmark = pytest.mark.usefixtures("databases")

LANES = [
    Lane("postgres", "postgres"),
    Lane("portable_postgres", "postgres"),
    Lane("sqlite", "postgres"),
    Lane("sqlite", "deferred"),
]


@pytest.fixture(params=LANES, ids="-".join)
def lane(request: pytest.FixtureRequest) -> Lane:
    lane: Lane = request.param
    return lane


@pytest.fixture
def off(databases: None, lane: Lane, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Autocommit is off on the lane's database, and nobody has been warned of it yet."""
    monkeypatch.setattr(transactions, "_warned", set())
    transaction.set_autocommit(False, using=lane.database)
    yield
    transaction.rollback(using=lane.database)
    transaction.set_autocommit(True, using=lane.database)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [r for r in caplog.records if r.name.startswith("distlocks")]
    return [r.getMessage() for r in ours if r.levelno >= logging.WARNING]


@pytest.mark.usefixtures("off")
def test_the_lock_ends_with_its_block_and_one_warning(
    lane: Lane, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with db_lock(key, backend=lane.backend):
            Account.objects.using(lane.database).count()
            assert not is_free(key, lane)
        assert is_free(key, lane)
    (message,) = warnings(caplog)
    assert f"Autocommit is off on the database {lane.database!r}" in message
    assert "may be before the commit" in message


@pytest.mark.usefixtures("off")
def test_so_it_does_inside_atomic(lane: Lane, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """There, the end of the outermost block commits nothing."""
    with transaction.atomic(using=lane.database):
        with db_lock(key, backend=lane.backend):
            Account.objects.using(lane.database).count()
            assert not is_free(key, lane)
        assert is_free(key, lane)
    transaction.commit(using=lane.database)
    assert is_free(key, lane)
    assert len(warnings(caplog)) == 1


@pytest.mark.usefixtures("off")
def test_a_body_that_commits_by_itself_is_right(lane: Lane, key: str) -> None:
    with db_lock(key, backend=lane.backend):
        Account.objects.using(lane.database).create(name=key)
        transaction.commit(using=lane.database)
        assert not is_free(key, lane)
    assert is_free(key, lane)
    transaction.rollback(using=lane.database)
    assert Account.objects.using(lane.database).filter(name=key).exists()


@pytest.mark.usefixtures("off")
def test_a_rollback_of_the_user_takes_no_lock_along(lane: Lane, key: str) -> None:
    with db_lock(key, backend=lane.backend) as lease:
        Account.objects.using(lane.database).create(name=key)
        transaction.rollback(using=lane.database)
        lease.check()
        assert not is_free(key, lane)
    assert not Account.objects.using(lane.database).filter(name=key).exists()


@pytest.mark.usefixtures("off")
def test_a_transaction_on_another_database_is_still_waited_for(lane: Lane, key: str) -> None:
    with transaction.atomic(using="postgres_other"):
        with db_lock(key, backend=lane.backend):
            pass
        assert not is_free(key, lane)
    assert is_free(key, lane)


def test_a_database_that_is_set_up_so_still_has_working_locks(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locks' own connection commits whatever the alias says."""
    lane = Lane("postgres", "postgres")
    monkeypatch.setattr(transactions, "_warned", set())
    connections["postgres"].close()
    monkeypatch.setitem(connections["postgres"].settings_dict, "AUTOCOMMIT", False)
    with db_lock(key, backend="postgres"):
        Account.objects.using("postgres").count()
        assert not is_free(key, lane)
    assert is_free(key, lane)
    connections["postgres"].close()


def test_with_autocommit_on_nobody_is_warned(
    lane: Lane, key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transactions, "_warned", set())
    with transaction.atomic(using=lane.database), db_lock(key, backend=lane.backend):
        pass
    assert is_free(key, lane)
    assert warnings(caplog) == []
