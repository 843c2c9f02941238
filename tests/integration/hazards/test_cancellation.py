"""A task that is cancelled while asking, waiting, extending or releasing leaves nothing behind."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from distlocks import BackendUnavailable, Lease, signals
from distlocks.claims import Grant, Waiter
from tests.integration.contract.stores import (
    DATABASE_STORES,
    FEWER_SHARED_STORES,
    REDIS_STORES,
    Gate,
    LoopGate,
    Store,
    Told,
    for_stores,
)
from tests.waiting import eventually_on_loop

# The memory store answers without an await in between.
AWAITED_STORES = FEWER_SHARED_STORES

MakeGate = Callable[..., Gate | LoopGate]


async def given_back(store: Store, key: str) -> None:
    """The key is free when the cancellation is raised, or it is soon after where a request was
    cut short that was under way on the event loop."""
    if store.alias in REDIS_STORES:
        await eventually_on_loop(lambda: store.is_free(key) and not waiters(store, key), within=3)
    assert store.is_free(key)


def waiters(store: Store, key: str) -> list[Waiter]:
    found: list[Waiter] = store.aside(lambda: store.backend.waiters(key))
    return found


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Wait for the task, which must end by its cancellation."""
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await task


class TestTaskThatAsks:
    """A task is cancelled while its request is under way: a grant that nobody knows of."""

    @for_stores(AWAITED_STORES)
    @pytest.mark.parametrize("after", [False, True], ids=["request", "answer"])
    async def test_its_grant_is_given_back(
        self, store: Store, key: str, stop: MakeGate, after: bool
    ) -> None:
        """It is cancelled with the request, or with the answer, on the way."""
        under_way = stop("try_acquire", after=after)
        task = asyncio.create_task(store.lock(key, timeout=5).aacquire())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0)
        under_way.open()
        await cancelled(task)
        await given_back(store, key)
        await (await store.ahold(key)).arelease()

    @for_stores(DATABASE_STORES)
    async def test_also_when_it_is_cancelled_twice(
        self, store: Store, key: str, stop: MakeGate
    ) -> None:
        """The second cancellation is not kept waiting for the store."""
        under_way = stop("try_acquire", after=True)
        task = asyncio.create_task(store.lock(key, timeout=5).aacquire())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()
        await cancelled(task)
        under_way.open()
        await eventually_on_loop(lambda: store.is_free(key))

    @for_stores(AWAITED_STORES)
    async def test_also_when_it_was_given_so_much_time(
        self, store: Store, key: str, stop: MakeGate
    ) -> None:
        under_way = stop("try_acquire", after=True)
        limit = asyncio.timeout(None)

        async def time_is_up() -> None:
            await eventually_on_loop(under_way.arrived.is_set)
            limit.reschedule(0)
            await asyncio.sleep(0.01)
            under_way.open()

        helper = asyncio.create_task(time_is_up())
        with pytest.raises(TimeoutError):
            async with limit:
                await store.lock(key, timeout=5).aacquire()
        await helper
        await eventually_on_loop(lambda: store.is_free(key))

    @for_stores(AWAITED_STORES)
    async def test_at_whatever_step_of_the_event_loop(self, store: Store, key: str) -> None:
        """Either it has the lease, and says so, or the store is clean."""
        for steps in range(25):
            name = f"{key}:{steps}"
            task = asyncio.create_task(store.lock(name, timeout=5).aacquire())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                lease = await task
                assert store.owner(name) == lease.owner_id
                await lease.arelease()
            await given_back(store, name)

    @for_stores(AWAITED_STORES)
    async def test_the_body_does_not_run(self, store: Store, key: str, stop: MakeGate) -> None:
        async def work() -> None:
            async with store.lock(key, timeout=5):
                pytest.fail("the body ran")

        under_way = stop("try_acquire", after=True)
        task = asyncio.create_task(work())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        under_way.open()
        await cancelled(task)
        await given_back(store, key)

    @for_stores(AWAITED_STORES)
    async def test_its_minimum_hold_is_not_kept(
        self, store: Store, key: str, stop: MakeGate
    ) -> None:
        """For work that never began."""
        under_way = stop("try_acquire", after=True)
        task = asyncio.create_task(store.lock(key, timeout=5, min_hold=20).aacquire())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        under_way.open()
        await cancelled(task)
        await given_back(store, key)


