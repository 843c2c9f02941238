"""Rivals and the transactions around them: nobody gets in early, nobody hangs, nothing is lost."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connections, transaction
from django.db.transaction import TransactionManagementError

from distlocks import BackendUnavailable, LockTimeout, db_lock, locks
from distlocks.signals import lease_lost
from distlocks.testing import flush_events
from tests.integration.test_transactions_end import Lane, is_free
from tests.servers.children import Spawner
from tests.testapp.models import Account
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("databases")

# With the lock inside the transaction, where there is one writer for the whole database, and
# outside of it.
LANES = [
    Lane("postgres", "postgres"),
    Lane("portable_postgres", "postgres"),
    Lane("sqlite", "deferred"),
    Lane("sqlite", "default"),
    Lane("portable_sqlite", "default"),
]


@pytest.fixture(params=LANES, ids="-".join)
def lane(request: pytest.FixtureRequest) -> Lane:
    lane: Lane = request.param
    return lane


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4)


def in_thread(pool: ThreadPoolExecutor, work: Callable[[], object]) -> Future[object]:
    """Runs it in another thread, with connections of its own."""

    def run() -> object:
        try:
            return work()
        finally:
            connections.close_all()

    return pool.submit(run)


# Contention inside a transaction


def test_a_lock_that_cannot_be_had_leaves_the_transaction_usable(lane: Lane, key: str) -> None:
    with db_lock(key, backend=lane.backend):
        with transaction.atomic(using=lane.database):
            account = Account.objects.using(lane.database).create(name=key, balance=1)
            for _ in range(2):
                with pytest.raises(LockTimeout, match="could not be had at once") as caught:
                    db_lock(key, timeout=0, backend=lane.backend).acquire()
                assert caught.value.holders[0].key == key
            account.balance += 1
            account.save()
        assert Account.objects.using(lane.database).get(name=key).balance == 2


def test_and_the_lock_can_still_be_had_afterwards(lane: Lane, key: str) -> None:
    lock = db_lock(key, timeout=0, backend=lane.backend)
    with lock, transaction.atomic(using=lane.database):
        assert lock.try_acquire() is None
        with db_lock(f"{key} another", timeout=0, backend=lane.backend):
            Account.objects.using(lane.database).create(name=key)
    with lock:
        assert Account.objects.using(lane.database).filter(name=key).exists()


def test_several_keys_of_which_one_is_held_leave_the_transaction_usable(
    lane: Lane, key: str
) -> None:
    free, held = f"{key} 1", f"{key} 2"
    with db_lock(held, backend=lane.backend):
        with transaction.atomic(using=lane.database):
            with pytest.raises(LockTimeout):
                db_lock(free, held, timeout=0, backend=lane.backend).acquire()
            Account.objects.using(lane.database).create(name=key)
        assert Account.objects.using(lane.database).filter(name=key).exists()
        # Nothing is left of what was had for a moment.
        assert is_free(free, lane)


@pytest.mark.parametrize("lane", LANES[:3], ids="-".join)
def test_waiting_inside_a_transaction_is_possible_where_the_lock_lives_outside(
    lane: Lane, key: str, pool: ThreadPoolExecutor
) -> None:
    lease = db_lock(key, backend=lane.backend).acquire()

    def wait() -> bool:
        with (
            transaction.atomic(using=lane.database),
            db_lock(key, timeout=20, backend=lane.backend),
        ):
            return True

    waiting = in_thread(pool, wait)
    assert not waiting.done()
    lease.release()
    assert waiting.result(20) is True
    assert is_free(key, lane)


# A body that breaks its transaction


def break_transaction(lane: Lane, name: str) -> None:
    for _ in range(2):
        Account.objects.using(lane.database).create(name=name)


def test_a_database_error_in_the_body_is_what_the_caller_sees(lane: Lane, key: str) -> None:
    lost = []
    lease_lost.connect(handler := lambda **event: lost.append(event))
    try:
        with (
            pytest.raises(IntegrityError),
            transaction.atomic(using=lane.database),
            db_lock(key, backend=lane.backend),
        ):
            break_transaction(lane, key)
        assert is_free(key, lane)
        flush_events()
    finally:
        lease_lost.disconnect(handler)
    assert not Account.objects.using(lane.database).filter(name=key).exists()
    # The lock was ours to the end: nobody is to be alarmed.
    assert lost == []


def break_inside(lane: Lane, name: str) -> None:
    """Leaves a transaction that Django will only roll back."""
    with pytest.raises(IntegrityError), transaction.atomic(using=lane.database, savepoint=False):
        break_transaction(lane, name)


def test_so_it_is_when_the_error_is_caught_inside(lane: Lane, key: str) -> None:
    """The transaction is beyond repair, the block ends well, and Django refuses what comes next."""
    with transaction.atomic(using=lane.database):
        with db_lock(key, backend=lane.backend):
            break_inside(lane, key)
        with pytest.raises(TransactionManagementError):
            Account.objects.using(lane.database).count()
    assert is_free(key, lane)
    assert not Account.objects.using(lane.database).filter(name=key).exists()


@pytest.mark.parametrize("lane", LANES[:3], ids="-".join)
def test_a_broken_transaction_is_no_obstacle_to_a_lock_outside_of_it(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database):
        break_inside(lane, key)
        with db_lock(key, timeout=0, backend=lane.backend):
            assert not is_free(key, lane)
    assert is_free(key, lane)


@pytest.mark.parametrize("lane", LANES[3:], ids="-".join)
def test_inside_a_broken_transaction_no_lock_can_be_had(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database):
        break_inside(lane, key)
        with pytest.raises(BackendUnavailable, match="transaction"):
            db_lock(key, timeout=0, backend=lane.backend).acquire()
    assert is_free(key, lane)


def test_an_error_in_the_body_is_kept_when_the_release_fails_too(lane: Lane, key: str) -> None:
    @transaction.atomic(using=lane.database)
    @db_lock(key, backend=lane.backend)
    def work() -> None:
        connections[lane.database].close()
        _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        work()
    assert is_free(key, lane)


# Who fails fast


@pytest.mark.parametrize("lane", [LANES[0], LANES[3]], ids="-".join)
def test_a_try_answers_at_once_although_the_holder_has_a_transaction_open(
    lane: Lane, key: str, spawn: Spawner
) -> None:
    holder = spawn(
        """
        from django.db import transaction
        from distlocks import db_lock
        from tests.testapp.models import Account

        with transaction.atomic(using=database), db_lock(key, backend=backend, label="nightly"):
            Account.objects.using(database).create(name=key)
            print("working")
            input()
        input()
        """,
        key=key,
        backend=lane.backend,
        database=lane.database,
    )
    holder.expect("working")
    with pytest.raises(LockTimeout, match="at once") as caught:
        db_lock(key, timeout=0, backend=lane.backend).acquire()
    if lane.database == "default":
        # Its row is not to be seen yet; the writer's lock keeps the key.
        assert "locked by another writer" in str(caught.value)
    else:
        assert "(nightly)" in str(caught.value)
    # It is still there: the answer did not wait for it.
    assert holder.running
    assert not Account.objects.using(lane.database).filter(name=key).exists()
    holder.send()
    eventually(lambda: is_free(key, lane))
    assert Account.objects.using(lane.database).filter(name=key).exists()
    holder.send()
    holder.result()


# What the lock is for


@pytest.mark.parametrize("order", ["lock first", "transaction first"])
def test_no_update_is_lost(lane: Lane, key: str, order: str, pool: ThreadPoolExecutor) -> None:
    accounts = Account.objects.using(lane.database)
    accounts.create(name=key)
    lock = db_lock(key, timeout=30, backend=lane.backend)
    atomic = transaction.atomic(using=lane.database)
    start = threading.Barrier(2)

    def read_modify_write() -> None:
        account = accounts.get(name=key)
        account.balance += 1
        account.save()

    def work() -> None:
        start.wait(20)
        for _ in range(8):
            if order == "lock first":
                with lock, atomic:
                    read_modify_write()
            else:
                # Where the lock lives inside, the transaction itself has waited for its turn.
                with atomic, lock:
                    read_modify_write()

    for one in [in_thread(pool, work) for _ in range(2)]:
        one.result(40)
    assert accounts.get(name=key).balance == 16


@pytest.mark.parametrize("lane", [LANES[0], LANES[2]], ids="-".join)
def test_a_thread_that_has_just_committed_finds_its_own_lock_free(lane: Lane, key: str) -> None:
    lock = db_lock(key, timeout=0, backend=lane.backend)
    tokens = []
    for _ in range(30):
        with transaction.atomic(using=lane.database), lock as lease:
            tokens.append(lease.fencing_token)
    assert tokens == sorted(set(tokens))


async def test_so_does_a_task_after_a_thread_has_committed(key: str) -> None:
    lock = db_lock(key, timeout=0, backend="postgres")

    @sync_to_async
    def transact() -> None:
        with transaction.atomic(using="postgres"), lock:
            pass

    for _ in range(5):
        await transact()
        async with lock:
            pass
    await sync_to_async(connections.close_all)()


def test_what_the_next_holder_reads_is_what_the_last_one_committed(
    lane: Lane, key: str, pool: ThreadPoolExecutor
) -> None:
    accounts = Account.objects.using(lane.database)
    accounts.create(name=key)
    seen = []

    def work() -> None:
        for _ in range(5):
            with db_lock(key, timeout=30, backend=lane.backend) as lease:
                account = accounts.get(name=key)
                seen.append((lease.fencing_token, account.balance))
                with transaction.atomic(using=lane.database):
                    account.balance = lease.fencing_token
                    account.save()

    for one in [in_thread(pool, work) for _ in range(3)]:
        one.result(40)
    seen.sort()
    assert [balance for _, balance in seen] == [0, *(token for token, _ in seen[:-1])]


def test_holders_are_seen_from_inside_a_transaction(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database), db_lock(key, backend=lane.backend) as lease:
        (holder,) = locks[lane.backend].holders(key)
        assert (holder.key, holder.owner_id) == (key, lease.owner_id)
    assert is_free(key, lane)
