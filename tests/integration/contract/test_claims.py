"""Shared locks, permits, tree keys, and several keys of any kind: who goes with whom."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import product
from typing import Any

import pytest
from django.db import transaction
from django.db.models import F

from distlocks import Lease, LeaseLost, LockTimeout, NotSupported
from distlocks.claims import Denial, Extension, Grant, Request
from distlocks.models import Lock
from distlocks.testing import FakeClock
from tests.integration.contract.stores import (
    DATABASE_STORES,
    SHARED_STORES,
    Store,
    for_stores,
)
from tests.integration.guard.sites import Site
from tests.integration.hazards import roles
from tests.servers.children import Spawner
from tests.waiting import eventually

Start = Callable[..., Future[object]]

# How each mode is asked for on `key`, by what it asks of the tree below or above.
EXCLUSIVE: dict[str, object] = {}
SHARED: dict[str, object] = {"shared": True}
PERMIT: dict[str, object] = {"limit": 2}
MODES = {"exclusive": EXCLUSIVE, "shared": SHARED, "permit": PERMIT, "intention": EXCLUSIVE}
TOGETHER = {("shared", "shared"), ("permit", "permit"), ("intention", "intention")}


def place(key: str, mode: str, number: int) -> str | tuple[str, str]:
    """What to ask for so that there is a claim of that mode on `key`."""
    return (key, f"below {number}") if mode == "intention" else key


class TestWhoGoesWithWhom:
    @pytest.mark.parametrize(("first", "second"), list(product(MODES, MODES)))
    def test_two_on_one_key(self, store: Store, key: str, first: str, second: str) -> None:
        one = store.hold(place(key, first, 1), **MODES[first])
        lock = store.lock(place(key, second, 2), timeout=0, **MODES[second])
        if (first, second) in TOGETHER:
            other = lock.acquire()
            assert other.fencing_token > one.fencing_token or first == "intention"
            assert other.release()
        else:
            with pytest.raises(LockTimeout) as caught:
                lock.acquire()
            (holder,) = caught.value.holders
            assert (holder.key, holder.owner_id) == (key, one.owner_id)
            assert holder.mode == first
        assert one.release()
        assert store.is_free(key)
        assert lock.acquire().release()

    def test_permits_are_counted_against_the_askers_own_limit(self, store: Store, key: str) -> None:
        for _ in range(3):
            store.hold(key, limit=3)
        assert store.lock(key, limit=3, timeout=0).try_acquire() is None
        assert store.lock(key, limit=2, timeout=0).try_acquire() is None
        fourth = store.hold(key, limit=4)
        with pytest.raises(LockTimeout) as caught:
            store.lock(key, limit=4, timeout=0).acquire()
        assert len(caught.value.holders) == 4
        assert "and others" in str(caught.value)
        fourth.release()
        assert store.lock(key, limit=3, timeout=0).try_acquire() is None

    def test_a_tree_key_excludes_those_above_and_below_and_not_its_siblings(
        self, store: Store, key: str
    ) -> None:
        leaf = store.hold((key, "order:42", "line:1"))
        assert leaf.keys == ((key, "order:42", "line:1"),)
        store.hold((key, "order:42", "line:2"))
        store.hold((key, "order:43"))
        for taken in (key, (key, "order:42"), (key, "order:42", "line:1")):
            assert store.lock(taken, timeout=0).try_acquire() is None
            assert store.lock(taken, shared=True, timeout=0).try_acquire() is None

    def test_a_root_excludes_all_below(self, store: Store, key: str) -> None:
        root = store.hold((key,))
        assert root.keys == (key,)
        for below in ((key, "a"), (key, "a", "b")):
            assert store.lock(below, timeout=0).try_acquire() is None
        root.release()
        assert store.lock((key, "a", "b"), timeout=0).acquire().release()

    def test_a_denied_tree_key_leaves_no_intention(self, store: Store, key: str) -> None:
        leaf = store.hold((key, "a", "b"))
        assert store.lock((key, "a", "b"), timeout=0).try_acquire() is None
        leaf.release()
        assert store.backend.holders(key) == []

    def test_several_keys_of_a_kind_are_had_together_or_not_at_all(
        self, store: Store, key: str
    ) -> None:
        a, b, c = (f"{key}:{letter}" for letter in "abc")
        reader = store.hold(b, shared=True)
        assert store.lock(a, b, c, timeout=0).try_acquire() is None
        assert store.lock(a, b, c, limit=5, timeout=0).try_acquire() is None
        assert [holder.key for holder in store.backend.holders(key)] == [b]
        both = store.hold(a, b, c, shared=True)
        assert set(both.fencing_tokens) == {a, b, c}
        assert len(store.backend.holders(key)) == 4
        both.release()
        reader.release()
        assert store.backend.holders(key) == []

    def test_a_key_and_one_below_it(self, store: Store, key: str) -> None:
        both = store.hold(key, (key, "a"))
        assert set(both.fencing_tokens) == {key, (key, "a")}
        assert store.lock((key, "b"), timeout=0).try_acquire() is None
        both.release()
        assert store.backend.holders(key) == []


class TestLeases:
    @pytest.mark.parametrize("options", [SHARED, PERMIT])
    def test_they_are_extended_released_and_lost_like_any_other(
        self, store: Store, key: str, options: dict[str, object]
    ) -> None:
        one, other = store.hold(key, renew=False, **options), store.hold(key, **options)
        one.extend()
        assert store.backend.extend([_extension(one), _extension(other)]).lost == frozenset()
        one.release()
        assert not one.lost
        assert store.lock(key, timeout=0).try_acquire() is None
        other.release()
        assert store.lock(key, timeout=0).acquire().release()

    @for_stores(["sqlite"])
    @pytest.mark.parametrize("options", [EXCLUSIVE, SHARED, PERMIT])
    def test_in_the_callers_transaction_an_expired_claim_is_still_ours(
        self, store: Store, key: str, options: dict[str, Any]
    ) -> None:
        """The write lock has kept everybody out."""
        with transaction.atomic(using=store.using):
            lease = store.lock(key, timeout=0, **options).acquire()
            for rows in store._all_rows(key):
                rows.update(expires_at=F("expires_at") - 60_000_000)
            assert lease.backend.release(lease._grant)

    @for_stores(["postgres", "mariadb"])
    def test_an_extension_waits_for_its_turn_at_a_row_that_many_want(
        self, store: Store, key: str, start: Start
    ) -> None:
        lease = store.hold(key, limit=3, renew=False)
        with transaction.atomic(using=store.using):
            Lock.objects.using(store.using).select_for_update().get(key=key)
            # Who tries in vain does not even want it.
            full = [store.lock(key, limit=1, timeout=0).try_acquire() for _ in range(3)]
            extending = start(lease.extend)
            with pytest.raises(TimeoutError):
                extending.result(0.05)
        extending.result(20)
        assert full == [None] * 3

    def test_tokens_grow_over_grants_of_every_kind(self, store: Store, key: str) -> None:
        tokens = []
        for options in (EXCLUSIVE, SHARED, SHARED, PERMIT, EXCLUSIVE, PERMIT):
            lease = store.hold(key, **options)
            tokens.append(lease.fencing_token)
            lease.release()
        with store.lock((key, "below"), timeout=0):
            pass
        tokens.append(store.hold(key).fencing_token)
        assert tokens == sorted(set(tokens))

    @pytest.mark.parametrize("options", [SHARED, PERMIT])
    def test_a_request_sent_again_gets_the_same_grant(
        self, store: Store, key: str, options: dict[str, object]
    ) -> None:
        lock = store.lock(key, **options)
        first, again = (
            store.backend.try_acquire(request)
            for request in [store.request(key, owner_id="x", **_claims(options))] * 2
        )
        assert isinstance(first, Grant)
        assert isinstance(again, Grant)
        assert first.fencing_tokens == again.fencing_tokens
        assert len(store.backend.holders(key)) == 1
        assert store.backend.release(first)
        # The answer was lost, and the release is sent again.
        assert store.backend.release(again)
        assert lock.acquire().release()

    def test_a_minimum_hold_keeps_the_permit_taken(self, store: Store, key: str) -> None:
        store.hold(key, limit=2, min_hold=20).release()
        store.hold(key, limit=2)
        with pytest.raises(LockTimeout) as caught:
            store.lock(key, limit=2, timeout=0).acquire()
        assert [holder.cooling_down for holder in caught.value.holders] == [True, False]
        assert "cooling down" in str(caught.value)

    @pytest.mark.parametrize("count", [3, 101])
    def test_force_release_takes_it_from_all(self, store: Store, key: str, count: int) -> None:
        count = min(count, store.most_leases)
        leases = [store.hold(key, shared=True, renew=False) for _ in range(count)]
        had = store.backend.force_release(key)
        assert {holder.owner_id for holder in had} == {lease.owner_id for lease in leases}
        new = store.hold(key)
        for lease in leases:
            with pytest.raises(LeaseLost):
                lease.extend()
            assert not lease.release()
        assert new.release()

    def test_a_root_taken_by_force_is_lost_by_those_below(self, store: Store, key: str) -> None:
        leaf = store.hold((key, "a"), renew=False)
        (had,) = store.backend.force_release(key)
        assert (had.owner_id, had.mode) == (leaf.owner_id, "intention")
        with pytest.raises(LeaseLost):
            leaf.extend()

    def test_what_is_left_behind_is_swept_and_reported(self, store: Store, key: str) -> None:
        dead, live = (store.hold(key, shared=True, renew=False) for _ in range(2))
        store.expire_claims(key, dead)
        swept = [one for batch in store.sweep() for one in batch.expired if one.key == key]
        reported = [dead.owner_id] if store.reports_the_dead else []
        assert [holder.owner_id for holder in swept] == reported
        assert [h.owner_id for h in store.backend.holders(key)] == [live.owner_id]
        live.extend()

    @for_stores(SHARED_STORES)
    @pytest.mark.parametrize("options", [EXCLUSIVE, SHARED, PERMIT])
    def test_what_was_granted_to_a_cancelled_task_is_given_back(
        self, store: Store, key: str, options: dict[str, Any], stop: Callable[..., Any]
    ) -> None:
        async def work() -> None:
            granted = stop("try_acquire", after=True)
            keys = ((key, "a"), (key, "b"), f"{key}:c")
            task = asyncio.create_task(store.lock(*keys, **options).aacquire())
            await asyncio.to_thread(granted.arrived.wait, 20)
            assert len(store.aside(lambda: store.backend.holders(key))) == 4
            task.cancel()
            granted.open()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(work())
        eventually(lambda: store.backend.holders(key) == [])

    def test_the_async_twins(self, store: Store, key: str) -> None:
        async def work() -> None:
            async with store.lock(key, shared=True) as one, store.lock(key, shared=True) as two:
                assert one.owner_id != two.owner_id
                await one.aextend()
                assert await store.lock(key, timeout=0.05).atry_acquire() is None

        asyncio.run(work())
        assert store.is_free(key)


class TestFaults:
    """Cases 49 to 53 of those that people met elsewhere."""

    def test_a_dead_reader_beside_a_live_one_blocks_for_its_own_lease_only(
        self, store: Store, key: str
    ) -> None:
        dead, live = (store.hold(key, shared=True, renew=False) for _ in range(2))
        live.extend()
        store.expire_claims(key, dead)
        live.release()
        assert store.lock(key, timeout=0).acquire().release()

    def test_a_short_lease_never_shortens_anothers(self, store: Store, key: str) -> None:
        long = store.hold(key, shared=True, ttl=30, renew=False)
        short = store.hold(key, shared=True, ttl=1, renew=False)
        short.extend(1)
        short.release()
        with pytest.raises(LockTimeout) as caught:
            store.lock(key, timeout=0).acquire()
        assert caught.value.holders[0].remaining > 20
        assert long.release()

    def test_a_waiting_writer_keeps_new_readers_out_and_gets_in(
        self, store: Store, key: str, start: Start
    ) -> None:
        def newcomer_is_kept_out() -> bool:
            newcomer = store.lock(key, shared=True, timeout=0).try_acquire()
            return newcomer is None or not newcomer.release()

        reader = store.hold(key, shared=True)
        assert not newcomer_is_kept_out()
        writer = start(store.lock(key, timeout=20).acquire)
        eventually(newcomer_is_kept_out)
        assert not writer.done()
        reader.extend()
        reader.release()
        lease = writer.result(20)
        assert isinstance(lease, Lease)
        assert lease.release()
        assert store.lock(key, shared=True, timeout=0).acquire().release()

    def test_a_writer_gets_in_though_readers_keep_coming(
        self, store: Store, key: str, start: Start
    ) -> None:
        had = threading.Event()

        def read() -> None:
            while not had.is_set():
                with store.lock(key, shared=True, timeout=20):
                    had.wait(0.03)

        store.hold(key, shared=True).release()
        readers = [start(read) for _ in range(4)]
        eventually(lambda: len(store.backend.holders(key)) > 1)
        try:
            assert store.lock(key, timeout=20).acquire().release()
        finally:
            had.set()
        for reader in readers:
            reader.result(25)

    def test_a_writer_that_gives_up_lets_readers_in_again(self, store: Store, key: str) -> None:
        store.hold(key, shared=True)
        assert store.lock(key, timeout=0.1).try_acquire() is None
        assert store.lock(key, shared=True, timeout=5).acquire().release()

    def test_permits_of_crashed_holders_come_back_after_their_lease(
        self, store: Store, key: str
    ) -> None:
        crashed, live = (store.hold(key, limit=2, renew=False) for _ in range(2))
        store.expire_claims(key, crashed)
        third = store.hold(key, limit=2)
        assert store.lock(key, limit=2, timeout=0).try_acquire() is None
        assert live.release()
        assert third.release()

    def test_the_release_of_an_expired_permit_is_reported_and_frees_nothing_else(
        self, store: Store, key: str
    ) -> None:
        expired = store.hold(key, limit=1, renew=False)
        store.expire_claims(key, expired)
        holder = store.hold(key, limit=1)
        assert expired.release() is False
        assert expired.lost
        assert store.lock(key, limit=1, timeout=0).try_acquire() is None
        holder.extend()


class TestWaiting:
    @for_stores(SHARED_STORES)
    @pytest.mark.parametrize("options", [SHARED, PERMIT])
    def test_a_release_in_another_process_is_noticed_soon(
        self, store: Store, key: str, start: Start, spawn: Spawner, options: dict[str, Any]
    ) -> None:
        """Of an exclusive claim, by who waits for another kind."""
        child = spawn(roles.hold, store.alias, key)
        child.readline()
        waiter = start(store.lock(key, timeout=20, **options).acquire)
        eventually(lambda: not waiter.done())
        child.send("release")
        lease = waiter.result(20)
        assert isinstance(lease, Lease)
        released = child.readline()
        assert released == "released True"
        child.send("end")
        # Who sleeps on gets it when the sleep of 5 s is over.
        assert lease.waited < 4
        assert lease.release()

    def test_those_who_queue_behind_a_reservation_go_with_who_made_it(
        self, store: Store, key: str, start: Start
    ) -> None:
        permit = store.hold(key, limit=1)
        readers = [start(store.lock(key, shared=True, timeout=20).acquire) for _ in range(3)]
        eventually(lambda: not any(reader.done() for reader in readers))
        permit.release()
        leases = [reader.result(20) for reader in readers]
        assert all(isinstance(lease, Lease) and lease.waited < 4 for lease in leases)
        for lease in leases:
            assert isinstance(lease, Lease)
            lease.release()

    def test_a_released_permit_wakes_who_waits_for_one(
        self, store: Store, key: str, start: Start
    ) -> None:
        first, _second = store.hold(key, limit=2), store.hold(key, limit=2)
        waiter = start(store.lock(key, limit=2, timeout=20).acquire)
        eventually(lambda: not waiter.done())
        first.release()
        lease = waiter.result(5)
        assert isinstance(lease, Lease)
        assert lease.release()

    @for_stores(DATABASE_STORES)
    def test_who_is_kept_out_by_a_reservation_sleeps_until_it_ends(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its maker has died, and the key is free: nobody will tell."""
        backend: Any = store.backend
        reader = store.hold(key, shared=True)
        name = backend.prefix + key
        backend._run(lambda session: backend.dialect.several.reserve(session, name, "x", 700_000))
        reader.release()
        tries = 0
        real = backend.try_acquire

        def counted(request: Request) -> Grant | Denial:
            nonlocal tries
            tries += 1
            return real(request)

        monkeypatch.setattr(backend, "try_acquire", counted)
        lease = store.lock(key, shared=True, timeout=10).acquire()
        # It looks now and then where nobody can tell it, but does not try.
        assert tries <= 6
        assert lease.release()

    @for_stores(["memory"])
    def test_nobody_sleeps_past_the_expiry_of_a_permit(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        store.hold(key, limit=1, ttl=2, renew=False)
        assert store.lock(key, limit=1, timeout=10).acquire().waited < 2.1


@for_stores(("sqlite", "postgres", "mariadb"))
def test_guarded_transactions_of_readers_and_of_tree_keys(store: Store, key: str) -> None:
    site = Site(store.using, store.alias)
    with store.lock(key, shared=True) as reader:
        with reader.atomic(store.using):
            pass
        site.raise_guard(key, reader.fencing_token + 1)
        with pytest.raises(Exception, match="later holder"), reader.atomic(store.using):
            pass
    permit = store.hold(f"{key}:p", limit=3)
    with pytest.raises(NotSupported, match="permits"), permit.atomic(store.using):
        pass


def _claims(options: dict[str, object]) -> dict[str, object]:
    if options == SHARED:
        return {"mode": "shared"}
    return {"mode": "permit", "limit": 2} if options == PERMIT else {}


def _extension(lease: Lease) -> Extension:
    return Extension(grant=lease._grant, ttl_us=20_000_000)
