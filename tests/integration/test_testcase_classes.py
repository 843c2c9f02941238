"""Locks in Django's own test classes. pytest runs these, and so does Django's runner in a child."""

import asyncio
from typing import Any, ClassVar

import pytest
from django.conf import settings
from django.db import IntegrityError, connections, transaction
from django.test import TestCase, TransactionTestCase

from distlocks import LockTimeout, db_lock, locks
from distlocks.models import Lock
from distlocks.signals import lease_lost
from distlocks.testing import flush_events
from tests.testapp.models import Account

# There is no server where the settings name none.
HAS_POSTGRES = "postgres" in settings.DATABASES


class Locking:
    """What the test cases ask about their lock."""

    backend: ClassVar[str]
    using: ClassVar[str]

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        # One for all tests of a class: what one leaves behind, the next one would find.
        self.key = f"{type(self).__qualname__}"

    def lock(self, **options: Any) -> db_lock:
        return db_lock(self.key, **{"timeout": 0, "backend": self.backend} | options)

    def is_free(self) -> bool:
        lease = self.lock().try_acquire()
        return lease is not None and lease.release()

    def atomic(self, **options: Any) -> transaction.Atomic:
        return transaction.atomic(using=self.using, **options)

    def rows(self) -> int:
        return Lock.objects.using(self.using).filter(key=self.key).count()

    def break_transaction(self) -> None:
        twice = [Account(name=f"{self.key} twice") for _ in range(2)]
        Account.objects.using(self.using).bulk_create(twice)

    def has_transaction(self) -> bool:
        return connections[self.using].in_atomic_block


class InTestCase(Locking):
    """All inside the transaction that TestCase wraps around each test."""

    @classmethod
    def setUpTestData(cls) -> None:
        with db_lock(f"{cls.__qualname__} data", timeout=0, backend=cls.backend):
            Account.objects.using(cls.using).create(name=cls.__qualname__)

    def test_a_row_goes_with_its_test(self) -> None:
        assert self.rows() == 0
        with self.lock():
            assert self.rows() == 1
        assert self.rows() == 1

    def test_so_does_this_one(self) -> None:
        self.test_a_row_goes_with_its_test()

    def test_a_lease_that_was_never_given_back_goes_with_its_test(self) -> None:
        assert self.rows() == 0
        self.lock().acquire()
        assert not self.is_free()

    def test_so_does_this_one_too(self) -> None:
        self.test_a_lease_that_was_never_given_back_goes_with_its_test()

    def test_without_a_transaction_of_its_own_the_block_is_the_end(self) -> None:
        with self.lock() as lease:
            assert not self.is_free()
            assert locks[self.backend].holders(self.key)[0].owner_id == lease.owner_id
        assert self.is_free()
        assert not lease.lost

    def test_a_transaction_of_its_own_is_waited_for(self) -> None:
        with self.atomic():
            with self.lock() as lease:
                pass
            assert not self.is_free()
        assert self.is_free()
        assert not lease.lost

    def test_the_outermost_one_counts(self) -> None:
        with self.atomic():
            with self.atomic():
                with self.atomic(), self.lock():
                    pass
                assert not self.is_free()
            assert not self.is_free()
        assert self.is_free()

    def test_a_rollback_frees(self) -> None:
        with self.atomic():
            with self.lock():
                pass
            assert not self.is_free()
            transaction.set_rollback(True, using=self.using)
        assert self.is_free()

    def test_the_rollback_of_a_savepoint_does_not(self) -> None:
        lease = self.lock().acquire()
        with self.atomic():
            with self.atomic():
                lease.release()
                transaction.set_rollback(True, using=self.using)
            assert not self.is_free()
        assert self.is_free()

    def test_a_transaction_without_a_savepoint(self) -> None:
        with self.atomic(savepoint=False):
            with self.lock():
                pass
            assert not self.is_free()
        assert self.is_free()

    def test_a_durable_transaction(self) -> None:
        with self.atomic(durable=True):
            with self.lock():
                pass
            assert not self.is_free()
        assert self.is_free()

    def test_one_transaction_after_the_other(self) -> None:
        for _ in range(3):
            with self.atomic(), self.lock():
                pass
        assert self.is_free()

    def test_two_locks_in_one_transaction(self) -> None:
        other = db_lock(f"{self.key} 2", timeout=0, backend=self.backend)
        with self.atomic():
            with self.lock(), other:
                pass
            assert not self.is_free()
            assert other.try_acquire() is None
        assert self.is_free()
        assert other.try_acquire() is not None

    def test_captured_callbacks_are_the_users_own(self) -> None:
        ran = []
        with self.captureOnCommitCallbacks(using=self.using, execute=True) as callbacks:  # type: ignore[attr-defined]
            with self.atomic():
                transaction.on_commit(lambda: ran.append(self.is_free()), using=self.using)
                with self.lock():
                    pass
                assert not self.is_free()
            assert self.is_free()
        assert len(callbacks) == 1
        assert ran == [True]

    def test_captured_but_not_executed(self) -> None:
        with self.captureOnCommitCallbacks(using=self.using) as callbacks:  # type: ignore[attr-defined]
            with self.atomic():
                with self.lock():
                    pass
                transaction.on_commit(lambda: None, using=self.using)
            assert self.is_free()
        assert len(callbacks) == 1

    def test_a_captured_callback_may_take_the_lock_itself(self) -> None:
        def callback() -> None:
            with self.atomic(), self.lock() as lease:
                tokens.append(lease.fencing_token)

        tokens: list[int] = []
        with self.captureOnCommitCallbacks(using=self.using, execute=True), self.atomic():  # type: ignore[attr-defined]
            transaction.on_commit(callback, using=self.using)
            with self.lock() as lease:
                tokens.append(lease.fencing_token)
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 2
        assert self.is_free()

    def test_a_lock_that_cannot_be_had_leaves_the_test_going(self) -> None:
        with self.lock():
            with pytest.raises(LockTimeout, match="at once"), self.lock():
                pytest.fail("the body ran")
            Account.objects.using(self.using).create(name=f"{self.key} afterwards")

    def test_a_database_error_is_the_callers_and_frees(self) -> None:
        with pytest.raises(IntegrityError), self.atomic(), self.lock():
            self.break_transaction()
        assert self.is_free()

    def test_a_database_error_outside_of_any_transaction_of_its_own(self) -> None:
        lost: list[object] = []
        lease_lost.connect(handler := lambda **event: lost.append(event))
        try:
            with pytest.raises(IntegrityError), self.lock():
                self.break_transaction()
            flush_events()
        finally:
            lease_lost.disconnect(handler)
        # The test's transaction is broken, and its lock gone with it: no loss to cry out about.
        assert lost == []

    def test_a_lease_is_extended_by_hand(self) -> None:
        with self.lock(ttl=5) as lease:
            before = lease.deadline
            lease.extend(20)
            assert lease.deadline > before + 10
            assert locks[self.backend].holders(self.key)[0].remaining > 10

    def test_a_forced_release_is_noticed(self) -> None:
        lease = self.lock().acquire()
        assert locks[self.backend].force_release(self.key)
        assert lease.release() is False

    async def test_an_asynchronous_test_sees_the_same(self) -> None:
        async with self.lock() as lease:
            assert await self.lock().atry_acquire() is None
            await lease.aextend()
            row = await Lock.objects.using(self.using).aget(key=self.key)
            assert row.owner_id == lease.owner_id
        again = await self.lock().atry_acquire()
        assert again is not None
        assert await again.arelease() is True

    async def test_and_leaves_nothing_either(self) -> None:
        rows = Lock.objects.using(self.using).filter(key=self.key)
        assert await rows.acount() == 0
        tries = [self.lock().atry_acquire() for _ in range(5)]
        leases = await asyncio.gather(*tries)
        assert len([lease for lease in leases if lease]) == 1
        assert await rows.acount() == 1

    async def test_a_decorated_coroutine(self) -> None:
        @self.lock(on_held="skip")
        async def work() -> bool:
            return await self.lock().atry_acquire() is None

        assert await work() is True
        assert await work() is True


