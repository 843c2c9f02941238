"""How long a key stays taken, and what is shown of who has it."""

import json
from datetime import timedelta
from typing import Any

import pytest

from distlocks import LeaseLost, LockTimeout
from distlocks.claims import Denial, Extension, to_us
from distlocks.clock import lease_now
from distlocks.testing import FakeClock
from tests.integration.contract.stores import Store, for_stores


class TestMinHold:
    def test_the_key_stays_taken_after_the_release(self, store: Store, key: str) -> None:
        with store.lock(key, timeout=0, min_hold=20, label="nightly"):
            pass
        with pytest.raises(LockTimeout, match="is cooling down for another") as denied:
            store.lock(key, timeout=0).acquire()
        (holder,) = denied.value.holders
        assert holder.cooling_down
        assert holder.label == "nightly"
        assert 15 < holder.remaining <= 20
        store.age(20, key)
        assert store.lock(key, timeout=0).acquire().release()

    def test_also_after_an_error(self, store: Store, key: str) -> None:
        with pytest.raises(ZeroDivisionError), store.lock(key, timeout=0, min_hold=20):
            _ = 1 / 0
        holder = store.holder(key)
        assert holder is not None
        assert holder.cooling_down

    def test_it_counts_from_the_acquire(self, store: Store, key: str) -> None:
        lease = store.hold(key, min_hold=20)
        store.age(15, key)
        assert lease.release()
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining <= 5

    def test_one_that_is_over_by_the_release_means_nothing(self, store: Store, key: str) -> None:
        lease = store.hold(key, min_hold=20)
        store.age(21, key)
        lease.release()
        assert store.is_free(key)

    def test_the_release_was_of_what_was_still_ours(self, store: Store, key: str) -> None:
        lease = store.hold(key, min_hold=20)
        assert lease.release() is True
        assert not lease.lost

    def test_it_holds_against_its_own_holder_too(self, store: Store, key: str) -> None:
        lock = store.lock(key, timeout=0, min_hold=20)
        with lock:
            pass
        with pytest.raises(LockTimeout):
            lock.acquire()

    def test_it_outlives_a_shorter_lease_of_a_holder_that_died(
        self, store: Store, key: str
    ) -> None:
        store.grant(key, ttl=1, min_hold=25)
        store.age(10, key)
        denial = store.backend.try_acquire(store.request(key))
        assert isinstance(denial, Denial)
        assert 10 < denial.remaining <= 15

    def test_an_extension_does_not_cut_it_short(self, store: Store, key: str) -> None:
        grant = store.grant(key, ttl=1, min_hold=25)
        store.backend.extend([Extension(grant=grant, ttl_us=to_us(1))])
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining > 20

    def test_the_lease_itself_is_no_longer_for_it(self, store: Store, key: str) -> None:
        lease = store.hold(key, ttl=5, min_hold=25, renew=False)
        assert lease.remaining <= 5

    def test_a_waiter_has_the_key_when_it_is_over(self, store: Store, key: str) -> None:
        began = lease_now()
        with store.lock(key, timeout=0, min_hold=0.15):
            pass
        with store.lock(key, timeout=20):
            assert lease_now() - began >= 0.15

    async def test_so_has_one_on_an_event_loop(self, store: Store, key: str) -> None:
        began = lease_now()
        async with store.lock(key, timeout=0, min_hold=0.15):
            pass
        async with store.lock(key, timeout=20):
            assert lease_now() - began >= 0.15

    def test_it_holds_for_each_of_several_keys(self, store: Store, key: str) -> None:
        store.hold(f"{key}:a", f"{key}:b", min_hold=20).release()
        assert [one.cooling_down for one in store.backend.holders(f"{key}:")] == [True, True]


