"""Inside a transaction on SQLite, which has one writer, the lock lives in that transaction."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings

from distlocks import BackendUnavailable, LeaseLost, LockTimeout, db_lock, locks
from distlocks.models import Lock
from distlocks.renewal import renewer
from distlocks.signals import lease_lost
from distlocks.testing import flush_events
from tests.integration.test_transactions_end import Lane, is_free
from tests.testapp.models import Account
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("databases")

BACKENDS = ["sqlite", "portable_sqlite"]
NUMBERS = itertools.count(1)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def rows_seen_elsewhere(key: str, database: str = "default") -> list[Lock]:
    """The lock's row as another connection sees it."""

    def look() -> list[Lock]:
        try:
            return list(Lock.objects.using(database).filter(key=key))
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(look).result(20)


def test_the_row_is_part_of_the_transaction(backend: str, key: str) -> None:
    with transaction.atomic():
        with db_lock(key, backend=backend) as lease:
            row = Lock.objects.get(key=key)
            assert (row.owner_id, row.fencing_token) == (lease.owner_id, lease.fencing_token)
            assert rows_seen_elsewhere(key) == []
        assert Lock.objects.get(key=key).owner_id == ""
        assert rows_seen_elsewhere(key) == []
    (row,) = rows_seen_elsewhere(key)
    assert (row.owner_id, row.fencing_token) == ("", lease.fencing_token)


def test_a_rollback_leaves_nothing(backend: str, key: str) -> None:
    with transaction.atomic():
        with db_lock(key, backend=backend):
            pass
        transaction.set_rollback(True)
    assert rows_seen_elsewhere(key) == []


def test_a_rollback_brings_back_what_was(backend: str, key: str) -> None:
    with db_lock(key, backend=backend) as before:
        pass
    with transaction.atomic():
        with db_lock(key, backend=backend) as inside:
            assert inside.fencing_token > before.fencing_token
        transaction.set_rollback(True)
    with db_lock(key, backend=backend) as after:
        assert after.fencing_token > before.fencing_token


def test_a_savepoint_rolled_back_takes_the_lock_along(backend: str, key: str) -> None:
    with transaction.atomic():
        with transaction.atomic():
            with db_lock(key, backend=backend):
                pass
            transaction.set_rollback(True)
        assert not Lock.objects.filter(key=key).exists()
        with db_lock(key, timeout=0, backend=backend):
            pass
    assert len(rows_seen_elsewhere(key)) == 1


def test_rivals_are_kept_out_until_the_commit(key: str) -> None:
    lane = Lane("sqlite", "default")
    with transaction.atomic():
        with db_lock(key):
            assert not is_free(key, lane)
        # The row is free, and only the writer's lock keeps the others from changing it.
        assert not is_free(key, lane)
    assert is_free(key, lane)


def test_a_waiting_rival_gets_it_after_the_commit(key: str) -> None:
    began, tokens = threading.Event(), []

    def wait() -> None:
        began.set()
        with db_lock(key, timeout=30) as lease:
            tokens.append((lease.fencing_token, Account.objects.filter(name=key).count()))
        connections.close_all()

    with transaction.atomic():
        with db_lock(key) as lease:
            waiting = threading.Thread(target=wait)
            waiting.start()
            assert began.wait(20)
            Account.objects.create(name=key)
        assert tokens == []
    waiting.join(20)
    ((token, seen),) = tokens
    assert token > lease.fencing_token
    assert seen == 1


@pytest.mark.parametrize(
    ("backend", "timeout"), [("sqlite", 20), ("sqlite", None), ("portable_sqlite", 1)]
)
def test_a_wish_to_wait_is_refused_at_once_with_the_way_out(
    backend: str, key: str, timeout: float | None
) -> None:
    with db_lock(key, backend=backend), transaction.atomic():
        with pytest.raises(LockTimeout) as caught:
            db_lock(key, timeout=timeout, backend=backend).acquire()
        assert "take the lock before the transaction begins, or use timeout=0" in str(caught.value)
        assert caught.value.holders[0].key == key
        Account.objects.create(name=key)
    assert Account.objects.filter(name=key).exists()


def test_a_lease_inside_is_not_renewed_and_not_lost_by_the_clock(backend: str, key: str) -> None:
    """Nobody can take the key before the commit, however long that takes."""
    lost = []
    lease_lost.connect(handler := lambda **event: lost.append(event))
    try:
        with transaction.atomic():
            with db_lock(key, ttl=1, backend=backend) as lease:
                deadline = lease.deadline
                eventually(lambda: lease.remaining < -0.1)
                assert lease.deadline == deadline
            Account.objects.create(name=key)
        flush_events()
    finally:
        lease_lost.disconnect(handler)
    assert lost == []
    assert Account.objects.filter(name=key).exists()


def test_by_hand_it_can_be_released_once(backend: str, key: str) -> None:
    with transaction.atomic():
        lease = db_lock(key, backend=backend).acquire()
        assert lease.release() is True
        assert lease.release() is True
        with pytest.raises(LeaseLost, match="released"):
            lease.check()
    with db_lock(key, timeout=0, backend=backend):
        pass


def test_a_lease_from_before_can_be_extended_and_released_inside(key: str) -> None:
    """The rows of a lock taken outside are changed on the only connection that can write now."""
    lease = db_lock(key).acquire()
    with transaction.atomic():
        Account.objects.create(name=key)
        before = lease.deadline
        lease.extend()
        assert lease.deadline > before
        assert lease.release() is True
        assert not is_free(key, Lane("sqlite", "default"))
    assert is_free(key, Lane("sqlite", "default"))


