"""Wake-ups that come early, late, or for somebody else."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
from django.db import connections

from distlocks import Lease, LockTimeout
from distlocks.backends.redis.mail import ThreadsMailbox
from distlocks.backends.wakeups import Ticket
from distlocks.clock import lease_now
from distlocks.testing import FakeClock
from tests.factories import now_us
from tests.integration.contract.stores import (
    DATABASE_STORES,
    KINDS_OF_SHARED_STORES,
    REDIS_STORES,
    SQLITE_STORES,
    Store,
    for_stores,
)
from tests.integration.hazards import roles
from tests.integration.hazards.proxied import Proxied
from tests.servers.children import Spawner
from tests.waiting import eventually

# Far less than a sleeper would sleep that has missed its wake-up beside a lease of 30 s.
SOON = 3.0
# In a queue, the next looks every 2.5 s whether the one before it is still there, and the key may
# be kept for that one for 0.5 s more.
SOON_IN_QUEUE = 6.0


class TestReleaseBeforeTheSleep:
    """The lock is released after the try that failed and before its asker sleeps."""

    def test_who_was_about_to_sleep_has_it_at_once(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rival = store.hold(key)
        real = store.backend.wait
        waits = []

        def wait(*args: Any) -> None:
            waits.append(args)
            rival.release()
            real(*args)

        monkeypatch.setattr(store.backend, "wait", wait)
        lease = store.lock(key, timeout=60).acquire()
        assert lease.waited < SOON
        assert len(waits) == 1
        assert lease.release()

    async def test_so_has_a_task(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rival = await store.ahold(key)
        real = store.backend.await_

        async def wait(*args: Any) -> None:
            await rival.arelease()
            await real(*args)

        monkeypatch.setattr(store.backend, "await_", wait)
        lease = await store.lock(key, timeout=60).aacquire()
        assert lease.waited < SOON
        assert await lease.arelease()

    @for_stores(KINDS_OF_SHARED_STORES)
    def test_when_another_process_releases_it_at_the_last_moment(
        self, store: Store, key: str, spawn: Spawner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its asker has taken its place among the sleepers, and is about to fall asleep."""
        child = spawn(roles.hold, store.alias, key)
        child.readline()
        target: Any = Ticket
        sleep = "wait"
        if store.alias in REDIS_STORES:
            target, sleep = ThreadsMailbox, "_read"
        real = getattr(target, sleep)
        released: list[str] = []

        def wait(*args: Any) -> Any:
            if not released:
                child.send("release")
                released.append(child.readline())
            return real(*args)

        monkeypatch.setattr(target, sleep, wait)
        lease = store.lock(key, timeout=60).acquire()
        assert released == ["released True"]
        assert lease.waited < SOON
        assert lease.release()
        child.send("end")
        child.result()


@for_stores(KINDS_OF_SHARED_STORES)
def test_a_waiter_that_is_killed_is_in_nobodys_way(store: Store, key: str, spawn: Spawner) -> None:
    """It was there first; the process that came after it is woken by the release all the same."""
    holder = store.hold(key)
    first = spawn(roles.wait, store.alias, key, timeout=60)
    second = spawn(roles.wait, store.alias, key, timeout=60)
    for child in (first, second):
        child.expect("waiting")
    first.kill()
    assert holder.release() is True
    in_queue = store.backend.supports_waiters
    soon = SOON_IN_QUEUE if in_queue else SOON
    line = second.readline(timeout=soon)
    while line == "waiting":
        line = second.readline(timeout=soon)
    assert line == f"had by {store.owner(key)}"
    second.send()
    second.result()
    # Nor for long if the key was kept for it after the other.
    eventually(lambda: store.is_free(key))


class TestAnnouncements:
    """On PostgreSQL sleepers are told; they do not look."""

    def asleep(self, store: Store, key: str) -> bool:
        """Whether somebody sleeps beside the key and trusts to be told."""
        return bool(store.row(key).waiting_until > now_us())

    @for_stores(("postgres",))
    def test_a_sleeper_of_another_process_is_told_of_the_release(
        self, store: Store, key: str, spawn: Spawner
    ) -> None:
        """Long before it would have looked by itself."""
        holder = store.hold(key)
        child = spawn(roles.wait_when_told, store.alias, key, timeout=60)
        eventually(lambda: self.asleep(store, key), within=20)
        child.send()
        child.expect("waiting")
        assert holder.release() is True
        assert child.readline(timeout=SOON) == f"had by {store.owner(key)}"
        child.send()
        child.result()

    @for_stores(("postgres",))
    def test_a_sleeper_whose_connections_break_looks_again(
        self, store: Store, key: str, proxied: Proxied, start: Callable[..., Future[Any]]
    ) -> None:
        holder = store.hold(key)
        lock = proxied.lock(key, timeout=0.05)
        eventually(lambda: lock.try_acquire() or self.asleep(store, key))
        waiting = start(proxied.lock(key, timeout=60).acquire)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        proxied.proxy.cut()
        assert holder.release() is True
        lease = waiting.result(10)
        assert lease.waited < SOON
        assert lease.release() is True

    @for_stores(("postgres",))
    def test_a_sleeper_that_cannot_be_told_looks_by_itself(
        self, store: Store, key: str, settings: Any, start: Callable[..., Future[Any]]
    ) -> None:
        entry = settings.DISTLOCKS[store.alias]
        options = {**entry["OPTIONS"], "listen": False}
        settings.DISTLOCKS = {**settings.DISTLOCKS, "deaf": {**entry, "OPTIONS": options}}
        deaf = Store("deaf")
        holder = store.hold(key)
        waiting = start(deaf.lock(key, timeout=60).acquire)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        assert holder.release() is True
        lease = waiting.result(10)
        assert lease.waited < SOON
        assert lease.release() is True
        deaf.clean_up()


