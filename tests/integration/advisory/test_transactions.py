"""Locks taken inside atomic() live in that transaction, and end with it."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connections, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from distlocks import Lease, LeaseLost, LockTimeout, StaleToken, db_lock, locks
from distlocks.clock import lease_now
from tests.integration.advisory.conftest import Way
from tests.integration.contract.advisory_stores import AdvisoryStore
from tests.testapp.models import Account
from tests.waiting import eventually

Start = Callable[..., Future[Any]]


def atomic(store: AdvisoryStore) -> Any:
    return transaction.atomic(using=store.using)


def ask(store: AdvisoryStore, sql: str) -> list[Any]:
    with connections[store.using].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall()


def is_free(store: AdvisoryStore, key: str) -> bool:
    """As somebody else finds it."""
    return store.sessions(key) == []


def cannot_be_had(store: AdvisoryStore, key: str, start: Start, **options: Any) -> bool:
    return start(store.lock(key, timeout=0, **options).try_acquire).result(10) is None


class Rollback(Exception):
    pass


@contextmanager
def rolled_back(store: AdvisoryStore) -> Iterator[None]:
    """A transaction, or a savepoint in one, that is left by an error."""
    with suppress(Rollback), atomic(store):
        yield
        raise Rollback


class TestEnd:
    @pytest.mark.parametrize("how", ["commit", "rollback"])
    def test_the_lock_ends_with_the_transaction_and_not_before(
        self, store: AdvisoryStore, key: str, start: Start, how: str
    ) -> None:
        """CASES 33, 34."""
        with atomic(store) if how == "commit" else rolled_back(store):
            with store.lock(key, timeout=0) as lease:
                ((mine,),) = ask(store, "SELECT pg_backend_pid()")
                assert store.sessions(key) == [mine]
                assert store.owner(key) == lease.owner_id
            assert cannot_be_had(store, key, start)
        assert is_free(store, key)
        assert not store.advisory._pool.holds()

    def test_no_clock_ends_it(self, store: AdvisoryStore, key: str, start: Start) -> None:
        with atomic(store):
            lease = store.lock(key, ttl=1, timeout=0).acquire()
            rival = start(store.lock(key, timeout=1.2).try_acquire)
            assert rival.result(10) is None
            lease.check()
            assert lease.remaining == float("inf")
            lease.extend()
            assert lease.release() is True

    def test_a_holder_that_asks_later_knows_that_it_is_over(
        self, store: AdvisoryStore, key: str
    ) -> None:
        with atomic(store):
            lease = store.lock(key, timeout=0).acquire()
            assert not lease.lost
        assert lease.lost
        with pytest.raises(LeaseLost, match="transaction in which it was taken has ended"):
            lease.check()
        with pytest.raises(LeaseLost):
            lease.extend()
        assert lease.release() is False

    def test_the_way_back_to_a_savepoint_ends_what_was_taken_after_it(
        self, store: AdvisoryStore, key: str, start: Start
    ) -> None:
        with atomic(store):
            outer = store.lock(f"{key}:outer", timeout=0).acquire()
            with rolled_back(store):
                inner = store.lock(f"{key}:inner", timeout=0).acquire()
            assert inner.lost
            assert inner.release() is False
            assert is_free(store, f"{key}:inner")
            assert not outer.lost
            assert cannot_be_had(store, f"{key}:outer", start)
            with atomic(store):
                kept = store.lock(f"{key}:inner", timeout=0).acquire()
            assert not kept.lost, "a savepoint that is released changes nothing"
            assert kept.fencing_token > inner.fencing_token
        assert outer.lost

    def test_a_block_around_a_savepoint_that_is_left_by_an_error(
        self, store: AdvisoryStore, key: str
    ) -> None:
        with atomic(store):
            with pytest.raises(Rollback), atomic(store), store.lock(key, timeout=0):
                raise Rollback
            assert is_free(store, key)

    def test_a_connection_that_is_killed_takes_it_along(
        self, store: AdvisoryStore, key: str
    ) -> None:
        """CASES 39: the body's own error is what its caller sees."""
        leases: list[Lease] = []

        def work() -> None:
            with atomic(store), store.lock(key, timeout=0) as lease:
                leases.append(lease)
                store.end_sessions(key)
                ask(store, "SELECT 1")

        with pytest.raises(DatabaseError, match=r"terminat|closed"):
            work()
        assert leases[0].lost
        connections[store.using].close()
        assert is_free(store, key)

    def test_force_release_ends_the_transaction(self, store: AdvisoryStore, key: str) -> None:
        def work() -> None:
            with atomic(store):
                store.lock(key, timeout=0).acquire()
                (had,) = store.aside(lambda: store.backend.force_release(key))
                assert had.key == key
                ask(store, "SELECT 1")

        with pytest.raises(DatabaseError, match=r"terminat|closed"):
            work()
        connections[store.using].close()
        assert is_free(store, key)


