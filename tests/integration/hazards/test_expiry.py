"""What is not released expires: no sooner, no later, and never not at all."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distlocks.testing import FakeClock
from tests.factories import now_us
from tests.integration.contract.stores import KINDS_OF_SHARED_STORES, Store, for_stores
from tests.integration.hazards import roles
from tests.servers.children import Spawner
from tests.waiting import eventually

SECOND = 1_000_000


@for_stores(KINDS_OF_SHARED_STORES)
class TestKilledHolder:
    """A process is killed while it holds: nobody must wait for longer than its lease."""

    def test_who_waits_has_the_key_soon_after_its_expiry(
        self, store: Store, key: str, spawn: Spawner, start: Callable[..., Future[Any]]
    ) -> None:
        """Not when the waiting would have been given up, also when the lease had been renewed."""
        a, b = f"{key}:a", f"{key}:b"
        child = spawn(roles.hold, store.alias, a, b, ttl=2)
        child.readline()
        in_thread = start(store.lock(a, timeout=60).acquire)
        on_loop = start(asyncio.run, store.lock(b, timeout=60).aacquire())
        first = store.row(a).expires_at
        eventually(lambda: store.row(a).expires_at > first)
        assert not in_thread.done()
        assert not on_loop.done()
        child.kill()
        assert store.row(a).expires_at <= now_us() + 2 * SECOND, "a renewal never makes it immortal"
        for waiter in (in_thread, on_loop):
            lease = waiter.result(10)
            assert lease.release() is True

    def test_its_minimum_hold_outlives_it(self, store: Store, key: str, spawn: Spawner) -> None:
        child = spawn(roles.hold, store.alias, key, ttl=1, min_hold=25)
        child.readline()
        first = store.row(key).expires_at
        child.kill()
        store.age(15, key)
        holder = store.holder(key)
        assert holder is not None
        assert 5 < holder.remaining <= 10
        assert first <= now_us() + 25 * SECOND
        store.age(10, key)
        assert store.hold(key)


class TestExpiredHolder:
    @for_stores(("memory", "portable_sqlite"))
    def test_who_waits_has_the_key_when_the_lease_ends_and_not_a_moment_before(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        """A holder that hangs in its work is not waited for beyond its lease; and by the time that
        the heir begins, it can have known that it is too late.
        """
        stuck = store.hold(key, ttl=1, renew=False)
        heir = start(store.lock(key, timeout=None).acquire).result(10)
        assert stuck.lost
        assert (heir.acquired_at - stuck.acquired_at).total_seconds() >= 1, "by the store's clock"
        assert heir.release()


class TestRepeatedRenewal:
    """Renewals that add up, or that make a lease immortal."""

    def test_the_time_left_never_grows_beyond_the_ttl(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        lease = store.hold(key, ttl=10)
        for _ in range(10):
            lease.extend()
            moved_clock.advance(4)
            lease.extend()
            assert lease.remaining <= 10
            holder = store.holder(key)
            assert holder is not None
            assert 0 < holder.remaining <= 10

    def test_a_renewed_lease_ends_like_any_other(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        lease = store.hold(key, ttl=10, max_hold=60)
        moved_clock.advance(59)
        assert not lease.lost
        store.age(10, key)
        assert store.is_free(key)


class TestLongWaits:
    def test_a_wait_may_be_longer_than_the_lease_that_is_asked_for(
        self, store: Store, key: str, moved_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And the lease counts from when it is had, not from when the waiting began."""
        rival = store.hold(key, ttl=30)
        began = moved_clock.now()

        def wait(denial: Any, until: float, attempt: int) -> None:
            moved_clock.advance(min(4, until - moved_clock.now()))
            if moved_clock.now() - began > 20:
                rival.release()

        monkeypatch.setattr(store.backend, "wait", wait)
        lease = store.lock(key, ttl=2, timeout=60, renew=False).acquire()
        assert lease.waited > 20
        assert 1.9 < lease.remaining <= 2
        assert lease.release() is True