class TestMaxHold:
    def test_the_lease_ends_there_renewed_or_not(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        began = moved_clock.now()
        lease = store.hold(key, ttl=30, max_hold=100)
        moved_clock.advance(98)
        assert not lease.lost
        lease.check()
        assert began + 98 < lease.deadline <= began + 100
        moved_clock.advance(2)
        assert lease.lost

    def test_the_store_keeps_the_key_no_longer(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        """The last extension is for the rest, not for a whole ttl."""
        store.hold(key, ttl=30, max_hold=35)
        moved_clock.advance(34)
        holder = store.holder(key)
        # The clock of a server stands still meanwhile, that of the memory store moves along.
        assert holder is not None
        assert holder.remaining <= 25

    def test_it_bounds_the_first_lease(self, store: Store, key: str) -> None:
        lease = store.hold(key, ttl=30, max_hold=2, renew=False)
        assert lease.remaining <= 2
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining <= 2

    def test_it_bounds_extensions_by_hand(self, store: Store, key: str) -> None:
        lease = store.hold(key, ttl=2, max_hold=5, renew=False)
        lease.extend(20)
        assert 3 < lease.remaining <= 5
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining <= 5

    def test_the_block_ends_with_the_loss(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        with (
            pytest.raises(LeaseLost),
            store.lock(key, timeout=0, ttl=10, max_hold=20),
        ):
            moved_clock.advance(21)


class TestMetadata:
    VALUES = {
        "text": "café \U0001f512 'quoted' \"twice\" \\ %s {}",
        "number": 42,
        "float": 0.5,
        "large": 2**60,
        "nothing": None,
        "truth": True,
        "list": [1, "two", [3]],
        "dict": {"a": {"b": []}},
        "": "",
    }

    def test_it_comes_back_as_it_was(self, store: Store, key: str) -> None:
        store.hold(key, metadata=self.VALUES)
        holder = store.holder(key)
        assert holder is not None
        assert holder.metadata == self.VALUES

    def test_it_comes_back_as_json_has_it(self, store: Store, key: str) -> None:
        """The same on every store, also where JSON has no type of its own."""
        metadata: dict[Any, Any] = {"pair": (1, 2), 3: "three"}
        store.hold(key, metadata=metadata)
        holder = store.holder(key)
        assert holder is not None
        assert holder.metadata == json.loads(json.dumps(metadata))

    def test_what_is_done_to_the_dict_later_does_not_show(self, store: Store, key: str) -> None:
        metadata: dict[str, Any] = {"orders": [1]}
        lock = store.lock(key, timeout=0, metadata=metadata)
        metadata["orders"].append(2)
        metadata["more"] = True
        with lock:
            holder = store.holder(key)
            assert holder is not None
            assert holder.metadata == {"orders": [1]}

    def test_the_next_holders_is_the_next_holders(self, store: Store, key: str) -> None:
        store.hold(key, metadata={"run": 1}, label="first").release()
        store.hold(key)
        holder = store.holder(key)
        assert holder is not None
        assert (holder.metadata, holder.label) == ({}, "")

    @for_stores(("memory",))
    @pytest.mark.parametrize(
        ("metadata", "error"),
        [
            ({"when": timedelta(1)}, TypeError),
            ({"bytes": b""}, TypeError),
            ({"number": float("nan")}, ValueError),
            ({"text": "a\x00b"}, ValueError),
            ({"text": "a\ud800b"}, ValueError),
            ({"a\ud800b": 1}, ValueError),
            ([("a", 1)], TypeError),
        ],
        ids=["object", "bytes", "nan", "null character", "surrogate", "surrogate in key", "list"],
    )
    def test_what_no_store_can_keep_is_refused_before_the_lock_is_taken(
        self, store: Store, key: str, metadata: Any, error: type[Exception]
    ) -> None:
        with pytest.raises(error, match="metadata"):
            store.lock(key, timeout=0, metadata=metadata).acquire()
        assert store.is_free(key)


class TestLabel:
    def test_it_is_shown(self, store: Store, key: str) -> None:
        label = "café \U0001f512 %s {}" + "x" * 180
        store.hold(key, label=label)
        holder = store.holder(key)
        assert holder is not None
        assert holder.label == label
        assert label in str(holder)

    @for_stores(("memory",))
    @pytest.mark.parametrize("label", ["x" * 201, "a\nb", "a\ud800b"])
    def test_what_no_store_can_keep_is_refused(self, store: Store, key: str, label: str) -> None:
        with pytest.raises(ValueError, match="label"):
            store.lock(key, label=label)
