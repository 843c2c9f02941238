"""What db_lock does on every store: as a context manager and by hand."""

import asyncio
import os
import pickle
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from pytest_django.fixtures import Settings

from distlocks import DistlocksError, Lease, LockTimeout, db_lock, signals
from distlocks.clock import lease_now
from distlocks.testing import FakeClock
from tests.integration.contract.stores import Store, Told


class TestBlock:
    def test_the_key_is_held_in_the_block_and_free_after_it(self, store: Store, key: str) -> None:
        with store.lock(key, timeout=0) as lease:
            assert isinstance(lease, Lease)
            assert store.owner(key) == lease.owner_id
            assert lease.keys == (key,)
            assert not lease.lost
            lease.check()
        assert store.is_free(key)

    async def test_the_same_on_an_event_loop(self, store: Store, key: str) -> None:
        async with store.lock(key, timeout=0) as lease:
            assert store.owner(key) == lease.owner_id
            lease.check()
        assert store.is_free(key)

    def test_one_object_serves_again_and_again(self, store: Store, key: str) -> None:
        lock = store.lock(key, timeout=0)
        owners = set()
        for _ in range(3):
            with lock as lease:
                owners.add(lease.owner_id)
        assert len(owners) == 3

    def test_it_is_not_reentrant(self, store: Store, key: str) -> None:
        lock = store.lock(key, timeout=0)
        with lock as lease:
            with pytest.raises(LockTimeout), lock:
                pytest.fail("the body ran without the lock")
            with pytest.raises(LockTimeout), store.lock(key, timeout=0):
                pytest.fail("the body ran without the lock")
            assert store.owner(key) == lease.owner_id

    def test_different_locks_nest(self, store: Store, key: str) -> None:
        with store.lock(f"{key}:a", timeout=0), store.lock(f"{key}:b", timeout=0):
            assert len(store.backend.holders(f"{key}:")) == 2
        assert store.backend.holders(f"{key}:") == []

    def test_an_error_in_the_body_is_what_the_caller_sees(self, store: Store, key: str) -> None:
        error = RuntimeError("of the body")
        with pytest.raises(RuntimeError) as caught, store.lock(key, timeout=0):
            raise error
        assert caught.value is error
        assert store.is_free(key)

    async def test_an_error_in_an_async_body(self, store: Store, key: str) -> None:
        error = RuntimeError("of the body")
        with pytest.raises(RuntimeError) as caught:
            async with store.lock(key, timeout=0):
                raise error
        assert caught.value is error
        assert store.is_free(key)

    def test_release_within_the_block_is_allowed(self, store: Store, key: str) -> None:
        with store.lock(key, timeout=0) as lease:
            assert lease.release()
            assert store.is_free(key)

    def test_on_held_is_for_decorators(self, store: Store, key: str) -> None:
        with pytest.raises(TypeError, match="decorated"), store.lock(key, on_held="skip"):
            pytest.fail("the body ran")
        assert store.is_free(key)

    def test_a_callable_key_is_for_decorators(self, store: Store, key: str) -> None:
        with pytest.raises(TypeError, match="callable"):
            store.lock(lambda: key, timeout=0).acquire()

    def test_braces_in_a_key_are_taken_as_they_stand(self, store: Store, key: str) -> None:
        with store.lock(f"{key}:{{x}}", timeout=0) as lease:
            assert lease.keys == (f"{key}:{{x}}",)


