"""Who waits stands in the server's own queue, by a session, as far as there are any."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distlocks import LockTimeout
from distlocks.backends.advisory.rows import Missed
from distlocks.claims import Denial, Grant
from distlocks.clock import lease_now
from tests.integration.advisory.conftest import Way
from tests.integration.contract.advisory_stores import AdvisoryStore
from tests.integration.hazards import roles
from tests.servers.children import Spawner
from tests.waiting import eventually, eventually_on_loop

Start = Callable[..., Future[Any]]
# Far less than a poll would take on the average of several.
AT_ONCE = 2.0


class TestQueue:
    def test_those_who_came_first_go_first(
        self, store: AdvisoryStore, key: str, start: Start
    ) -> None:
        """CASES 23: whoever asks while others wait."""
        first = store.hold(key)
        order: list[int] = []

        def wait(number: int) -> None:
            with store.lock(key, timeout=20):
                order.append(number)

        waiters = []
        for number in range(5):
            waiters.append(start(wait, number))
            store.eventually_waiting(key, number + 1)
        first.release()
        # It finds the key free, or on its way to another: that is not for it.
        store.lock(key, timeout=0).try_acquire()
        for waiter in waiters:
            waiter.result(20)
        assert order == sorted(order)

    def test_a_place_outlasts_many_sleeps(self, store: AdvisoryStore, key: str) -> None:
        """Waits are cut in slices; the one who waits does not go to the end at each."""
        grant = store.grant(key)
        early, late = store.request(key, waits=True), store.request(key, waits=True)
        for request in (early, late):
            denial = store.backend.try_acquire(request)
            assert isinstance(denial, Denial)
            assert denial.queued == request.owner_id
        store.eventually_waiting(key, 2)
        for _ in range(3):
            denial = store.backend.try_acquire(early)
            assert isinstance(denial, Denial)
            store.backend.wait(denial, lease_now() + 0.01, 1)
        assert store.backend.release(grant)
        found = eventually(lambda: self._granted(store, early))
        assert isinstance(store.backend.try_acquire(late), Denial)
        assert store.backend.release(found)
        assert store.backend.release(eventually(lambda: self._granted(store, late)))

    @staticmethod
    def _granted(store: AdvisoryStore, request: Any) -> Grant | None:
        answer = store.backend.try_acquire(request)
        return answer if isinstance(answer, Grant) else None

    def test_a_waiter_that_is_killed_holds_up_nobody(
        self, store: AdvisoryStore, key: str, spawn: Spawner, start: Start
    ) -> None:
        """CASES 22."""
        lease = store.hold(key)
        victim = spawn(roles.wait, store.alias, key, timeout=60)
        store.eventually_waiting(key, 1)
        waiter = start(store.lock(key, timeout=20).acquire)
        store.eventually_waiting(key, 2)
        victim.kill()
        lease.release()
        released = lease_now()
        assert waiter.result(10).release()
        assert lease_now() - released < AT_ONCE

    def test_a_waiter_that_is_paused_holds_up_the_next_for_a_moment(
        self, store: AdvisoryStore, key: str, spawn: Spawner, start: Start
    ) -> None:
        lease = store.hold(key)
        victim = spawn(roles.wait, store.alias, key, timeout=60)
        store.eventually_waiting(key, 1)
        waiter = start(store.lock(key, timeout=20).acquire)
        store.eventually_waiting(key, 2)
        victim.pause()
        lease.release()
        released = lease_now()
        next_one = waiter.result(10)
        assert lease_now() - released < 2 + AT_ONCE, "not until the lease of the paused one ends"
        victim.resume()
        store.eventually_waiting(key, 1)
        next_one.release()
        while not victim.readline().startswith("had by"):
            pass
        victim.send()

    def test_who_gives_up_leaves_the_queue(self, store: AdvisoryStore, key: str) -> None:
        lease = store.hold(key)
        with pytest.raises(LockTimeout):
            store.lock(key, timeout=0.1).acquire()
        store.eventually_waiting(key, 0)
        assert lease.release()
        assert store.is_free(key)
        assert not store.advisory._pool.holds()

    async def test_so_does_who_is_cancelled(self, store: AdvisoryStore, key: str) -> None:
        lease = await store.ahold(key)
        waiter = asyncio.create_task(store.lock(key, timeout=20).aacquire())
        await asyncio.to_thread(store.eventually_waiting, key, 1)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await asyncio.to_thread(store.eventually_waiting, key, 0)
        assert await lease.arelease()
        assert store.is_free(key)

    def test_a_turn_that_comes_while_giving_up_is_taken_or_passed_on(
        self, store: AdvisoryStore, key: str
    ) -> None:
        """Granted by the server, and then asked for the last time."""
        grant = store.grant(key)
        request = store.request(key, waits=True)
        assert isinstance(store.backend.try_acquire(request), Denial)
        store.eventually_waiting(key, 1)
        assert store.backend.release(grant)
        eventually(lambda: store.sessions(key))
        last = store.request(key, waits=False, owner_id=request.owner_id)
        answer = store.backend.try_acquire(last)
        assert isinstance(answer, Grant)
        assert store.backend.release(answer)
        assert store.is_free(key)

    def test_readers_go_together_behind_a_writer(
        self, store: AdvisoryStore, key: str, start: Start
    ) -> None:
        """CASES 51: a reader that comes after a waiting writer waits behind it."""
        reader = store.hold(key, shared=True)
        writer = start(store.lock(key, timeout=20).acquire)
        store.eventually_waiting(key, 1)
        assert store.lock(key, shared=True, timeout=0).try_acquire() is None
        late = start(store.lock(key, shared=True, timeout=20).acquire)
        store.eventually_waiting(key, 2)
        reader.release()
        had = writer.result(10)
        assert not late.done()
        had.release()
        assert late.result(10).release()


class TestHandOver:
    @pytest.mark.parametrize("readers", [0, 2])
    def test_whose_turn_it_is_finds_the_lease_released(
        self,
        store: AdvisoryStore,
        key: str,
        start: Start,
        monkeypatch: pytest.MonkeyPatch,
        readers: int,
    ) -> None:
        """The lock comes free in the middle of a statement that also says that it was released."""
        wire = store.advisory._wire
        real, missed = wire.take, []

        def take(*args: Any) -> Any:
            one = real(*args)
            if isinstance(one, Missed):
                missed.append(one.cools)
            return one

        monkeypatch.setattr(wire, "take", take)

        def work(shared: bool) -> None:
            for _ in range(30):
                with store.lock(key, timeout=30, shared=shared):
                    pass

        for worker in [start(work, number < readers) for number in range(4)]:
            worker.result(30)
        assert missed, "nobody was in anybody's way"
        assert not any(missed)


class TestCrowd:
    def test_it_takes_no_more_sessions_than_are_allowed(self, way: Way, key: str) -> None:
        """200 tasks wait: some in the server's queue, the others look now and then."""
        crowd = way("crowd", options={"max_sessions": 6})
        most = 0
        pool = crowd.advisory._pool

        async def work() -> None:
            nonlocal most
            async with crowd.lock(key, timeout=50):
                most = max(most, len(pool.holds()) + len(pool._free))

        async def all_of_them() -> None:
            first = await crowd.ahold(key)
            tasks = [asyncio.create_task(work()) for _ in range(200)]
            await eventually_on_loop(lambda: pool.waiting >= 3)
            await first.arelease()
            await asyncio.gather(*tasks)

        asyncio.run(all_of_them())
        assert 0 < most <= 6
        assert crowd.is_free(key)

    def test_leases_find_sessions_beside_the_waiters(
        self, way: Way, key: str, start: Start
    ) -> None:
        crowd = way("crowd", options={"max_sessions": 4})
        held = crowd.hold(key)
        waiters = [start(crowd.lock(key, timeout=20).acquire) for _ in range(8)]
        eventually(lambda: crowd.advisory._pool.waiting == 2)
        assert crowd.lock(f"{key}:other", timeout=5).acquire().release()
        held.release()
        for _ in range(8):
            done = eventually(lambda: next((one for one in waiters if one.done()), None))
            waiters.remove(done)
            assert done.result().release()