class TestContention:
    def test_the_transaction_is_usable_afterwards(
        self, store: AdvisoryStore, key: str, start: Start
    ) -> None:
        """CASES 35, 37: denied at once, and after a wait; no time-out is left behind."""
        rival = start(store.hold, key).result(10)
        with atomic(store):
            Account.objects.using(store.using).create(name=key)
            ask(store, "SELECT set_config('lock_timeout', '7s', true)")
            began = lease_now()
            with pytest.raises(LockTimeout):
                store.lock(key, timeout=0).acquire()
            assert lease_now() - began < 2
            with pytest.raises(LockTimeout) as caught:
                store.lock(key, timeout=0.2).acquire()
            assert [holder.owner_id for holder in caught.value.holders] == [rival.owner_id]
            assert ask(store, "SHOW lock_timeout") == [("7s",)]
            assert store.lock(f"{key}:free", timeout=0).acquire()
        assert Account.objects.using(store.using).filter(name=key).exists()

    def test_who_waits_has_it_when_it_is_released(
        self, store: AdvisoryStore, key: str, start: Start
    ) -> None:
        rival = start(store.hold, key).result(10)

        def take() -> int:
            with atomic(store):
                lease = store.lock(key, timeout=20).acquire()
                assert ask(store, "SHOW lock_timeout") == [("0",)]
                return lease.fencing_token

        waiter = start(take)
        store.eventually_waiting(key, 1)
        released = lease_now()
        rival.release()
        assert waiter.result(10) > rival.fencing_token
        assert lease_now() - released < 2

    def test_two_transactions_take_turns_and_lose_nothing(
        self, store: AdvisoryStore, key: str, start: Start
    ) -> None:
        accounts = Account.objects.using(store.using)
        accounts.create(name=key)

        def deposit() -> None:
            for _ in range(10):
                with atomic(store), store.lock(key, timeout=30):
                    account = accounts.get(name=key)
                    account.balance += 1
                    account.save(using=store.using)

        for worker in [start(deposit) for _ in range(4)]:
            worker.result(30)
        assert accounts.get(name=key).balance == 40

    def test_several_keys_are_had_together_or_not_at_all(
        self, store: AdvisoryStore, key: str, start: Start
    ) -> None:
        rival = start(store.hold, f"{key}:b").result(10)
        keys = [f"{key}:{letter}" for letter in "abc"]
        with atomic(store):
            assert store.lock(*keys, timeout=0).try_acquire() is None
            assert is_free(store, f"{key}:a")
            # Inside this transaction, it would wait for the commit.
            assert start(rival.release).result(10)
            lease = store.lock(*keys, timeout=0).acquire()
            assert all(not is_free(store, one) for one in keys)
            assert lease.release()

    def test_it_is_not_reentrant(self, store: AdvisoryStore, key: str) -> None:
        """The server would grant it to the same session again and again."""
        with atomic(store):
            lock = store.lock(key, timeout=5)
            with lock as first:
                began = lease_now()
                with pytest.raises(LockTimeout, match="not reentrant"):
                    lock.acquire()
                assert lease_now() - began < 2, "waiting could not help"
            with lock as second:
                assert second.fencing_token > first.fencing_token

    def test_a_lease_from_before_the_transaction_is_in_the_way(
        self, store: AdvisoryStore, key: str
    ) -> None:
        with store.lock(key, timeout=0), atomic(store):
            assert store.lock(key, timeout=0).try_acquire() is None

    def test_readers_together(self, store: AdvisoryStore, key: str, start: Start) -> None:
        with atomic(store):
            first = store.lock(key, shared=True, timeout=0).acquire()
            second = store.lock(key, shared=True, timeout=0).acquire()
            assert second.fencing_token > first.fencing_token
            assert store.lock(key, timeout=0).try_acquire() is None
            beside = start(store.lock(key, shared=True, timeout=0).acquire).result(10)
            assert cannot_be_had(store, key, start)
            assert beside.release()