class TestByHand:
    def test_acquire_and_release(self, store: Store, key: str) -> None:
        lease = store.lock(key, timeout=0).acquire()
        assert store.owner(key) == lease.owner_id
        assert lease.release() is True
        assert store.is_free(key)

    def test_try_acquire_answers_none(self, store: Store, key: str) -> None:
        lock = store.lock(key, timeout=0)
        lease = lock.try_acquire()
        assert lease is not None
        assert lock.try_acquire() is None
        lease.release()
        again = lock.try_acquire()
        assert again is not None
        again.release()

    async def test_the_same_on_an_event_loop(self, store: Store, key: str) -> None:
        lock = store.lock(key, timeout=0)
        lease = await lock.aacquire()
        assert await lock.atry_acquire() is None
        with pytest.raises(LockTimeout):
            await lock.aacquire()
        assert await lease.arelease() is True
        again = await lock.atry_acquire()
        assert again is not None
        await again.arelease()
        assert store.is_free(key)

    def test_durations_may_be_timedeltas(self, store: Store, key: str) -> None:
        lease = store.hold(
            key,
            ttl=timedelta(seconds=20),
            timeout=timedelta(0),
            max_hold=timedelta(seconds=10),
            min_hold=timedelta(seconds=8),
            renew=False,
        )
        assert 8 < lease.remaining <= 10
        lease.release()
        holder = store.holder(key)
        assert holder is not None
        assert 5 < holder.remaining <= 8

    def test_the_alias_says_what_is_not_said(
        self, store: Store, key: str, settings: Settings
    ) -> None:
        entry = settings.DISTLOCKS[store.alias]
        settings.DISTLOCKS = {
            **settings.DISTLOCKS,
            store.alias: {**entry, "TTL": 7, "MAX_TTL": 9, "TIMEOUT": 0},
        }
        lease = store.lock(key, renew=False).acquire()
        assert 6 < lease.remaining <= 7
        with pytest.raises(LockTimeout, match="at once"):
            store.lock(key).acquire()
        lease.release()
        with pytest.raises(ValueError, match="MAX_TTL"):
            store.lock(key, ttl=10).acquire()

    def test_a_ttl_out_of_bounds_is_refused(self, store: Store, key: str) -> None:
        for ttl in (0, 0.5, -1, 31, timedelta(minutes=1)):
            with pytest.raises(ValueError, match="ttl"):
                store.lock(key, ttl=ttl, timeout=0).acquire()
        assert store.is_free(key)

    def test_an_unknown_alias_is_a_wrong_setting(self, databases: None, key: str) -> None:
        with pytest.raises(ImproperlyConfigured, match="nowhere"):
            db_lock(key, backend="nowhere").acquire()


