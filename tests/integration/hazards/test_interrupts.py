"""Ctrl-C and time limits, at any moment, leave nothing behind."""

import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from django.db import connections

from distlocks import db_lock
from distlocks.claims import Grant
from distlocks.recording import recorder
from distlocks.testing import FakeClock
from tests.integration.contract.stores import (
    KINDS_OF_SHARED_STORES,
    POSTGRES_STORES,
    QUORUM_STORES,
    Store,
    Told,
    for_stores,
)
from tests.integration.hazards import roles
from tests.servers import processes
from tests.servers.children import Child, Spawner
from tests.waiting import eventually


class TestInterruptedThread:
    """KeyboardInterrupt, or what else a signal handler raises, at the worst moments."""

    @pytest.mark.parametrize("where", ["before", "after"])
    def test_while_asking(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        real = store.backend.try_acquire

        def interrupt(request: Any) -> Any:
            if where == "after":
                real(request)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(store.backend, "try_acquire", interrupt)
            with pytest.raises(KeyboardInterrupt), store.lock(key, timeout=0):
                pytest.fail("the body ran")
        eventually(lambda: store.is_free(key))
        assert store.hold(key).release() is True

    def test_while_waiting(self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: Any) -> None:
            raise KeyboardInterrupt

        holder = store.hold(key)
        with monkeypatch.context() as patched:
            patched.setattr(store.backend, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.lock(key, timeout=20).acquire()
        assert store.owner(key) == holder.owner_id
        assert holder.release() is True
        assert store.hold(key).release() is True

    def test_in_the_body(self, store: Store, key: str) -> None:
        with pytest.raises(KeyboardInterrupt), store.lock(key, timeout=0):
            raise KeyboardInterrupt
        assert store.is_free(key)

    @pytest.mark.parametrize("where", ["before", "after"])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_while_releasing(
        self,
        store: Store,
        key: str,
        monkeypatch: pytest.MonkeyPatch,
        where: str,
        error: type[BaseException],
    ) -> None:
        """It is released all the same, rather than renewed for as long as the process lives."""
        real = store.backend.release

        def interrupt(grant: Any) -> bool:
            monkeypatch.setattr(store.backend, "release", real)
            if where == "after":
                real(grant)
            raise error

        monkeypatch.setattr(store.backend, "release", interrupt)
        with pytest.raises(error), store.lock(key, timeout=0):
            pass
        eventually(lambda: store.is_free(key), within=3)

    def test_a_release_by_hand_can_be_repeated(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = store.backend.release

        def interrupt(grant: Grant) -> bool:
            monkeypatch.setattr(store.backend, "release", real)
            raise KeyboardInterrupt

        lease = store.hold(key)
        monkeypatch.setattr(store.backend, "release", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lease.release()
        lease.release()
        eventually(lambda: store.is_free(key), within=3)

    @pytest.mark.parametrize("by_hand", [False, True], ids=["with", "by hand"])
    def test_after_the_grant_and_before_the_caller_has_it(
        self,
        store: Store,
        key: str,
        monkeypatch: pytest.MonkeyPatch,
        moved_clock: FakeClock,
        told: Told,
        by_hand: bool,
    ) -> None:
        """The lock is had, and already renewed, but nobody is there to release it."""

        def interrupt(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        lock = store.lock(key, timeout=0)
        acquire = lock.acquire if by_hand else lock.__enter__
        with monkeypatch.context() as patched:
            if by_hand:
                patched.setattr(recorder, "send", interrupt)
            else:
                patched.setattr(db_lock, "_enter", interrupt)
            with pytest.raises(KeyboardInterrupt):
                acquire()
        moved_clock.advance(60)
        eventually(lambda: store.is_free(key), within=3)


@for_stores((*KINDS_OF_SHARED_STORES, *QUORUM_STORES))
class TestInterruptedProcess:
    """Ctrl-C in a terminal, or a supervisor that sends SIGINT."""

    def interrupt(self, store: Store, key: str, child: Child) -> None:
        child.expect("ready")
        processes.send(child.pid, signal.SIGINT)
        assert child.readline() == "interrupted"

    @pytest.mark.parametrize("role", [roles.be_interrupted, roles.be_interrupted_on_loop])
    def test_while_waiting_and_with_a_grant_on_its_way(
        self, store: Store, key: str, spawn: Spawner, role: Callable[..., None]
    ) -> None:
        """It ends right after that, while the grant is still being given back."""
        held, free = f"{key}:held", f"{key}:free"
        holder = store.hold(held)
        child = spawn(role, store.alias, held, free)
        self.interrupt(store, held, child)
        assert store.owner(held) == holder.owner_id
        self.interrupt(store, free, child)
        child.result()
        assert child.errors_about(key) == ""
        assert store.is_free(free)
        assert store.owner(held) == holder.owner_id
        assert holder.release() is True
        assert store.lock(held, timeout=0).acquire().release() is True


@for_stores(POSTGRES_STORES)
def test_a_statement_that_the_server_goes_on_with_grants_nothing(
    store: Store, key: str, spawn: Spawner
) -> None:
    """Its asker is stopped by a time limit while it waits for the row in the server.

    The server may execute it after what was sent to undo it.
    """
    store.hold(key).release()

    def ask(cursor: Any, condition: str) -> int:
        cursor.execute(
            f"SELECT count(*) FROM pg_stat_activity WHERE {condition} "
            "AND datname = current_database() AND pid <> pg_backend_pid()"
        )
        (count,) = cursor.fetchone()
        return int(count)

    with (
        closing(connections[store.using].copy()) as rival,
        closing(connections[store.using].copy()) as watch,
        rival.cursor() as keeping,
        watch.cursor() as watching,
    ):
        keeping.execute("BEGIN")
        keeping.execute("SELECT FROM distlocks_lock WHERE key = %s FOR UPDATE", [key])
        child = spawn(roles.be_stopped, store.alias, key)
        child.expect("ready")
        eventually(lambda: ask(watching, "wait_event_type = 'Lock'"))
        processes.send(child.pid, signal.SIGUSR1)
        child.expect("stopped")
        keeping.execute("ROLLBACK")
        eventually(lambda: not ask(watching, "state = 'active'"))
    eventually(lambda: store.is_free(key), within=3)
    child.send()
    child.result()
    assert store.is_free(key)