class TestBodies:
    def test_one_that_breaks_the_transaction(self, store: AdvisoryStore, key: str) -> None:
        """CASES 36: its error is what the caller sees, and the lock is released."""
        accounts = Account.objects.using(store.using)
        accounts.create(name=key)
        with pytest.raises(IntegrityError), atomic(store), store.lock(key, timeout=0):
            accounts.create(name=key)
        assert is_free(store, key)
        with pytest.raises(IntegrityError), store.lock(key, timeout=0), atomic(store):
            accounts.create(name=key)
        assert is_free(store, key)

    def test_in_a_broken_transaction_the_lock_has_a_session_of_its_own(
        self, store: AdvisoryStore, key: str, start: Start
    ) -> None:
        accounts = Account.objects.using(store.using)
        accounts.create(name=key)
        with rolled_back(store):
            with pytest.raises(IntegrityError):
                accounts.create(name=key)
            lease = store.lock(key, timeout=0).acquire()
            assert cannot_be_had(store, key, start)
            assert lease.remaining < 60
            lease.release()
        eventually(lambda: is_free(store, key))

    def test_a_guard_inside_refuses_an_older_token(self, store: AdvisoryStore, key: str) -> None:
        with atomic(store):
            lease = store.lock(key, timeout=0).acquire()
            with lease.atomic(store.using, durable=False):
                pass
        later = store.hold(key)
        with later.atomic(store.using):
            pass
        assert later.fencing_token > lease.fencing_token
        with pytest.raises((StaleToken, LeaseLost)), lease.atomic(store.using):
            pytest.fail("an old holder came in")


class TestTokens:
    def test_what_was_rolled_back_is_not_given_twice(self, store: AdvisoryStore, key: str) -> None:
        tokens: list[int] = []
        for _ in range(3):
            with rolled_back(store):
                tokens.append(store.lock(key, timeout=0).acquire().fencing_token)
                # As if the server's clock were set back after it.
                store.set_clock_back(60, key)
        with store.lock(key, timeout=0) as lease:
            tokens.append(lease.fencing_token)
        assert tokens == sorted(set(tokens))


class TestMinHold:
    def test_it_goes_on_after_the_transaction(self, store: AdvisoryStore, key: str) -> None:
        with atomic(store), store.lock(key, timeout=0, min_hold=20):
            pass
        with pytest.raises(LockTimeout, match="cooling down"):
            store.lock(key, timeout=0).acquire()
        with atomic(store):
            with pytest.raises(LockTimeout, match="cooling down"):
                store.lock(key, timeout=0).acquire()
            assert is_free(store, key), "what cools down is given back"
        store.age(20, key)
        assert store.lock(key, timeout=0).acquire().release()


