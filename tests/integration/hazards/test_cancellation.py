"""Whoever is interrupted while asking, waiting, extending or releasing leaves nothing behind."""

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import pytest
from django.db import connections

from distlocks import BackendUnavailable, Lease, db_lock, signals
from distlocks.claims import Grant
from distlocks.recording import recorder
from distlocks.testing import FakeClock
from tests.integration.contract.stores import (
    KINDS_OF_SHARED_STORES,
    POSTGRES_STORES,
    STORES,
    Gate,
    Store,
    Told,
    for_stores,
)
from tests.integration.hazards import roles
from tests.servers import processes
from tests.servers.children import Child, Spawner
from tests.waiting import eventually, eventually_on_loop

# The memory store answers without an await in between.
AWAITED_STORES = STORES[1:]

MakeGate = Callable[..., Gate]


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Wait for the task, which must end by its cancellation."""
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await task


class TestTaskThatAsks:
    @for_stores(AWAITED_STORES)
    @pytest.mark.parametrize("after", [False, True], ids=["request", "answer"])
    async def test_its_grant_is_given_back(
        self, store: Store, key: str, gate: MakeGate, after: bool
    ) -> None:
        """It is cancelled with the request, or with the answer, on the way."""
        under_way = gate(store.backend, "try_acquire", after=after)
        task = asyncio.create_task(store.lock(key, timeout=5).aacquire())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0)
        under_way.open()
        await cancelled(task)
        assert store.is_free(key), "the cancellation is raised when that is done"
        await (await store.ahold(key)).arelease()

    @for_stores(AWAITED_STORES)
    async def test_also_when_it_is_cancelled_twice(
        self, store: Store, key: str, gate: MakeGate
    ) -> None:
        """The second cancellation is not kept waiting for the store."""
        under_way = gate(store.backend, "try_acquire", after=True)
        task = asyncio.create_task(store.lock(key, timeout=5).aacquire())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()
        await cancelled(task)
        under_way.open()
        await eventually_on_loop(lambda: store.is_free(key))

    @for_stores(AWAITED_STORES)
    async def test_also_when_it_was_given_so_much_time(
        self, store: Store, key: str, gate: MakeGate
    ) -> None:
        under_way = gate(store.backend, "try_acquire", after=True)

        async def let_go() -> None:
            await eventually_on_loop(under_way.arrived.is_set)
            await asyncio.sleep(0.05)
            under_way.open()

        helper = asyncio.create_task(let_go())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.lock(key, timeout=5).aacquire(), 0.02)
        await helper
        await eventually_on_loop(lambda: store.is_free(key))

    @for_stores(AWAITED_STORES)
    async def test_at_whatever_step_of_the_event_loop(self, store: Store, key: str) -> None:
        """Either it has the lease, and says so, or the store is clean."""
        for steps in range(25):
            name = f"{key}:{steps}"
            task = asyncio.create_task(store.lock(name, timeout=5).aacquire())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                lease = await task
                assert store.owner(name) == lease.owner_id
                await lease.arelease()
            assert store.is_free(name)

    @for_stores(AWAITED_STORES)
    async def test_the_body_does_not_run(self, store: Store, key: str, gate: MakeGate) -> None:
        async def work() -> None:
            async with store.lock(key, timeout=5):
                pytest.fail("the body ran")

        under_way = gate(store.backend, "try_acquire", after=True)
        task = asyncio.create_task(work())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        under_way.open()
        await cancelled(task)
        assert store.is_free(key)

    @for_stores(AWAITED_STORES)
    async def test_its_minimum_hold_is_not_kept(
        self, store: Store, key: str, gate: MakeGate
    ) -> None:
        """For work that never began."""
        under_way = gate(store.backend, "try_acquire", after=True)
        task = asyncio.create_task(store.lock(key, timeout=5, min_hold=20).aacquire())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        under_way.open()
        await cancelled(task)
        assert store.is_free(key)


class TestTaskThatWaits:
    @pytest.fixture
    async def waiting(self, store: Store, key: str) -> tuple[Lease, asyncio.Task[Lease]]:
        """The holder's lease, and a task that waits for it."""
        began = asyncio.Event()
        real = store.backend.await_

        async def wait(*args: Any) -> None:
            began.set()
            await real(*args)

        store.backend.await_ = wait  # type: ignore[method-assign]
        holder = await store.ahold(key)
        task = asyncio.create_task(store.lock(key, timeout=60).aacquire())
        async with asyncio.timeout(20):
            await began.wait()
        return holder, task

    async def test_it_ends_at_once_and_is_in_nobodys_way(
        self, store: Store, key: str, waiting: tuple[Lease, asyncio.Task[Lease]]
    ) -> None:
        holder, task = waiting
        task.cancel()
        await cancelled(task)
        assert store.owner(key) == holder.owner_id
        assert await holder.arelease() is True
        await asyncio.sleep(0.01)
        assert store.is_free(key)

    async def test_at_whatever_step_of_the_event_loop(
        self, store: Store, key: str, waiting: tuple[Lease, asyncio.Task[Lease]]
    ) -> None:
        """The lock is released and the waiter cancelled, in either order and close together."""
        holder, first = waiting
        first.cancel()
        await cancelled(first)
        for steps in range(20):
            task = asyncio.create_task(store.lock(key, timeout=60).aacquire())
            await asyncio.sleep(0.002)
            releasing = asyncio.create_task(holder.arelease())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            assert await releasing is True
            with suppress(asyncio.CancelledError):
                await (await task).arelease()
            assert store.is_free(key)
            holder = await store.ahold(key)

    async def test_others_go_on_waiting(
        self, store: Store, key: str, waiting: tuple[Lease, asyncio.Task[Lease]]
    ) -> None:
        holder, task = waiting
        other = asyncio.create_task(store.lock(key, timeout=60).aacquire())
        await asyncio.sleep(0.01)
        task.cancel()
        await cancelled(task)
        assert await holder.arelease() is True
        async with asyncio.timeout(10):
            lease = await other
        assert await lease.arelease() is True

    async def test_its_time_given_from_outside_ends_it(self, store: Store, key: str) -> None:
        holder = await store.ahold(key)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await store.lock(key, timeout=60).aacquire()
        assert store.owner(key) == holder.owner_id
        assert await holder.arelease() is True