class InTransactionTestCase(Locking):
    """Everything is committed, as in production, and the tables are emptied after each test."""

    available_apps: ClassVar[list[str]] = [*settings.INSTALLED_APPS]

    def test_a_row_goes_with_its_test(self) -> None:
        assert not self.has_transaction()
        assert self.rows() == 0
        with self.lock():
            # Seen through the test's own connection: it is the same database.
            assert self.rows() == 1

    def test_so_does_this_one(self) -> None:
        self.test_a_row_goes_with_its_test()

    def test_the_commit_is_the_end(self) -> None:
        with self.atomic():
            with self.lock() as lease:
                pass
            assert self.rows() == 1
        assert self.is_free()
        assert not lease.lost

    def test_the_rollback_is_the_end(self) -> None:
        with self.atomic():
            with self.lock():
                pass
            transaction.set_rollback(True, using=self.using)
        assert self.is_free()

    def test_a_durable_transaction(self) -> None:
        with self.atomic(durable=True), self.lock():
            pass
        assert self.is_free()

    async def test_an_asynchronous_test(self) -> None:
        assert await Lock.objects.using(self.using).filter(key=self.key).acount() == 0
        async with self.lock():
            assert await self.lock().atry_acquire() is None
        async with self.lock():
            pass


def classes() -> dict[str, type]:
    """The classes to be run, for each way of keeping locks."""
    backends = {"sqlite": "default", "portable_sqlite": "default"}
    if HAS_POSTGRES:
        backends |= {"postgres": "postgres", "portable_postgres": "postgres"}
    found: dict[str, type] = {}
    for backend, using in backends.items():
        for cases, base in ((InTestCase, TestCase), (InTransactionTestCase, TransactionTestCase)):
            name = f"{cases.__name__}_{backend}"
            found[name] = type(
                name,
                (cases, base),
                {
                    "backend": backend,
                    "using": using,
                    "databases": {using},
                    "__module__": __name__,
                    "__qualname__": name,
                },
            )
    if HAS_POSTGRES:
        found["InTwoDatabases_TestCase"] = type(
            "InTwoDatabases_TestCase", (InTwoDatabases, TestCase), {"__module__": __name__}
        )
    return found


class InTwoDatabases(Locking):
    """A lock in one database, and transactions in both, all of them the test's."""

    databases: ClassVar[set[str]] = {"default", "postgres"}
    backend = "postgres"
    using = "default"

    def test_the_last_transaction_counts(self) -> None:
        with transaction.atomic(using="postgres"):
            with self.atomic():
                with self.lock():
                    pass
                assert not self.is_free()
            assert not self.is_free()
        assert self.is_free()

    def test_whichever_it_is(self) -> None:
        with self.atomic():
            with transaction.atomic(using="postgres"), self.lock():
                pass
            assert not self.is_free()
        assert self.is_free()


globals().update(classes())