class TestWaiting:
    def test_a_free_key_is_had_without_waiting(self, store: Store, key: str) -> None:
        with store.lock(key, timeout=0):
            pass

    def test_who_waits_has_the_key_when_it_is_released(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        first = store.hold(key)
        waiter = start(store.lock(key, timeout=20).acquire)
        assert first.release()
        second = waiter.result(10)
        assert second.fencing_token > first.fencing_token
        assert second.release()

    async def test_the_same_on_an_event_loop(self, store: Store, key: str) -> None:
        first = await store.ahold(key)
        waiter = asyncio.create_task(store.lock(key, timeout=20).aacquire())
        await asyncio.sleep(0)
        assert await first.arelease()
        async with asyncio.timeout(10):
            second = await waiter
        assert second.fencing_token > first.fencing_token
        assert await second.arelease()

    def test_none_waits_for_ever(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        first = store.hold(key)
        waiter = start(store.lock(key, timeout=None).acquire)
        assert first.release()
        assert waiter.result(10).release()

    def test_the_wait_is_over_when_it_was_said_to_be(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        store.hold(key)
        began = moved_clock.now()
        with pytest.raises(LockTimeout, match="within 3 s"):
            store.lock(key, timeout=3).acquire()
        assert moved_clock.now() - began == pytest.approx(3)

    def test_a_short_wait_is_waited_out(self, store: Store, key: str) -> None:
        store.hold(key)
        began = lease_now()
        with pytest.raises(LockTimeout, match=r"within 0\.03 s"):
            store.lock(key, timeout=0.03).acquire()
        assert lease_now() - began >= 0.03

    def test_the_lease_says_how_long_it_has_waited(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        first = store.hold(key)
        assert 0 <= first.waited < 5
        began = lease_now()
        waiter = start(store.lock(key, timeout=20).acquire)
        first.release()
        second = waiter.result(10)
        assert 0 < second.waited <= lease_now() - began
        second.release()


class TestLockTimeout:
    @pytest.fixture
    def denied(self, store: Store, key: str) -> LockTimeout:
        store.hold(key, label="nightly export", metadata={"run": 7})
        with pytest.raises(LockTimeout) as caught:
            store.lock(key, timeout=0).acquire()
        return caught.value

    def test_it_is_a_timeout_and_one_of_ours(self, denied: LockTimeout) -> None:
        assert isinstance(denied, TimeoutError)
        assert isinstance(denied, DistlocksError)

    def test_it_says_who_has_the_key(self, denied: LockTimeout, key: str) -> None:
        assert denied.keys == (key,)
        (holder,) = denied.holders
        assert holder.key == key
        assert holder.host == socket.gethostname()[:100]
        assert holder.pid == os.getpid()
        assert holder.thread == threading.current_thread().name
        assert holder.label == "nightly export"
        assert holder.metadata == {"run": 7}
        assert 25 < holder.remaining <= 30

    def test_so_does_its_message(self, denied: LockTimeout, key: str) -> None:
        message = str(denied)
        for part in (repr(key), "at once", f"pid {os.getpid()}", "nightly export", "for another"):
            assert part in message

    def test_it_can_be_pickled(self, denied: LockTimeout) -> None:
        copy = pickle.loads(pickle.dumps(denied))
        assert type(copy) is LockTimeout
        assert str(copy) == str(denied)
        assert copy.keys == denied.keys
        assert list(map(asdict, copy.holders)) == list(map(asdict, denied.holders))

    async def test_it_names_the_task_that_has_the_key(self, store: Store, key: str) -> None:
        async def hold() -> Lease:
            return await store.ahold(key)

        lease = await asyncio.create_task(hold(), name="import of orders")
        with pytest.raises(LockTimeout, match="import of orders") as caught:
            await store.lock(key, timeout=0).aacquire()
        assert caught.value.holders[0].thread == "import of orders"
        await lease.arelease()

    def test_the_names_of_threads_are_only_shown(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        """However a thread is named, that keeps nobody from locking."""
        for number, name in enumerate(["x" * 300, "a\x00b", "a\ud800b", "a\nb"]):

            def lock_as(name: str = name, number: int = number) -> None:
                threading.current_thread().name = name
                store.lock(f"{key}:{number}", timeout=0).acquire().release()

            start(lock_as).result(10)


class TestOnARunningLoop:
    """What would block an event loop is refused, with the way out, before anything is taken."""

    async def test_acquire(self, store: Store, key: str) -> None:
        lock = store.lock(key, timeout=0)
        with pytest.raises(SynchronousOnlyOperation, match="aacquire"):
            lock.acquire()
        with pytest.raises(SynchronousOnlyOperation, match="atry_acquire"):
            lock.try_acquire()
        with pytest.raises(SynchronousOnlyOperation, match="async with"), lock:
            pytest.fail("the body ran")
        assert store.is_free(key)

    async def test_a_decorated_function(self, store: Store, key: str) -> None:
        @store.lock(key, timeout=0)
        def work() -> None:
            pytest.fail("the function ran")

        with pytest.raises(SynchronousOnlyOperation, match="async def"):
            work()
        assert store.is_free(key)

    async def test_the_verbs_of_a_lease(self, store: Store, key: str) -> None:
        lease = await store.ahold(key)
        with pytest.raises(SynchronousOnlyOperation, match="aextend"):
            lease.extend()
        with pytest.raises(SynchronousOnlyOperation, match="arelease"):
            lease.release()
        lease.check()
        assert store.owner(key) == lease.owner_id
        await lease.aextend()
        assert await lease.arelease()

    async def test_in_a_thread_it_is_allowed(self, store: Store, key: str) -> None:
        lease = await asyncio.to_thread(store.lock(key, timeout=0).acquire)
        assert await asyncio.to_thread(lease.release)


class TestSignals:
    def test_an_acquire_and_a_release_are_told(self, store: Store, key: str, told: Told) -> None:
        with store.lock(key, timeout=0, label="nightly") as lease:
            pass
        (acquired,) = told.of(signals.lock_acquired, key)
        assert acquired["sender"] is type(store.backend)
        assert (acquired["alias"], acquired["keys"]) == (store.alias, (key,))
        assert (acquired["owner_id"], acquired["label"]) == (lease.owner_id, "nightly")
        assert acquired["fencing_tokens"] == (lease.fencing_token,)
        (released,) = told.of(signals.lock_released, key)
        assert released["ours"] is True
        assert released["owner_id"] == lease.owner_id
        assert told.of(signals.lease_lost, key) == []
        assert told.of(signals.lock_denied, key) == []

    def test_a_denial_is_told(self, store: Store, key: str, told: Told) -> None:
        lease = store.hold(key)
        with pytest.raises(LockTimeout):
            store.lock(key, timeout=0, label="late").acquire()
        (denied,) = told.of(signals.lock_denied, key)
        assert (denied["alias"], denied["label"]) == (store.alias, "late")
        assert [holder.owner_id for holder in denied["holders"]] == [lease.owner_id]

    def test_a_handler_that_fails_harms_nobody(self, store: Store, key: str, told: Told) -> None:
        def fail(**arguments: Any) -> None:
            raise RuntimeError("of the handler")

        signals.lock_acquired.connect(fail)
        try:
            with store.lock(key, timeout=0):
                assert len(told.of(signals.lock_acquired, key)) == 1
        finally:
            signals.lock_acquired.disconnect(fail)
        assert store.is_free(key)