class TestChoice:
    """Where a lock that is taken inside atomic() has a session of its own."""

    def is_in_session(self, store: AdvisoryStore, key: str, lease: Lease) -> bool:
        (session,) = store.sessions(key)
        mine = [hold.session.pid for hold in store.advisory._pool.holds()]
        return session in mine and lease.owner_id == store.owner(key)

    def test_released_before_the_commit_if_that_is_wished(
        self, store: AdvisoryStore, key: str
    ) -> None:
        with atomic(store):
            with store.lock(key, timeout=0, until_commit=False) as lease:
                assert self.is_in_session(store, key, lease)
            assert is_free(store, key)

    def test_if_the_option_says_so(self, way: Way, key: str, start: Start) -> None:
        store = way("apart", options={"transactional": False})
        with atomic(store):
            with store.lock(key, timeout=0) as lease:
                assert self.is_in_session(store, key, lease)
            assert cannot_be_had(store, key, start), "released after the commit"
        eventually(lambda: is_free(store, key))

    def test_beside_a_transaction_elsewhere_that_commits_later(
        self, store: AdvisoryStore, key: str, start: Start
    ) -> None:
        with transaction.atomic(using="default"):
            with atomic(store), store.lock(key, timeout=0) as lease:
                assert self.is_in_session(store, key, lease)
            assert cannot_be_had(store, key, start)
        eventually(lambda: is_free(store, key))

    def test_with_autocommit_off(self, store: AdvisoryStore, key: str) -> None:
        """Nobody knows when the transaction ends."""
        transaction.set_autocommit(False, using=store.using)
        try:
            with atomic(store), store.lock(key, timeout=0) as lease:
                assert self.is_in_session(store, key, lease)
        finally:
            transaction.rollback(using=store.using)
            transaction.set_autocommit(True, using=store.using)

    def test_where_the_first_statement_fixes_what_is_read(
        self, way: Way, key: str, start: Start
    ) -> None:
        """The lock is had first, and what the holder before has committed is seen."""
        level = {"isolation_level": IsolationLevel.REPEATABLE_READ}
        store = way("repeatable", OPTIONS=level)
        accounts = Account.objects.using(store.using)
        accounts.create(name=key)
        rival = start(store.hold, key).result(10)

        def take() -> int:
            with atomic(store), store.lock(key, timeout=20) as lease:
                assert self.is_in_session(store, key, lease)
                return accounts.get(name=key).balance

        waiter = start(take)
        store.eventually_waiting(key, 1)
        accounts.filter(name=key).update(balance=1)
        rival.release()
        assert waiter.result(10) == 1

    def test_without_a_transaction(self, store: AdvisoryStore, key: str) -> None:
        with store.lock(key, timeout=0) as lease:
            assert self.is_in_session(store, key, lease)


def test_a_transaction_that_waits_for_two_keys_in_a_circle_comes_out_of_it(
    store: AdvisoryStore, key: str, start: Start
) -> None:
    """The server finds the circle, which only transactions with locks of their own can make; the
    one that it chooses waits on, with its transaction as usable as before."""
    a, b = f"{key}:a", f"{key}:b"

    def take(first: str, second: str) -> bool:
        with atomic(store):
            store.lock(first, timeout=5).acquire()
            deadline = time.monotonic() + 10
            while len(store.sessions(second)) < 1 and time.monotonic() < deadline:
                pass
            had = store.lock(second, timeout=2.5).try_acquire() is not None
            ask(store, "SELECT 1")
        return had

    both = [start(take, a, b), start(take, b, a)]
    found = [one.result(20) for one in both]
    assert not all(found), "neither could have both before the other ended"


@pytest.mark.django_db(databases=["default", "postgres"])
class TestInATestCase:
    """Locks have sessions there, whose end is that of the blocks inside the test."""

    def lock(self, key: str, **options: Any) -> db_lock:
        return db_lock(key, backend="advisory", **{"timeout": 0, **options})

    def test_a_block_and_a_transaction_of_its_own(self, key: str) -> None:
        with self.lock(key) as lease:
            assert self.lock(key).try_acquire() is None
        assert not lease.lost
        with transaction.atomic(using="postgres"):
            with self.lock(key):
                pass
            assert self.lock(key).try_acquire() is None
        again = self.lock(key).acquire()
        assert again.fencing_token > lease.fencing_token
        assert again.release()

    def test_no_connection_is_left_that_would_keep_the_database(self, key: str) -> None:
        with self.lock(key):
            pass
        with pytest.raises(LockTimeout), self.lock(key), self.lock(key):
            pytest.fail("the body ran")
        backend: Any = locks["advisory"]
        assert backend._pool._free == []
        assert backend.rows.channel._wrapper is None
