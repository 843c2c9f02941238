"""What goes wrong in a block, before it and at its end, and what the caller gets to see."""

from collections.abc import Callable
from typing import Any

import pytest

from distlocks import BackendUnavailable, Lease, LeaseLost, LockTimeout
from distlocks.claims import Extended, Grant
from distlocks.testing import FakeClock
from tests.integration.contract.stores import Gate, Store, for_stores
from tests.waiting import eventually, eventually_on_loop

ERRORS = [RuntimeError("own"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), TimeoutError()]


class TestErrorInTheBody:
    """An error in the body that the end of the block hides, or after which the lock stays held."""

    @for_stores(("memory", "sqlite", "postgres"))
    @pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
    def test_it_is_what_the_caller_sees_and_the_lock_is_released(
        self, store: Store, key: str, error: BaseException
    ) -> None:
        with pytest.raises(type(error)) as caught, store.lock(key, timeout=0):
            raise error
        assert caught.value is error
        assert caught.value.__context__ is None
        assert store.is_free(key)

    def test_the_renewal_stops(
        self, store: Store, key: str, moved_clock: FakeClock, gate: Callable[..., Gate]
    ) -> None:
        with pytest.raises(RuntimeError), store.lock(key, timeout=0, ttl=10):
            raise RuntimeError
        extending = gate(store.backend, "extend")
        moved_clock.advance(60)
        assert not extending.arrived.is_set()
        assert store.is_free(key)

    @pytest.mark.parametrize("how", ["force-released", "taken over"])
    def test_also_when_the_lease_was_lost_meanwhile(self, store: Store, key: str, how: str) -> None:
        error = RuntimeError("own")

        def work() -> None:
            store.lose(key, how)
            raise error

        with pytest.raises(RuntimeError) as caught, store.lock(key, timeout=0) as lease:
            work()
        assert caught.value is error
        assert lease.lost

    def test_also_when_the_loss_was_known(
        self, store: Store, key: str, moved_clock: FakeClock
    ) -> None:
        error = RuntimeError("own")

        def work() -> None:
            moved_clock.advance(20)
            raise error

        lock = store.lock(key, timeout=0, ttl=10, renew=False)
        with pytest.raises(RuntimeError) as caught, lock as lease:
            work()
        assert caught.value is error
        assert lease.lost

    def test_the_loss_itself_may_be_the_error(self, store: Store, key: str) -> None:
        """What check() raises in the body is not raised twice."""

        def work(lease: Lease) -> None:
            store.lose(key, "taken over")
            lease.extend()

        with pytest.raises(LeaseLost) as caught, store.lock(key, timeout=0) as lease:
            work(lease)
        assert caught.value.__context__ is None

    def test_also_when_the_release_fails(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        error = RuntimeError("own")
        fail_once(store, monkeypatch)
        with pytest.raises(RuntimeError) as caught, store.lock(key, timeout=0, ttl=6):
            raise error
        assert caught.value is error
        eventually(lambda: store.is_free(key), within=4)

    async def test_also_on_an_event_loop(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        error = RuntimeError("own")
        fail_once(store, monkeypatch)
        with pytest.raises(RuntimeError) as caught:
            async with store.lock(key, timeout=0, ttl=6):
                raise error
        assert caught.value is error
        await eventually_on_loop(lambda: store.is_free(key), within=4)

    def test_a_denial_in_the_body_is_the_bodys(self, store: Store, key: str) -> None:
        store.hold(f"{key}:other")
        with pytest.raises(LockTimeout, match="other"), store.lock(key, timeout=0):
            store.lock(f"{key}:other", timeout=0).acquire()
        assert store.is_free(key)


class TestReleaseThatFails:
    """A release that fails makes finished work look failed, or leaves the lock behind for ever."""

    def test_does_not_fail_a_block_that_went_well(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its work is done; the lock is given back as soon as that is possible."""
        fail_once(store, monkeypatch)
        with store.lock(key, timeout=0, ttl=6):
            pass
        eventually(lambda: store.is_free(key), within=4)

    def test_leaves_no_renewal_behind(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch, moved_clock: FakeClock
    ) -> None:
        """A store that takes extensions but no releases keeps the lock for one lease."""

        def fail(grant: Grant) -> bool:
            raise BackendUnavailable("The network is down.")

        extended: list[Any] = []
        real = store.backend.extend

        def extend(extensions: Any) -> Extended:
            extended.extend(extensions)
            return real(extensions)

        with monkeypatch.context() as patched:
            patched.setattr(store.backend, "release", fail)
            with store.lock(key, timeout=0, ttl=10):
                pass
            patched.setattr(store.backend, "extend", extend)
            moved_clock.advance(60)
        assert extended == []


def fail_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next release fail without reaching the store."""
    real = store.backend.release

    def fail(grant: Grant) -> bool:
        monkeypatch.setattr(store.backend, "release", real)
        raise BackendUnavailable("The network is down.")

    monkeypatch.setattr(store.backend, "release", fail)


class TestWithoutTheLock:
    """The body never runs."""

    def test_when_it_is_held(self, store: Store, key: str) -> None:
        store.hold(key)
        for timeout in (0, 0.01):
            with pytest.raises(LockTimeout), store.lock(key, timeout=timeout):
                pytest.fail("the body ran")

    async def test_when_it_is_held_on_an_event_loop(self, store: Store, key: str) -> None:
        await store.ahold(key)
        for timeout in (0, 0.01):
            with pytest.raises(LockTimeout):
                async with store.lock(key, timeout=timeout):
                    pytest.fail("the body ran")

    def test_when_the_store_cannot_be_asked(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(request: Any) -> Any:
            raise BackendUnavailable("The network is down.")

        monkeypatch.setattr(store.backend, "try_acquire", fail)
        with pytest.raises(BackendUnavailable), store.lock(key, timeout=5):
            pytest.fail("the body ran")

    @pytest.mark.parametrize("on_held", ["raise", "skip", lambda timeout: None])
    def test_of_a_decorated_function_when_the_store_cannot_be_asked(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch, on_held: Any
    ) -> None:
        """Not to know is not to be denied: it is not skipped, it fails."""

        def fail(request: Any) -> Any:
            raise BackendUnavailable("The network is down.")

        @store.lock(key, timeout=5, on_held=on_held)
        def work() -> None:
            pytest.fail("the function ran")

        monkeypatch.setattr(store.backend, "try_acquire", fail)
        with pytest.raises(BackendUnavailable):
            work()

    def test_when_the_store_fails_while_it_is_waited_for(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: Any) -> None:
            raise BackendUnavailable("The network is down.")

        holder = store.hold(key)
        monkeypatch.setattr(store.backend, "wait", fail)
        with pytest.raises(BackendUnavailable), store.lock(key, timeout=5):
            pytest.fail("the body ran")
        assert store.owner(key) == holder.owner_id