class TestTaskThatHolds:
    @pytest.mark.parametrize("decorated", [False, True], ids=["with", "decorator"])
    async def test_its_lock_is_released(self, store: Store, key: str, decorated: bool) -> None:
        inside = asyncio.Event()

        async def stay() -> None:
            inside.set()
            await asyncio.sleep(60)

        async def work() -> None:
            async with store.lock(key, timeout=0):
                await stay()

        task = asyncio.create_task(store.lock(key, timeout=0)(stay)() if decorated else work())
        async with asyncio.timeout(20):
            await inside.wait()
        assert store.owner(key)
        task.cancel()
        await cancelled(task)
        assert store.is_free(key)

    @for_stores(AWAITED_STORES)
    @pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
    async def test_a_release_under_way_goes_on_to_its_end(
        self, store: Store, key: str, gate: MakeGate, told: Told, twice: bool
    ) -> None:
        lease = await store.ahold(key)
        under_way = gate(store.backend, "release")
        task = asyncio.create_task(lease.arelease())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        if twice:
            task.cancel()
            await cancelled(task)
        under_way.open()
        if not twice:
            await cancelled(task)
        await eventually_on_loop(lambda: store.is_free(key))
        assert not lease.lost
        assert await asyncio.to_thread(told.of, signals.lease_lost, key) == []

    @for_stores(AWAITED_STORES)
    async def test_so_does_that_at_the_end_of_a_block(
        self, store: Store, key: str, gate: MakeGate
    ) -> None:
        under_way = gate(store.backend, "release")

        async def work() -> None:
            async with store.lock(key, timeout=0):
                pass

        task = asyncio.create_task(work())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        under_way.open()
        await cancelled(task)
        await eventually_on_loop(lambda: store.is_free(key))

    @for_stores(AWAITED_STORES)
    async def test_a_release_that_fails_while_it_is_cancelled_is_made_up_for(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The task is cancelled, and the store does not answer its release either."""
        real = store.backend.release
        releasing, cancelling = threading.Event(), threading.Event()

        def fail(grant: Grant) -> bool:
            monkeypatch.setattr(store.backend, "release", real)
            releasing.set()
            cancelling.wait(20)
            raise BackendUnavailable("The network is down.")

        async def work() -> None:
            async with store.lock(key, timeout=0, ttl=6):
                pass

        monkeypatch.setattr(store.backend, "release", fail)
        task = asyncio.create_task(work())
        await eventually_on_loop(releasing.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        cancelling.set()
        await cancelled(task)
        await eventually_on_loop(lambda: store.is_free(key), within=3)

    @for_stores(AWAITED_STORES)
    @pytest.mark.parametrize("after", [False, True], ids=["request", "answer"])
    async def test_an_extension_under_way_costs_nothing(
        self, store: Store, key: str, gate: MakeGate, after: bool
    ) -> None:
        """The holder still has what it had, and can release it."""
        lease = await store.ahold(key, renew=False)
        under_way = gate(store.backend, "extend", after=after)
        task = asyncio.create_task(lease.aextend())
        await eventually_on_loop(under_way.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0)
        under_way.open()
        await cancelled(task)
        lease.check()
        assert store.owner(key) == lease.owner_id
        assert await lease.arelease() is True
        assert store.is_free(key)


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


@for_stores(KINDS_OF_SHARED_STORES)
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
        assert child.errors == ""
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
