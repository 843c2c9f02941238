"""What a lease does on every store."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from distlocks import Lease, LeaseLost, signals
from distlocks.clock import lease_now
from distlocks.testing import FakeClock, flush_events
from tests.integration.contract.stores import Store, Told, for_stores


class TestWhatItIs:
    def test_it_is_what_the_store_has(self, store: Store, key: str) -> None:
        lease = store.hold(key, ttl=20)
        holder = store.holder(key)
        assert holder is not None
        assert lease.owner_id == holder.owner_id
        assert lease.fencing_token == holder.fencing_token
        assert lease.fencing_tokens == {key: holder.fencing_token}
        assert lease.acquired_at == holder.since
        assert abs(lease.acquired_at - datetime.now(UTC)) < timedelta(minutes=1)
        assert lease.ttl == 20

    def test_it_ends_for_its_holder_before_it_ends_at_the_store(
        self, store: Store, key: str
    ) -> None:
        began = lease_now()
        lease = store.hold(key, ttl=20, renew=False)
        holder = store.holder(key)
        assert holder is not None
        assert lease.deadline <= began + 20
        assert lease.remaining < holder.remaining
        assert lease.remaining > 15

    def test_owner_ids_are_never_the_same(self, store: Store, key: str) -> None:
        leases = [store.hold(f"{key}:{number}") for number in range(20)]
        assert len({lease.owner_id for lease in leases}) == 20

    @for_stores(("memory",))
    @pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_it_is_not_copied(
        self, store: Store, key: str, take: Callable[[Lease], object]
    ) -> None:
        with pytest.raises(TypeError, match="cannot be pickled"):
            take(store.hold(key))


class TestRelease:
    def test_it_is_idempotent(self, store: Store, key: str, told: Told) -> None:
        lease = store.hold(key)
        assert lease.release() is True
        rival = store.hold(key)
        assert lease.release() is True, "the answer is about the first time"
        assert store.owner(key) == rival.owner_id
        assert not lease.lost
        assert [said["owner_id"] for said in told.of(signals.lock_released, key)] == [
            lease.owner_id
        ]

    async def test_so_is_its_async_twin(self, store: Store, key: str) -> None:
        lease = await store.ahold(key)
        assert await lease.arelease() is True
        rival = await store.ahold(key)
        assert await lease.arelease() is True
        assert store.owner(key) == rival.owner_id
        await rival.arelease()

    def test_of_what_was_lost_it_says_so_each_time(self, store: Store, key: str) -> None:
        lease = store.hold(key)
        store.backend.force_release(key)
        assert lease.release() is False
        assert lease.release() is False
        assert lease.lost

    def test_after_it_nothing_can_be_done(self, store: Store, key: str) -> None:
        lease = store.hold(key)
        lease.release()
        with pytest.raises(LeaseLost, match="has been released"):
            lease.check()
        with pytest.raises(LeaseLost, match="has been released"):
            lease.extend()
        assert store.is_free(key)

    def test_after_it_nothing_is_renewed(
        self, store: Store, key: str, moved_clock: FakeClock, told: Told
    ) -> None:
        lease = store.hold(key)
        lease.release()
        moved_clock.advance(120)
        assert store.is_free(key)
        assert not lease.lost
        assert told.of(signals.lease_lost, key) == []


class TestExtend:
    def test_it_replaces_the_time_left(self, store: Store, key: str) -> None:
        lease = store.hold(key, ttl=20, renew=False)
        lease.extend(5)
        assert 4 < lease.remaining <= 5
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining <= 5
        lease.extend(25)
        assert 20 < lease.remaining <= 25
        assert lease.ttl == 25

    def test_by_default_by_its_ttl(self, store: Store, key: str, moved_clock: FakeClock) -> None:
        lease = store.hold(key, ttl=20, renew=False)
        moved_clock.advance(15)
        lease.extend()
        assert 19 < lease.remaining <= 20

    def test_however_often_it_does_not_add_up(self, store: Store, key: str) -> None:
        lease = store.hold(key, ttl=5, renew=False)
        for _ in range(20):
            lease.extend()
        assert lease.remaining <= 5
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining <= 5

    async def test_its_async_twin(self, store: Store, key: str) -> None:
        lease = await store.ahold(key, ttl=20, renew=False)
        await lease.aextend(timedelta(seconds=5))
        assert 4 < lease.remaining <= 5
        await lease.arelease()
        with pytest.raises(LeaseLost):
            await lease.aextend()

    def test_of_what_was_taken_over_it_raises(self, store: Store, key: str, told: Told) -> None:
        lease = store.hold(key, renew=False)
        store.expire(key)
        rival = store.hold(key)
        with pytest.raises(LeaseLost, match="taken over") as lost:
            lease.extend()
        assert lost.value.keys == (key,)
        assert lease.lost
        assert store.owner(key) == rival.owner_id
        (said,) = told.of(signals.lease_lost, key)
        assert said["owner_id"] == lease.owner_id

    def test_a_ttl_out_of_bounds_is_refused(self, store: Store, key: str) -> None:
        lease = store.hold(key, ttl=20, renew=False)
        for ttl in (0, 0.9, 31, -5):
            with pytest.raises(ValueError, match="ttl"):
                lease.extend(ttl)
        assert lease.remaining > 15

    def test_past_its_deadline_it_is_too_late(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        """Whatever the store says: somebody may have believed it free in between."""
        lease = store.hold(key, ttl=20, renew=False)
        moved_clock.advance(20)
        with pytest.raises(LeaseLost, match="deadline"):
            lease.extend()


class TestLoss:
    def test_it_is_known_by_the_clock_alone(
        self, store: Store, key: str, moved_clock: FakeClock, told: Told
    ) -> None:
        heard: list[Lease] = []
        lease = store.hold(key, ttl=20, renew=False, on_lost=heard.append)
        moved_clock.advance(19)
        assert not lease.lost
        lease.check()
        moved_clock.advance(1)
        assert lease.lost
        assert heard == [lease]
        with pytest.raises(LeaseLost, match="deadline"):
            lease.check()
        (said,) = told.of(signals.lease_lost, key)
        assert "deadline" in said["reason"]

    def test_a_block_that_went_well_ends_with_it(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        with (
            pytest.raises(LeaseLost, match="deadline"),
            store.lock(key, ttl=20, renew=False, timeout=0),
        ):
            moved_clock.advance(21)

    @pytest.mark.parametrize("how", ["force-released", "swept", "taken over"])
    def test_a_block_learns_at_its_end_what_the_store_knows(
        self, store: Store, key: str, how: str
    ) -> None:
        with pytest.raises(LeaseLost) as lost, store.lock(key, timeout=0) as lease:
            heir = store.lose(key, how)
        assert lost.value.keys == (key,)
        assert lease.lost
        assert store.owner(key) == (heir.owner_id if heir else "")

    async def test_so_does_an_async_block(self, store: Store, key: str) -> None:
        with pytest.raises(LeaseLost):
            async with store.lock(key, timeout=0):
                store.aside(lambda: store.backend.force_release(key))

    def test_the_bodys_own_error_comes_first(self, store: Store, key: str) -> None:
        error = RuntimeError("of the body")

        def work(lease: Lease) -> None:
            store.backend.force_release(key)
            raise error

        with pytest.raises(RuntimeError) as caught, store.lock(key, timeout=0) as lease:
            work(lease)
        assert caught.value is error
        assert lease.lost

    async def test_also_on_an_event_loop(self, store: Store, key: str) -> None:
        error = RuntimeError("of the body")

        def work(lease: Lease) -> None:
            store.aside(lambda: store.backend.force_release(key))
            raise error

        with pytest.raises(RuntimeError) as caught:
            async with store.lock(key, timeout=0) as lease:
                work(lease)
        assert caught.value is error
        assert lease.lost

    def test_check_in_the_body_ends_it(self, store: Store, key: str) -> None:
        steps = []

        def work(lease: Lease) -> None:
            store.lose(key, "taken over")
            with pytest.raises(LeaseLost):
                lease.extend()
            steps.append("before")
            lease.check()
            steps.append("after")

        with pytest.raises(LeaseLost), store.lock(key, timeout=0, renew=False) as lease:
            work(lease)
        assert steps == ["before"]

    def test_it_is_told_once(
        self, store: Store, key: str, moved_clock: FakeClock, told: Told
    ) -> None:
        heard: list[Lease] = []
        lease = store.hold(key, on_lost=heard.append)
        store.backend.force_release(key)
        moved_clock.advance(60)
        lease.release()
        flush_events()
        assert heard == [lease]
        assert len(told.of(signals.lease_lost, key)) == 1

    def test_a_callback_that_fails_harms_nobody(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        def fail(lease: Lease) -> None:
            raise RuntimeError("of the callback")

        lost = store.hold(f"{key}:lost", on_lost=fail)
        kept = store.hold(f"{key}:kept")
        store.backend.force_release(f"{key}:lost")
        moved_clock.advance(60)
        assert lost.lost
        assert not kept.lost
        assert kept.release()


class TestRenewal:
    def test_a_lease_outlasts_its_ttl_many_times(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        lease = store.hold(key, ttl=10)
        for _ in range(10):
            moved_clock.advance(5)
            assert not lease.lost
            assert lease.remaining <= 10
            holder = store.holder(key)
            assert holder is not None
            assert holder.owner_id == lease.owner_id
            assert holder.remaining <= 10
        assert lease.release() is True

    def test_only_if_it_is_wished(self, store: Store, key: str, moved_clock: FakeClock) -> None:
        lease = store.hold(key, ttl=10, renew=False)
        moved_clock.advance(11)
        assert lease.lost

    def test_an_extension_by_hand_goes_on_being_renewed(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        lease = store.hold(key, ttl=10)
        lease.extend(3)
        moved_clock.advance(60)
        assert not lease.lost
        assert lease.remaining <= 3

    def test_many_leases_are_kept_at_once(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        leases = [store.hold(f"{key}:{number}", ttl=10 + number) for number in range(6)]
        moved_clock.advance(50)
        assert not any(lease.lost for lease in leases)
        assert all(lease.release() for lease in leases)

    @for_stores(("memory", "postgres"))
    def test_it_goes_on_in_real_time(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        """A body longer than the lease keeps its lock all the while."""
        with store.lock(key, ttl=3, timeout=0) as lease:
            first_deadline = lease.deadline
            rival = start(store.lock(key, timeout=3).try_acquire)
            assert rival.result(10) is None
            assert lease_now() > first_deadline
            lease.check()
        assert store.is_free(key)