class TestTaskThatWaits:
    """A task is cancelled while it waits: it must not stay in the way, nor wake in vain."""

    @pytest.fixture
    async def waiting(self, store: Store, key: str) -> tuple[Lease, asyncio.Task[Lease]]:
        """The holder's lease, and a task that waits for it."""
        began = asyncio.Event()
        real = store.backend.await_

        async def wait(*args: Any) -> None:
            began.set()
            await real(*args)

        store.backend.await_ = wait  # type: ignore[method-assign]
        holder = await store.ahold(key)
        task = asyncio.create_task(store.lock(key, timeout=60).aacquire())
        async with asyncio.timeout(20):
            await began.wait()
        return holder, task

    async def test_it_ends_at_once_and_is_in_nobodys_way(
        self, store: Store, key: str, waiting: tuple[Lease, asyncio.Task[Lease]]
    ) -> None:
        holder, task = waiting
        task.cancel()
        await cancelled(task)
        assert store.owner(key) == holder.owner_id
        assert await holder.arelease() is True
        await asyncio.sleep(0.01)
        await given_back(store, key)

    async def test_at_whatever_step_of_the_event_loop(
        self, store: Store, key: str, waiting: tuple[Lease, asyncio.Task[Lease]]
    ) -> None:
        """The lock is released and the waiter cancelled, in either order and close together."""
        holder, first = waiting
        first.cancel()
        await cancelled(first)
        for steps in range(20):
            task = asyncio.create_task(store.lock(key, timeout=60).aacquire())
            await asyncio.sleep(0.002)
            releasing = asyncio.create_task(holder.arelease())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            assert await releasing is True
            with suppress(asyncio.CancelledError):
                await (await task).arelease()
            await given_back(store, key)
            holder = await store.ahold(key)

    async def test_others_go_on_waiting(
        self, store: Store, key: str, waiting: tuple[Lease, asyncio.Task[Lease]]
    ) -> None:
        holder, task = waiting
        other = asyncio.create_task(store.lock(key, timeout=60).aacquire())
        await asyncio.sleep(0.01)
        task.cancel()
        await cancelled(task)
        assert await holder.arelease() is True
        async with asyncio.timeout(10):
            lease = await other
        assert await lease.arelease() is True

    async def test_its_time_given_from_outside_ends_it(self, store: Store, key: str) -> None:
        holder = await store.ahold(key)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await store.lock(key, timeout=60).aacquire()
        assert store.owner(key) == holder.owner_id
        assert await holder.arelease() is True


class TestTaskThatHolds:
    """A task is cancelled while it holds, extends or releases: the lock must not stay behind."""

    @pytest.mark.parametrize("decorated", [False, True], ids=["with", "decorator"])
    async def test_its_lock_is_released(self, store: Store, key: str, decorated: bool) -> None:
        inside = asyncio.Event()

        async def stay() -> None:
            inside.set()
            await asyncio.sleep(60)

        async def work() -> None:
            async with store.lock(key, timeout=0):
                await stay()

        task = asyncio.create_task(store.lock(key, timeout=0)(stay)() if decorated else work())
        async with asyncio.timeout(20):
            await inside.wait()
        assert store.owner(key)
        task.cancel()
        await cancelled(task)
        await given_back(store, key)

    @for_stores(AWAITED_STORES)
    @pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
    async def test_a_release_under_way_goes_on_to_its_end(
        self, store: Store, key: str, stop: MakeGate, told: Told, twice: bool
    ) -> None:
        lease = await store.ahold(key)
        under_way = stop("release")
        task = asyncio.create_task(lease.arelease())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        if twice:
            task.cancel()
            await cancelled(task)
        under_way.open()
        if not twice:
            await cancelled(task)
        await eventually_on_loop(lambda: store.is_free(key))
        assert not lease.lost
        assert await asyncio.to_thread(told.of, signals.lease_lost, key) == []

    @for_stores(AWAITED_STORES)
    async def test_so_does_that_at_the_end_of_a_block(
        self, store: Store, key: str, stop: MakeGate
    ) -> None:
        under_way = stop("release")

        async def work() -> None:
            async with store.lock(key, timeout=0):
                pass

        task = asyncio.create_task(work())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        under_way.open()
        await cancelled(task)
        await eventually_on_loop(lambda: store.is_free(key))

    @for_stores(DATABASE_STORES)
    async def test_a_release_that_fails_while_it_is_cancelled_is_made_up_for(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The task is cancelled, and the store does not answer its release either."""
        real = store.backend.release
        releasing, cancelling = threading.Event(), threading.Event()

        def fail(grant: Grant) -> bool:
            monkeypatch.setattr(store.backend, "release", real)
            releasing.set()
            cancelling.wait(20)
            raise BackendUnavailable("The network is down.")

        async def work() -> None:
            async with store.lock(key, timeout=0, ttl=6):
                pass

        monkeypatch.setattr(store.backend, "release", fail)
        task = asyncio.create_task(work())
        await eventually_on_loop(releasing.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        cancelling.set()
        await cancelled(task)
        await eventually_on_loop(lambda: store.is_free(key), within=3)

    @for_stores(AWAITED_STORES)
    @pytest.mark.parametrize("after", [False, True], ids=["request", "answer"])
    async def test_an_extension_under_way_costs_nothing(
        self, store: Store, key: str, stop: MakeGate, after: bool
    ) -> None:
        """The holder still has what it had, and can release it."""
        lease = await store.ahold(key, renew=False)
        under_way = stop("extend", after=after)
        task = asyncio.create_task(lease.aextend())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0)
        under_way.open()
        await cancelled(task)
        lease.check()
        assert store.owner(key) == lease.owner_id
        assert await lease.arelease() is True
        assert store.is_free(key)
