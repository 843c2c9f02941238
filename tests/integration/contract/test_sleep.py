"""What every store does for who waits: wait() and await_()."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distlocks.claims import Denial
from distlocks.clock import lease_now
from tests.integration.contract.stores import Store

# Far longer than any wake-up takes, far shorter than the wait would be without one.
SOON = 4.0


def denied(store: Store, key: str) -> Denial:
    denial = store.backend.try_acquire(store.request(key))
    assert isinstance(denial, Denial)
    return denial


class TestWait:
    def test_it_ends_when_its_time_is_up(self, store: Store, key: str) -> None:
        store.grant(key)
        until = lease_now() + 0.05
        store.backend.wait(denied(store, key), until, 1)
        assert lease_now() < until + SOON

    def test_it_ends_when_the_key_is_released(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        grant = store.grant(key)
        waiter = start(store.backend.wait, denied(store, key), lease_now() + 30, 1)
        store.backend.release(grant)
        waiter.result(SOON)

    def test_it_ends_when_the_key_is_freed_by_force(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        store.grant(key)
        waiter = start(store.backend.wait, denied(store, key), lease_now() + 30, 1)
        store.backend.force_release(key)
        waiter.result(SOON)

    def test_it_does_not_begin_beside_a_key_that_is_free_by_now(
        self, store: Store, key: str
    ) -> None:
        grant = store.grant(key)
        denial = denied(store, key)
        store.backend.release(grant)
        began = lease_now()
        store.backend.wait(denial, began + 30, 1)
        assert lease_now() < began + SOON

    def test_many_may_wait_beside_one_key(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        grant = store.grant(key)
        denial, until = denied(store, key), lease_now() + 30
        waiters = [start(store.backend.wait, denial, until, 1) for _ in range(8)]
        store.backend.release(grant)
        for waiter in waiters:
            waiter.result(SOON)

    def test_a_release_of_another_key_helps_nobody(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        store.grant(key)
        other = store.grant(f"{key}:other")
        waiter = start(store.lock(key, timeout=0.2).try_acquire)
        store.backend.release(other)
        assert waiter.result(SOON) is None


class TestAwait:
    async def test_it_ends_when_its_time_is_up(self, store: Store, key: str) -> None:
        await store.backend.atry_acquire(store.request(key))
        denial = await store.backend.atry_acquire(store.request(key))
        assert isinstance(denial, Denial)
        async with asyncio.timeout(SOON):
            await store.backend.await_(denial, lease_now() + 0.05, 1)

    @pytest.mark.parametrize("before", [True, False], ids=["before", "meanwhile"])
    async def test_it_ends_when_the_key_is_released(
        self, store: Store, key: str, before: bool
    ) -> None:
        grant = await store.backend.atry_acquire(store.request(key))
        assert not isinstance(grant, Denial)
        denial = await store.backend.atry_acquire(store.request(key))
        assert isinstance(denial, Denial)
        if before:
            await store.backend.arelease(grant)
        waiter = asyncio.create_task(store.backend.await_(denial, lease_now() + 30, 1))
        if not before:
            await asyncio.sleep(0.01)
            await store.backend.arelease(grant)
        async with asyncio.timeout(SOON):
            await waiter

    async def test_it_leaves_the_event_loop_to_others(self, store: Store, key: str) -> None:
        """Far more may wait than there are threads."""
        grant = await store.backend.atry_acquire(store.request(key))
        assert not isinstance(grant, Denial)
        denial = await store.backend.atry_acquire(store.request(key))
        assert isinstance(denial, Denial)
        until = lease_now() + 30
        waiters = [asyncio.create_task(store.backend.await_(denial, until, 1)) for _ in range(100)]
        await asyncio.sleep(0.01)
        async with asyncio.timeout(SOON):
            await store.backend.arelease(grant)
            await asyncio.gather(*waiters)