def test_a_lease_from_before_outlives_a_rollback(key: str) -> None:
    lane = Lane("sqlite", "default")
    with db_lock(key) as lease:
        with transaction.atomic():
            Account.objects.create(name=key)
            transaction.set_rollback(True)
        assert not is_free(key, lane)
        lease.check()
    assert is_free(key, lane)


def test_several_keys_inside_are_had_together_or_not_at_all(backend: str, key: str) -> None:
    first, second = f"{key} 1", f"{key} 2"
    with db_lock(second, backend=backend), transaction.atomic():
        with pytest.raises(LockTimeout):
            db_lock(first, second, timeout=0, backend=backend).acquire()
        assert not Lock.objects.filter(key=first).exists()
    with transaction.atomic(), db_lock(first, second, backend=backend) as lease:
        assert set(lease.fencing_tokens) == {first, second}


def test_a_connection_closed_inside_is_reported(key: str) -> None:
    """The lock lived on it, so it is gone, and whoever works under it should know."""
    lost: list[object] = []

    @transaction.atomic
    @db_lock(key, on_lost=lost.append)
    def work() -> None:
        Account.objects.create(name=key)
        connections["default"].close()

    with pytest.raises(LeaseLost):
        work()
    assert not Account.objects.filter(name=key).exists()
    flush_events()
    assert len(lost) == 1
    assert is_free(key, Lane("sqlite", "default"))


def test_long_transactions_do_not_stop_the_renewal_of_other_locks(key: str) -> None:
    """Renewal cannot write while the transaction does; it catches up before the deadline."""
    with db_lock(key, ttl=4) as lease:
        with transaction.atomic():
            Account.objects.create(name=key)
            # A renewal has come due, and found the database locked.
            eventually(lambda: lease.remaining < 2.5)
        before = lease.deadline
        eventually(lambda: lease.deadline > before)
        assert not lease.lost


# A DEFERRED transaction, as Django begins it when nobody says anything


@pytest.fixture
def deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The alias of a database whose transactions begin as readers, beside other writers."""
    database = dict(connections["deferred"].settings_dict)
    database |= {
        "NAME": str(tmp_path / "deferred.sqlite3"),
        "OPTIONS": {"init_command": "PRAGMA journal_mode=wal", "timeout": 0.05},
    }
    entry: dict[str, Any] = {"BACKEND": settings.DISTLOCKS["default"]["BACKEND"]}
    # Never one that a thread of another test still knows otherwise.
    alias = f"overtaken_{next(NUMBERS)}"
    monkeypatch.setitem(connections.databases, alias, database)
    overridden = settings.DISTLOCKS | {alias: entry | {"OPTIONS": {"using": alias}}}
    with override_settings(DISTLOCKS=overridden):
        call_command("migrate", database=alias, verbosity=0, run_syncdb=True)
        yield alias
        # What could not be had is given back in the background, as long as there is such an alias.
        renewer.releases.settle()
        renewer.releases.give_up()
        connections[alias].close()
        del connections[alias]


def write_elsewhere(database: str, name: str) -> None:
    def write() -> None:
        Account.objects.using(database).create(name=name)
        connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write).result(20)


def test_a_reader_that_was_overtaken_is_told_the_way_out(deferred: str, key: str) -> None:
    with transaction.atomic(using=deferred):
        assert not Account.objects.using(deferred).exists()
        write_elsewhere(deferred, key)
        with pytest.raises(BackendUnavailable) as caught:
            db_lock(key, timeout=0, backend=deferred).acquire()
        assert "after the transaction had begun by reading" in str(caught.value)
        assert "OPTIONS = {'transaction_mode': 'IMMEDIATE'}" in str(caught.value)
        assert "Take the lock before the transaction begins" in str(caught.value)
        # It goes on reading what it has read before.
        assert not Account.objects.using(deferred).exists()
    assert rows_seen_elsewhere(key, deferred) == []
    with db_lock(key, timeout=0, backend=deferred):
        pass


def test_a_reader_beside_a_writer_at_work_is_told_too(deferred: str, key: str) -> None:
    writing, end = threading.Event(), threading.Event()

    def write() -> None:
        with transaction.atomic(using=deferred):
            Account.objects.using(deferred).create(name=key)
            writing.set()
            assert end.wait(20)
        connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(write)
        assert writing.wait(20)
        try:
            with transaction.atomic(using=deferred):
                assert not Account.objects.using(deferred).exists()
                with pytest.raises((BackendUnavailable, LockTimeout), match="locked"):
                    db_lock(f"{key} 2", timeout=0, backend=deferred).acquire()
        finally:
            end.set()
        done.result(20)
    assert Account.objects.using(deferred).filter(name=key).exists()


def test_a_reader_that_nobody_overtook_gets_the_lock(deferred: str, key: str) -> None:
    with transaction.atomic(using=deferred):
        assert not Account.objects.using(deferred).exists()
        with db_lock(key, timeout=0, backend=deferred):
            Account.objects.using(deferred).create(name=key)
    assert len(rows_seen_elsewhere(key, deferred)) == 1


def test_a_lock_that_comes_first_keeps_other_writers_out(deferred: str, key: str) -> None:
    lane = Lane(deferred, deferred)
    with transaction.atomic(using=deferred):
        with db_lock(key, backend=deferred):
            assert not Account.objects.using(deferred).exists()
        assert not is_free(key, lane)
        Account.objects.using(deferred).create(name=key)
    assert is_free(key, lane)


def test_the_lock_before_the_transaction_needs_no_way_out(deferred: str, key: str) -> None:
    with db_lock(key, backend=deferred):
        write_elsewhere(deferred, f"{key} 1")
        with transaction.atomic(using=deferred):
            assert Account.objects.using(deferred).count() == 1
            Account.objects.using(deferred).create(name=key)
    assert locks[deferred].holders(key) == []
