"""Several ask for a free lock at once: exactly one has it."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from distlocks import Lease
from tests.integration.contract.stores import FEWER_SHARED_STORES, Store, for_stores
from tests.integration.hazards import roles
from tests.servers.children import Spawner

RIVALS = 6


class TestNonBlockingTries:
    """Never none, and never two."""

    def test_of_threads(self, store: Store, key: str, start: Callable[..., Future[Any]]) -> None:
        lock_of = [store.lock(f"{key}:{number}", timeout=0) for number in range(20)]
        together = threading.Barrier(RIVALS)

        def rival() -> list[Lease | None]:
            leases = []
            for lock in lock_of:
                together.wait(20)
                leases.append(lock.try_acquire())
            return leases

        rivals = [start(rival) for _ in range(RIVALS)]
        for leases in zip(*(rival.result(30) for rival in rivals), strict=True):
            won = [lease for lease in leases if lease]
            assert len(won) == 1
            assert won[0].release() is True

    async def test_of_tasks(self, store: Store, key: str) -> None:
        for number in range(10):
            lock = store.lock(f"{key}:{number}", timeout=0)
            leases = await asyncio.gather(*(lock.atry_acquire() for _ in range(RIVALS)))
            won = [lease for lease in leases if lease]
            assert len(won) == 1
            assert await won[0].arelease() is True

    @for_stores(FEWER_SHARED_STORES)
    def test_of_processes(self, store: Store, key: str, spawn: Spawner) -> None:
        keys = [f"{key}:{number}" for number in range(40)]
        child = spawn(roles.try_each, store.alias, keys)
        child.expect("ready")
        child.send()
        mine = [name for name in keys if store.lock(name, timeout=0).try_acquire()]
        assert sorted(mine + child.result()) == sorted(keys)

    def test_for_an_expired_lock(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        """A take-over is a race as well."""
        for number in range(10):
            name = f"{key}:{number}"
            old = store.hold(name, renew=False)
            store.expire(name)
            together = threading.Barrier(RIVALS)

            def rival(name: str = name, together: threading.Barrier = together) -> Lease | None:
                together.wait(20)
                return store.lock(name, timeout=0).try_acquire()

            won = [one.result(20) for one in [start(rival) for _ in range(RIVALS)]]
            (lease,) = [one for one in won if one]
            assert lease.fencing_token > old.fencing_token
            assert lease.release() is True

    def test_for_a_lock_that_is_just_being_released(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        """At most one has it; whoever does is not disturbed by the release."""
        for number in range(10):
            name = f"{key}:{number}"
            old = store.hold(name)
            together = threading.Barrier(RIVALS + 1)

            def rival(name: str = name, together: threading.Barrier = together) -> Lease | None:
                together.wait(20)
                return store.lock(name, timeout=0).try_acquire()

            rivals = [start(rival) for _ in range(RIVALS)]
            together.wait(20)
            assert old.release() is True
            won = [lease for one in rivals if (lease := one.result(20))]
            assert len(won) <= 1
            assert store.owner(name) == (won[0].owner_id if won else "")
            for lease in won:
                assert lease.release() is True


class TestSeveralKeys:
    """Two that want the same keys, each having the one that the other waits for."""

    def test_in_whatever_order_they_are_named_nobody_waits_for_ever(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        a, b, c = (f"{key}:{name}" for name in "abc")
        inside: list[str] = []

        def work(*keys: str) -> None:
            lock = store.lock(*keys, timeout=30)
            for _ in range(5):
                with lock as lease:
                    inside.append(lease.owner_id)
                    assert inside == [lease.owner_id]
                    inside.remove(lease.owner_id)

        rivals = [start(work, *keys) for keys in ((a, b, c), (c, b, a), (b, a, c), (c, a, b))]
        for rival in rivals:
            rival.result(30)
        assert store.backend.holders(f"{key}:") == []

    def test_who_cannot_have_all_keeps_none_while_waiting(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        """Who waits for the second key does not keep others from the first."""
        a, b = f"{key}:a", f"{key}:b"
        holder = store.hold(b)
        waiting = start(store.lock(a, b, timeout=20).acquire)
        for _ in range(10):
            with store.lock(a, timeout=5):
                assert not waiting.done()
        assert holder.release()
        both = waiting.result(10)
        assert both.keys == (a, b)
        assert both.release()


def test_of_many_that_come_one_after_the_other_all_have_it_once(
    store: Store, key: str, start: Callable[..., Future[Any]]
) -> None:
    """Mutual exclusion: a counter that is read and written back without any other protection."""
    counter = 0
    tokens: list[int] = []

    def work() -> None:
        nonlocal counter
        for _ in range(5):
            with store.lock(key, timeout=30) as lease:
                before = counter
                tokens.append(lease.fencing_token)
                threading.Event().wait(0.0005)
                counter = before + 1

    for worker in [start(work) for _ in range(RIVALS)]:
        worker.result(50)
    assert counter == RIVALS * 5
    assert tokens == sorted(set(tokens)), "tokens grow in the order of the holds"
