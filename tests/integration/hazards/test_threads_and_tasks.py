"""Threads and tasks are owners of their own, and share lock objects and leases freely."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from distlocks import Lease, LeaseLost, LockTimeout
from tests.integration.contract.stores import (
    FEWER_SHARED_STORES,
    Store,
    for_stores,
)
from tests.integration.hazards import roles
from tests.servers.children import Spawner

Start = Callable[..., Future[Any]]
CROWD = 8


class TestOwners:
    """A process is not an owner, and neither is a thread or a task: each acquire is."""

    def test_threads_exclude_each_other(self, store: Store, key: str, start: Start) -> None:
        mine = store.hold(key)
        lock = store.lock(key, timeout=0)
        assert start(lock.try_acquire).result(10) is None
        assert lock.try_acquire() is None, "and a thread excludes itself"
        assert mine.release()
        theirs = start(lock.acquire).result(10)
        assert theirs.owner_id != mine.owner_id
        assert lock.try_acquire() is None
        assert theirs.release()

    async def test_tasks_exclude_each_other(self, store: Store, key: str) -> None:
        mine = await store.ahold(key)
        lock = store.lock(key, timeout=0)
        assert await asyncio.create_task(lock.atry_acquire()) is None
        assert await lock.atry_acquire() is None, "and a task excludes itself"
        assert await mine.arelease()
        theirs = await asyncio.create_task(lock.aacquire())
        assert theirs.owner_id != mine.owner_id
        assert await lock.atry_acquire() is None
        assert await theirs.arelease()

    async def test_threads_and_tasks_exclude_each_other(self, store: Store, key: str) -> None:
        lock = store.lock(key, timeout=0)
        lease = await lock.aacquire()
        assert await asyncio.to_thread(lock.try_acquire) is None
        await lease.arelease()
        lease = await asyncio.to_thread(lock.acquire)
        assert await lock.atry_acquire() is None
        await lease.arelease()


class TestHandOver:
    """A lease is a thing: who is given it can use it."""

    def test_to_another_thread(self, store: Store, key: str, start: Start) -> None:
        lease = store.hold(key, ttl=20, renew=False)
        start(lease.check).result(10)
        start(lease.extend, 30).result(10)
        assert lease.remaining > 20
        assert start(lease.release).result(10) is True
        assert store.is_free(key)
        assert lease.release() is True

    def test_from_a_thread_that_has_ended(self, store: Store, key: str) -> None:
        leases: list[Lease] = []
        thread = threading.Thread(target=lambda: leases.append(store.hold(key)))
        thread.start()
        thread.join(20)
        (lease,) = leases
        lease.extend()
        assert lease.release() is True

    async def test_to_another_task(self, store: Store, key: str) -> None:
        lease = await asyncio.create_task(store.ahold(key))
        lease.check()
        await asyncio.create_task(lease.aextend())
        assert await asyncio.create_task(lease.arelease()) is True
        assert store.is_free(key)

    async def test_between_threads_and_tasks(self, store: Store, key: str) -> None:
        lease = await store.ahold(key)
        assert await asyncio.to_thread(lease.release) is True
        lease = await asyncio.to_thread(store.hold, key)
        await lease.aextend()
        assert await lease.arelease() is True

    def test_between_event_loops(self, store: Store, key: str) -> None:
        lease = asyncio.run(store.ahold(key))
        asyncio.run(lease.aextend())
        assert asyncio.run(lease.arelease()) is True

    def test_two_threads_release_it_at_once(self, store: Store, key: str, start: Start) -> None:
        for number in range(10):
            lease = store.hold(f"{key}:{number}")
            together = threading.Barrier(2)

            def release(lease: Lease = lease, together: threading.Barrier = together) -> bool:
                together.wait(20)
                return lease.release()

            assert [one.result(10) for one in (start(release), start(release))] == [True, True]


class TestBlocks:
    """Many threads or tasks are in blocks of one lock object, and leave each its own."""

    def test_one_lock_object_serves_many_threads(
        self, store: Store, key: str, start: Start
    ) -> None:
        lock = store.lock(key, timeout=40)
        inside: list[str] = []
        owners = set()

        def work() -> None:
            for _ in range(3):
                with lock as lease:
                    inside.append(lease.owner_id)
                    owners.add(lease.owner_id)
                    assert inside == [lease.owner_id]
                    lease.check()
                    inside.clear()

        for worker in [start(work) for _ in range(CROWD)]:
            worker.result(50)
        assert len(owners) == CROWD * 3
        assert store.is_free(key)

    async def test_and_many_tasks(self, store: Store, key: str) -> None:
        lock = store.lock(key, timeout=40)
        inside: list[str] = []
        owners = set()

        async def work() -> None:
            for _ in range(3):
                async with lock as lease:
                    inside.append(lease.owner_id)
                    owners.add(lease.owner_id)
                    await asyncio.sleep(0)
                    assert inside == [lease.owner_id]
                    lease.check()
                    inside.clear()

        async with asyncio.timeout(50):
            await asyncio.gather(*(work() for _ in range(CROWD)))
        assert len(owners) == CROWD * 3
        assert store.is_free(key)

    def test_each_thread_leaves_its_own_block(self, store: Store, key: str, start: Start) -> None:
        """One has lost its lease while it was inside; another is inside of the same lock object."""
        lock = store.lock(key, timeout=0)
        entered, left = threading.Event(), threading.Event()

        def late() -> None:
            with lock:
                entered.set()
                left.wait(20)

        first = start(late)
        assert entered.wait(20)
        store.expire(key)
        with lock as lease:
            left.set()
            with pytest.raises(LeaseLost):
                first.result(20)
            lease.check()
            assert store.owner(key) == lease.owner_id
        assert not lease.lost
        assert store.is_free(key)

    async def test_each_task_leaves_its_own_block(self, store: Store, key: str) -> None:
        lock = store.lock(key, timeout=0)
        entered, left = asyncio.Event(), asyncio.Event()

        async def late() -> None:
            async with lock:
                entered.set()
                await left.wait()

        first = asyncio.create_task(late())
        async with asyncio.timeout(20):
            await entered.wait()
        store.expire(key)
        async with lock as lease:
            left.set()
            with pytest.raises(LeaseLost):
                await first
            lease.check()
            assert store.owner(key) == lease.owner_id
        assert store.is_free(key)

    def test_a_block_that_moves_to_another_thread_is_left_there(
        self, store: Store, key: str, start: Start
    ) -> None:
        """As that of a generator that somebody else finishes."""

        @contextmanager
        def locked() -> Iterator[Lease]:
            with store.lock(key, timeout=0) as lease:
                yield lease

        block = locked()
        block.__enter__()
        start(block.__exit__, None, None, None).result(10)
        assert store.is_free(key)

    def test_when_nobody_can_tell_whose_block_it_is_the_error_says_so(
        self, store: Store, key: str, start: Start
    ) -> None:
        lock = store.lock(key, timeout=0)
        leases = []
        for _ in range(2):
            leases.append(start(lock.__enter__).result(10))
            store.expire(key)
        with pytest.raises(RuntimeError, match="hand a lock over"):
            lock.__exit__(None, None, None)
        assert len({lease.owner_id for lease in leases}) == 2
        for lease in leases:
            lease.release()

    def test_what_was_never_entered_cannot_be_left(self, store: Store, key: str) -> None:
        lease = store.hold(key)
        with pytest.raises(RuntimeError):
            store.lock(key, timeout=0).__exit__(None, None, None)
        assert store.owner(key) == lease.owner_id


class TestDecoratedFunctions:
    """Calls of one decorated function must not share a lease."""

    def test_called_by_many_threads_each_call_has_its_own_lease(
        self, store: Store, key: str, start: Start
    ) -> None:
        running = 0

        @store.lock(key, timeout=40)
        def work() -> str:
            nonlocal running
            running += 1
            owner = store.owner(key)
            assert running == 1
            running -= 1
            return owner

        together = threading.Barrier(CROWD)

        def call() -> str:
            together.wait(20)
            return work()

        owners = [one.result(50) for one in [start(call) for _ in range(CROWD)]]
        assert len(set(owners)) == CROWD
        assert all(owners)
        assert store.is_free(key)

    async def test_called_by_many_tasks(self, store: Store, key: str) -> None:
        running = 0

        @store.lock(key, timeout=40)
        async def work() -> str:
            nonlocal running
            running += 1
            await asyncio.sleep(0)
            owner = store.owner(key)
            assert running == 1
            running -= 1
            return owner

        async with asyncio.timeout(50):
            owners = await asyncio.gather(*(work() for _ in range(CROWD)))
        assert len(set(owners)) == CROWD
        assert all(owners)
        assert store.is_free(key)

    def test_with_different_keys_they_run_at_once(
        self, store: Store, key: str, start: Start
    ) -> None:
        all_inside = threading.Barrier(4)

        @store.lock(key + ":{number}", timeout=0)
        def work(number: int) -> int:
            all_inside.wait(20)
            return number

        calls = [start(work, number) for number in range(4)]
        assert [call.result(20) for call in calls] == [0, 1, 2, 3]
        assert store.backend.holders(f"{key}:") == []

    def test_one_that_calls_itself_is_denied(self, store: Store, key: str) -> None:
        @store.lock(key, timeout=0)
        def work(depth: int) -> None:
            work(depth - 1)

        with pytest.raises(LockTimeout):
            work(1)
        assert store.is_free(key)


class TestMixedWorlds:
    """Sync and async code in one process must not block each other."""

    async def test_a_sync_waiter_does_not_keep_an_async_holder_from_releasing(
        self, store: Store, key: str
    ) -> None:
        """Django runs all sync code of a request in one thread: a waiter in it must not be what
        the holder needs for its release.
        """
        holder = await store.ahold(key)
        waiting = asyncio.create_task(sync_to_async(store.lock(key, timeout=30).acquire)())
        await asyncio.sleep(0.02)
        async with asyncio.timeout(10):
            assert await holder.arelease() is True
            lease = await waiting
        assert await lease.arelease() is True

    async def test_nor_do_many_waiters(self, store: Store, key: str) -> None:
        """More tasks wait than there are threads for their verbs."""
        holder = await store.ahold(key)
        lock = store.lock(key, timeout=50)

        async def pass_on() -> None:
            async with lock:
                await asyncio.sleep(0)

        waiting = [asyncio.create_task(pass_on()) for _ in range(25)]
        await asyncio.sleep(0.02)
        async with asyncio.timeout(50):
            assert await holder.arelease() is True
            await asyncio.gather(*waiting)
        assert store.is_free(key)

    def test_async_code_called_from_sync_code(self, store: Store, key: str) -> None:
        @async_to_sync
        async def work() -> str:
            async with store.lock(key, timeout=0) as lease:
                return lease.owner_id

        assert work()
        assert store.is_free(key)

    async def test_sync_code_called_from_async_code(self, store: Store, key: str) -> None:
        @sync_to_async
        def work() -> str:
            with store.lock(key, timeout=0) as lease:
                return lease.owner_id

        assert await work()
        assert store.is_free(key)


@for_stores(FEWER_SHARED_STORES)
def test_connections_are_closed_while_others_use_them(
    store: Store, key: str, spawn: Spawner
) -> None:
    """As after a change of settings: nobody hangs, and no lock is lost or had twice."""
    child = spawn(roles.close_while_used, store.alias, key)
    assert child.result(timeout=15) == {"turns": 12, "most at once": 1, "kept": True}
    assert store.is_free(key)


@for_stores(("memory", "portable_postgres"))
def test_threads_do_not_pile_up_when_settings_change(
    store: Store, key: str, spawn: Spawner
) -> None:
    """Backends are rebuilt then, in a test suite once per test: theirs must end with them."""
    assert spawn(roles.threads_after_changes, store.alias, key).result() <= 2