class TestLostRaces:
    """Somebody else is faster than who was woken; where there is a queue, nobody is."""

    @for_stores(("memory", *DATABASE_STORES))
    def test_who_is_woken_and_comes_too_late_waits_for_the_rest_of_its_time_only(
        self, store: Store, key: str, moved_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each time that the lock is released, somebody else is faster."""
        holders = [store.hold(key)]
        began = moved_clock.now()

        def wait(denial: Any, until: float, attempt: int) -> None:
            moved_clock.advance(min(0.7, until - moved_clock.now()))
            holders[-1].release()
            holders.append(store.hold(key))

        monkeypatch.setattr(store.backend, "wait", wait)
        with pytest.raises(LockTimeout, match="within 10 s") as denied:
            store.lock(key, timeout=10).acquire()
        assert moved_clock.now() - began == pytest.approx(10)
        assert len(holders) > 10
        assert denied.value.holders[0].owner_id == holders[-1].owner_id, "who was faster last"

    @for_stores(("memory", *DATABASE_STORES))
    async def test_so_does_a_task(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        holders = [await store.ahold(key)]
        real = store.backend.await_

        async def wait(*args: Any) -> None:
            waiting = asyncio.create_task(real(*args))
            await asyncio.sleep(0.01)
            await holders[-1].arelease()
            holders.append(await store.ahold(key))
            await waiting

        monkeypatch.setattr(store.backend, "await_", wait)
        began = lease_now()
        with pytest.raises(LockTimeout):
            await store.lock(key, timeout=0.2).aacquire()
        assert 0.2 <= lease_now() - began < SOON
        assert len(holders) > 2

    def test_of_many_that_are_woken_one_has_it_and_the_others_wait_on(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        first = store.hold(key)
        waiting = [start(store.lock(key, timeout=60).acquire) for _ in range(5)]
        assert first.release() is True
        seen = set()
        for _ in waiting:
            done = eventually(lambda: [w for w in waiting if w.done() and w not in seen])
            assert len(done) == 1
            seen.update(done)
            lease: Lease = done[0].result()
            assert store.owner(key) == lease.owner_id
            assert lease.release() is True


class TestTheEndOfTheWait:
    """A wait that ends too early, too late, or without a last look."""

    def test_there_is_a_last_try_at_it(
        self, store: Store, key: str, moved_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is released while its waiter sleeps for the last time is not missed."""
        rival = store.hold(key)
        began = moved_clock.now()

        def wait(denial: Any, until: float, attempt: int) -> None:
            moved_clock.advance(until - moved_clock.now())
            if moved_clock.now() - began >= 8:
                rival.release()

        monkeypatch.setattr(store.backend, "wait", wait)
        lease = store.lock(key, timeout=8).acquire()
        assert lease.waited == pytest.approx(8)
        assert lease.release() is True

    @pytest.mark.parametrize("timeout", [0.001, 0.02, 0.1])
    def test_it_is_waited_for_however_short_it_is(
        self, store: Store, key: str, timeout: float
    ) -> None:
        store.hold(key)
        began = lease_now()
        with pytest.raises(LockTimeout):
            store.lock(key, timeout=timeout).acquire()
        assert timeout <= lease_now() - began < SOON

    def test_no_time_at_all_is_enough_for_a_free_lock(self, store: Store, key: str) -> None:
        for _ in range(5):
            assert store.lock(key, timeout=0).acquire().release() is True

    def test_without_any_time_nobody_waits(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.hold(key)

        def wait(*args: Any) -> None:
            pytest.fail("it waited")

        monkeypatch.setattr(store.backend, "wait", wait)
        with pytest.raises(LockTimeout):
            store.lock(key, timeout=0).acquire()


@for_stores(SQLITE_STORES)
class TestBusyDatabase:
    """Another writer, which has nothing to do with locks, has SQLite's one write lock."""

    def test_it_is_waited_for(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        with closing(connections[store.using].copy()) as other, other.cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            waiting = start(store.lock(key, timeout=20).acquire)
            with pytest.raises(TimeoutError):
                waiting.result(0.4)
            cursor.execute("ROLLBACK")
            assert waiting.result(10).release() is True

    def test_a_release_gets_past_it(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        lease = store.hold(key)
        with closing(connections[store.using].copy()) as other, other.cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            releasing = start(lease.release)
            with pytest.raises(TimeoutError):
                releasing.result(0.1)
            cursor.execute("ROLLBACK")
            assert releasing.result(10) is True
        assert store.is_free(key)

    def test_a_held_key_is_denied_at_once(self, store: Store, key: str) -> None:
        """To see that a key is held, nothing has to be written."""
        store.hold(key, label="nightly")
        with closing(connections[store.using].copy()) as other, other.cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            began = lease_now()
            with pytest.raises(LockTimeout, match="nightly"):
                store.lock(key, timeout=0).acquire()
            assert lease_now() - began < SOON
            cursor.execute("ROLLBACK")
