"""The store did what it was asked, and the client never heard of it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from django.db import connections

from distlocks import BackendUnavailable, LeaseLost, signals
from distlocks.backends.redis import server
from distlocks.claims import Grant
from tests.integration.contract.redis_stores import RedisStore
from tests.integration.contract.stores import Store, Told, for_stores
from tests.integration.contract.zookeeper_stores import ZooKeeperStore
from tests.integration.hazards.proxied import PROXIED_STORES, Proxied
from tests.waiting import eventually, eventually_on_loop

# Shorter than the leases of the tests, longer than all retries before.
BEFORE_EXPIRY = 3.0
TTL = 5


def was_freed(store: Store, key: str) -> bool:
    """Whether the key was given back, rather than left to expire."""
    return not store.using or store.row(key).expires_at == 0


class TestLostGrant:
    """The store has granted the lock, and its asker takes itself for a rival, or gives up."""

    @for_stores(PROXIED_STORES)
    def test_who_asks_again_finds_itself_and_not_a_rival(
        self, store: Store, proxied: Proxied, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        """The grant is executed, its answer lost, the connection breaks, the request is resent."""
        proxied.hold(key).release()
        proxied.lose_next_answer()
        asking = start(proxied.lock(key, timeout=0).acquire)
        owner = eventually(lambda: store.owner(key))
        granted = store.holder(key)
        proxied.heal()
        lease = asking.result(20)
        assert lease.owner_id == owner
        assert granted is not None
        assert lease.fencing_token == granted.fencing_token, "it was granted once"
        assert lease.release()
        assert store.is_free(key)

    @for_stores(PROXIED_STORES)
    def test_so_does_who_asks_on_an_event_loop(
        self, store: Store, proxied: Proxied, key: str
    ) -> None:
        async def ask() -> None:
            # An event loop has connections of its own.
            await (await proxied.ahold(key)).arelease()
            proxied.lose_next_answer()
            asking = asyncio.create_task(proxied.lock(key, timeout=0).aacquire())
            owner = await eventually_on_loop(lambda: store.owner(key))
            await asyncio.to_thread(proxied.heal)
            async with asyncio.timeout(20):
                lease = await asking
            assert lease.owner_id == owner
            assert await lease.arelease()

        asyncio.run(ask())
        assert store.is_free(key)

    @for_stores(PROXIED_STORES)
    def test_when_the_store_stays_away_the_grant_is_given_back_once_it_returns(
        self, store: Store, proxied: Proxied, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        """The caller has an error and no lock; nobody has to wait for the lease to expire."""
        proxied.hold(key).release()
        proxied.lose_next_answer()
        asking = start(proxied.lock(key, ttl=TTL, timeout=0).acquire)
        eventually(lambda: store.owner(key))
        proxied.proxy.mode = "reset"
        with pytest.raises(BackendUnavailable):
            asking.result(20)
        assert store.owner(key), "nobody could give it back yet"
        proxied.proxy.mode = "pass"
        eventually(lambda: store.is_free(key), within=BEFORE_EXPIRY)
        assert was_freed(store, key)

    def test_a_grant_of_which_the_client_does_not_hear_is_given_back(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = store.backend.try_acquire

        def lose(request: Any) -> Any:
            assert isinstance(real(request), Grant)
            raise BackendUnavailable("The answer was lost.")

        monkeypatch.setattr(store.backend, "try_acquire", lose)
        with pytest.raises(BackendUnavailable), store.lock(key, timeout=0):
            pytest.fail("the body ran without the lock")
        eventually(lambda: store.is_free(key))
        assert was_freed(store, key)

    def test_so_is_one_that_was_asked_for_on_an_event_loop(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = store.backend.atry_acquire

        async def lose(request: Any) -> Any:
            assert isinstance(await real(request), Grant)
            raise BackendUnavailable("The answer was lost.")

        async def ask() -> None:
            async with store.lock(key, timeout=0):
                pytest.fail("the body ran without the lock")

        monkeypatch.setattr(store.backend, "atry_acquire", lose)
        with pytest.raises(BackendUnavailable):
            asyncio.run(ask())
        eventually(lambda: store.is_free(key))
        assert was_freed(store, key)


class TestLostRelease:
    """The store has freed the lock, and a second release takes it from the next holder."""

    @for_stores(PROXIED_STORES)
    def test_sent_again_it_leaves_the_next_holder_alone(
        self, store: Store, proxied: Proxied, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        """The release is executed, its answer lost; the same process takes the key again, and only
        then does the release arrive a second time.
        """
        lease = proxied.hold(key)
        proxied.lose_next_answer()
        releasing = start(lease.release)
        eventually(lambda: store.is_free(key))
        again = store.hold(key)
        proxied.heal()
        releasing.result(20)
        assert store.owner(key) == again.owner_id
        again.extend()
        assert again.release() is True

    @for_stores(PROXIED_STORES)
    def test_sent_again_it_is_answered_like_the_first(
        self, store: Store, proxied: Proxied, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        lease = proxied.hold(key)
        proxied.lose_next_answer()
        releasing = start(lease.release)
        eventually(lambda: store.is_free(key))
        proxied.heal()
        assert releasing.result(20) is True
        assert not lease.lost

    @for_stores(PROXIED_STORES)
    def test_a_block_that_went_well_does_not_fail_for_it(
        self, store: Store, proxied: Proxied, key: str
    ) -> None:
        """The release that found no store at the block's end is made up for once it is back."""
        with proxied.lock(key, ttl=TTL, timeout=0):
            proxied.proxy.mode = "reset"
        assert store.owner(key)
        proxied.proxy.mode = "pass"
        eventually(lambda: store.is_free(key), within=BEFORE_EXPIRY)
        assert was_freed(store, key)

    @for_stores(PROXIED_STORES)
    def test_made_up_for_later_it_leaves_the_next_holder_alone(
        self, store: Store, proxied: Proxied, key: str, told: Told
    ) -> None:
        with proxied.lock(key, ttl=TTL, timeout=0) as lease:
            proxied.proxy.mode = "reset"
        store.backend.force_release(key)
        again = store.hold(key)
        proxied.proxy.mode = "pass"
        released = eventually(lambda: told.of(signals.lock_released, key), within=BEFORE_EXPIRY)
        assert [(said["owner_id"], said["ours"]) for said in released] == [(lease.owner_id, False)]
        assert store.owner(key) == again.owner_id
        assert again.release() is True


class TestFailedRelease:
    """A release fails, and the lease has forgotten what it had."""

    @for_stores(PROXIED_STORES)
    def test_the_lease_still_knows_its_owner_and_a_second_release_succeeds(
        self, store: Store, proxied: Proxied, key: str
    ) -> None:
        lease = proxied.hold(key)
        owner = lease.owner_id
        proxied.proxy.mode = "reset"
        for _ in range(2):
            with pytest.raises(BackendUnavailable):
                lease.release()
        assert not lease.lost
        assert store.owner(key) == owner == lease.owner_id
        proxied.proxy.mode = "pass"
        assert lease.release() is True
        assert store.is_free(key)

    @pytest.mark.parametrize("on_loop", [False, True], ids=["sync", "async"])
    def test_on_every_store(
        self, store: Store, key: str, on_loop: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(grant: Grant) -> bool:
            raise BackendUnavailable("The network is down.")

        async def afail(grant: Grant) -> bool:
            return fail(grant)

        def release() -> bool:
            return asyncio.run(lease.arelease()) if on_loop else lease.release()

        lease = store.hold(key)
        with monkeypatch.context() as patched:
            patched.setattr(store.backend, "release", fail)
            patched.setattr(store.backend, "arelease", afail)
            with pytest.raises(BackendUnavailable):
                release()
        assert store.owner(key) == lease.owner_id
        assert release() is True
        assert store.is_free(key)


@for_stores(PROXIED_STORES)
class TestLostExtension:
    """The store has extended the lease, and its holder does not know."""

    def test_it_is_sent_again_and_the_lease_goes_on(
        self, store: Store, proxied: Proxied, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        lease = proxied.hold(key, ttl=5, renew=False)
        lease.extend()
        proxied.lose_next_answer()
        extending = start(lease.extend, 30)
        eventually(lambda: (holder := store.holder(key)) and holder.remaining > 20)
        proxied.heal()
        extending.result(20)
        assert lease.remaining > 20
        assert not lease.lost
        assert lease.release() is True

    def test_when_the_store_stays_away_the_lease_is_what_it_was(
        self, store: Store, proxied: Proxied, key: str
    ) -> None:
        """An extension that may have come about counts for nothing, and costs nothing."""
        lease = proxied.hold(key, ttl=20, renew=False)
        deadline = lease.deadline
        proxied.proxy.mode = "reset"
        with pytest.raises(BackendUnavailable):
            lease.extend(30)
        assert lease.deadline == deadline
        assert not lease.lost
        proxied.proxy.mode = "pass"
        lease.extend(30)
        assert lease.deadline > deadline


@for_stores(PROXIED_STORES)
class TestKilledSessions:
    """The server ends all sessions: a restart, an administrator, a firewall that forgets."""

    def kill(self, store: Store) -> None:
        if isinstance(store, RedisStore):
            store.command("", "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            return

        if isinstance(store, ZooKeeperStore):
            store.break_connection()
            return

        def terminate() -> None:
            with connections[store.using].cursor() as cursor:
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )

        store.aside(terminate)

    def test_each_verb_works_on_a_new_one(self, store: Store, key: str) -> None:
        lease = store.hold(key)
        self.kill(store)
        lease.extend()
        self.kill(store)
        assert store.lock(key, timeout=0).try_acquire() is None
        self.kill(store)
        assert len(store.backend.holders(key)) == 1
        self.kill(store)
        assert lease.release() is True
        self.kill(store)
        assert store.lock(key, timeout=0).acquire().release() is True

    def test_the_lock_is_not_lost_with_them(self, store: Store, key: str) -> None:
        with store.lock(key, timeout=0) as lease:
            self.kill(store)
            assert store.owner(key) == lease.owner_id
        assert store.is_free(key)

    def test_who_waits_goes_on_waiting(
        self, store: Store, key: str, start: Callable[..., Future[Any]]
    ) -> None:
        lease = store.hold(key)
        waiting = start(store.lock(key, timeout=20).acquire)
        for _ in range(3):
            self.kill(store)
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
        assert lease.release() is True
        assert waiting.result(10).release() is True


@for_stores(PROXIED_STORES)
class TestNoStore:
    """The store is away altogether."""

    def test_nothing_runs_and_the_error_says_which_database(
        self, proxied: Proxied, key: str
    ) -> None:
        proxied.proxy.mode = "reset"
        with (
            pytest.raises(BackendUnavailable, match="'proxied'") as caught,
            proxied.lock(key, timeout=0),
        ):
            pytest.fail("the body ran without the lock")
        assert caught.value.__cause__ is not None

    def test_a_lease_from_before_lasts_until_its_deadline_and_no_longer(
        self, proxied: Proxied, key: str, moved_clock: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Requests are sent again in true time, which is not moved.
        monkeypatch.setattr(server, "FAILOVER_PATIENCE", 0.05)
        lease = proxied.hold(key, ttl=20)
        if proxied.waits_for_write:
            monkeypatch.setattr(proxied.backend.settings, "timeout", 0.05)
        proxied.proxy.mode = "reset"
        moved_clock.advance(19)
        assert not lease.lost
        moved_clock.advance(1)
        assert lease.lost
        with pytest.raises(LeaseLost):
            lease.check()
