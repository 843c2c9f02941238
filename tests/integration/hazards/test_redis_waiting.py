"""Waiting in Redis: first come, first served, by one connection, and at no cost to the others."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from distlocks import BackendUnavailable, Lease, LockTimeout, signals
from distlocks.backends.redis.mail import ThreadsMailbox
from distlocks.backends.wakeups import Ticket
from distlocks.clock import lease_now
from tests.integration.contract.redis_stores import RedisStore
from tests.integration.contract.stores import Store, for_stores
from tests.integration.hazards import roles
from tests.servers.children import Child, Spawner
from tests.servers.redis import RedisServer
from tests.waiting import eventually, eventually_on_loop

Start = Callable[..., Future[Any]]
# Those next in the queue look every 2.5 s whether the one before them is still there, and a key is
# kept for 0.5 s for who is called.
SOON_AFTER_A_DEATH = 6.0

on_redis = for_stores(("redis",))
on_each_kind = for_stores(("redis", "redis_cluster"))


class Turns:
    """Waiters that take their turns, and in which order they had them."""

    def __init__(self, store: RedisStore, key: str) -> None:
        self.store = store
        self.key = key
        self.had: list[int] = []

    def take(self, number: int) -> None:
        with self.store.lock(self.key, timeout=60):
            self.had.append(number)

    async def atake(self, number: int) -> None:
        async with self.store.lock(self.key, timeout=60):
            self.had.append(number)


class TestFirstComeFirstServed:
    @on_each_kind
    def test_of_threads(self, store: RedisStore, key: str, start: Start) -> None:
        turns = Turns(store, key)
        holder = store.hold(key)
        waiting = []
        for number in range(12):
            waiting.append(start(turns.take, number))
            store.eventually_waiting(key, number + 1)
        assert holder.release() is True
        for one in waiting:
            one.result(20)
        assert turns.had == list(range(12))

    @on_each_kind
    async def test_of_tasks(self, store: RedisStore, key: str) -> None:
        turns = Turns(store, key)
        holder = await store.ahold(key)
        waiting = []
        for number in range(12):
            waiting.append(asyncio.create_task(turns.atake(number)))
            await asyncio.to_thread(store.eventually_waiting, key, number + 1)
        assert await holder.arelease() is True
        async with asyncio.timeout(20):
            await asyncio.gather(*waiting)
        assert turns.had == list(range(12))

    @on_each_kind
    def test_of_processes(self, store: RedisStore, key: str, spawn: Spawner) -> None:
        holder = store.hold(key)
        children = []
        for number in range(3):
            children.append(spawn(roles.wait, store.alias, key, timeout=60))
            queue = store.eventually_waiting(key, number + 1)
        assert holder.release() is True
        for child, owner in zip(children, queue, strict=True):
            child.expect(f"had by {owner}")
            child.send()
        for child in children:
            child.result()

    @on_redis
    def test_a_newcomer_does_not_pass(self, store: RedisStore, key: str, start: Start) -> None:
        """Neither one that would wait nor one that would not, nor who just had it."""
        turns = Turns(store, key)
        stop = threading.Event()

        def pass_by() -> int:
            passed = 0
            while not stop.is_set():
                if lease := store.lock(key, timeout=0).try_acquire():
                    passed += bool(len(turns.had) not in (0, 20))
                    lease.release()
            return passed

        holder = store.hold(key)
        waiting = [start(turns.take, number) for number in range(20)]
        store.eventually_waiting(key, 20)
        passing = [start(pass_by) for _ in range(2)]
        assert holder.release() is True
        for one in waiting:
            one.result(20)
        stop.set()
        assert [one.result(20) for one in passing] == [0, 0]

    @on_redis
    def test_readers_that_wait_go_together_and_not_before_a_writer_that_came_first(
        self, store: RedisStore, key: str, start: Start
    ) -> None:
        holder = store.hold(key)
        writer = start(store.lock(key, timeout=60).acquire)
        store.eventually_waiting(key, 1)
        readers = [start(store.lock(key, shared=True, timeout=60).acquire) for _ in range(3)]
        store.eventually_waiting(key, 4)
        assert holder.release() is True
        writing: Lease = writer.result(20)
        assert not any(reader.done() for reader in readers)
        assert writing.release() is True
        leases = [reader.result(20) for reader in readers]
        assert len(store.backend.holders(key)) == 3
        assert all(lease.release() for lease in leases)

    @on_redis
    def test_who_is_woken_for_nothing_keeps_its_time(
        self, store: RedisStore, key: str, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However often it looks, its time-out does not begin again, nor its place."""
        monkeypatch.setattr(store.backend, "wait", lambda *args: time.sleep(0.01))
        store.hold(key)
        waiting = start(store.lock(key, timeout=0.5).acquire)
        (owner,) = store.eventually_waiting(key, 1)
        other = store.wait(key)
        queues = [[owner, other.owner_id]]
        while not waiting.done():
            queues.append([waiter.owner_id for waiter in store.backend.waiters(key)])
        # Then it is gone, with a last try.
        assert [queue for queue, _ in itertools.groupby(queues)][1:] in ([], [[other.owner_id]])
        with pytest.raises(LockTimeout, match=r"within 0\.5 s"):
            waiting.result(0)


def two_waiting(
    store: RedisStore, key: str, spawn: Spawner, start: Start
) -> tuple[Lease, Child, Future[Any]]:
    """A holder of the key, who waits first (another process), and who waits next."""
    holder = store.hold(key)
    first = spawn(roles.wait, store.alias, key, timeout=60)
    store.eventually_waiting(key, 1)
    second = start(store.lock(key, timeout=60).acquire)
    store.eventually_waiting(key, 2)
    return holder, first, second


class TestWhoLeaves:
    @on_redis
    def test_a_dead_one_is_passed_over(
        self, store: RedisStore, key: str, spawn: Spawner, start: Start
    ) -> None:
        """Killed while first in the queue, with the call on its way to it."""
        holder, first, second = two_waiting(store, key, spawn, start)
        first.kill()
        assert holder.release() is True
        lease = second.result(SOON_AFTER_A_DEATH)
        assert lease.release() is True

    @on_redis
    def test_so_is_one_that_stands_still(
        self, store: RedisStore, key: str, spawn: Spawner, start: Start
    ) -> None:
        """And when it goes on, it waits again, and has its turn."""
        holder, first, second = two_waiting(store, key, spawn, start)
        first.pause()
        assert holder.release() is True
        lease = second.result(SOON_AFTER_A_DEATH)
        first.resume()
        eventually(lambda: store.backend.waiters(key))
        assert lease.release() is True
        line = first.readline()
        while line == "waiting":
            line = first.readline()
        assert line.startswith("had by")
        first.send()
        first.result()

    @on_redis
    def test_when_the_thread_that_reads_has_its_turn_another_reads_on(
        self, store: RedisStore, key: str, start: Start
    ) -> None:
        a, b = f"{key}:a", f"{key}:b"
        holders = {name: store.hold(name) for name in (a, b)}
        reading = start(store.lock(a, timeout=60).acquire)
        store.eventually_waiting(a, 1)
        eventually(lambda: blocked(store) == 1)
        other = start(store.lock(b, timeout=60).acquire)
        store.eventually_waiting(b, 1)
        assert holders[a].release() is True
        lease = reading.result(10)
        assert holders[b].release() is True
        assert other.result(10).waited < 3
        assert lease.release() is True

    @on_redis
    def test_so_it_is_when_its_time_is_up(self, store: RedisStore, key: str, start: Start) -> None:
        a, b = f"{key}:a", f"{key}:b"
        store.hold(a)
        holder = store.hold(b)
        reading = start(store.lock(a, timeout=0.2).acquire)
        store.eventually_waiting(a, 1)
        other = start(store.lock(b, timeout=60).acquire)
        store.eventually_waiting(b, 1)
        with pytest.raises(LockTimeout):
            reading.result(10)
        assert store.backend.waiters(a) == []
        assert holder.release() is True
        assert other.result(10).waited < 3

    @on_redis
    def test_who_is_called_while_it_is_to_read_on_has_yet_another_read(
        self, store: RedisStore, key: str, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two are called at once, the one that reads and the one that would read after it."""
        mailbox = store.redis.servers.mailbox(store.bucket(key))
        name = f"{{}}:m:{mailbox.name.decode()}"
        until = lease_now() + 20
        left = threading.Event()
        real = Ticket.wait

        def wait(ticket: Ticket, until: float) -> bool:
            woken = real(ticket, until)
            if threading.current_thread() is second.thread:
                left.wait(20)
            return woken

        monkeypatch.setattr(Ticket, "wait", wait)
        first = Sleeper(mailbox, f"{key}:1", until)
        eventually(lambda: blocked(store) == 1)
        second = Sleeper(mailbox, f"{key}:2", until)
        third = Sleeper(mailbox, f"{key}:3", until)
        store.command(key, "RPUSH", name, f"{key}:2", f"{key}:1")
        assert first.was_called()
        left.set()
        assert second.was_called()
        store.command(key, "RPUSH", name, f"{key}:3")
        assert third.was_called()

    @on_redis
    async def test_a_task_that_is_cancelled_leaves_the_queue(
        self, store: RedisStore, key: str
    ) -> None:
        holder = await store.ahold(key)
        first = asyncio.create_task(store.lock(key, timeout=60).aacquire())
        await asyncio.to_thread(store.eventually_waiting, key, 1)
        second = asyncio.create_task(store.lock(key, timeout=60).aacquire())
        await asyncio.to_thread(store.eventually_waiting, key, 2)
        first.cancel()
        (left,) = await asyncio.to_thread(store.eventually_waiting, key, 1)
        assert await holder.arelease() is True
        async with asyncio.timeout(10):
            lease = await second
        assert lease.owner_id == left
        assert await lease.arelease() is True


class Sleeper:
    """A thread that waits for its call; it sleeps by the time that this is made."""

    def __init__(self, mailbox: ThreadsMailbox, owner_id: str, until: float) -> None:
        self._called: list[bool] = []
        self._until = until
        self.thread = threading.Thread(
            target=lambda: self._called.append(mailbox.wait(owner_id, until)), daemon=True
        )
        self.thread.start()
        eventually(lambda: owner_id in mailbox.wakeups._tickets)

    def was_called(self) -> bool:
        """Whether it was, long before it would have looked for itself."""
        self.thread.join(5)
        return self._called == [True] and lease_now() < self._until - 10


def clients(store: RedisStore) -> list[str]:
    """The connections to the server, this one apart."""
    text = store.command("", "CLIENT", "LIST").decode()
    return [line for line in text.splitlines() if "cmd=client" not in line]


def blocked(store: RedisStore) -> int:
    return sum("cmd=blpop" in line for line in clients(store))


class TestConnections:
    @on_redis
    def test_threads_that_wait_share_one(self, store: RedisStore, key: str, start: Start) -> None:
        """However many they are, and whatever they wait for."""
        turns = Turns(store, key)
        names = [f"{key}:{number}" for number in range(4)]
        holders = [store.hold(name) for name in names]
        waiting = [start(Turns(store, names[n % 4]).take, n) for n in range(40)]
        for name in names:
            store.eventually_waiting(name, 10)
        eventually(lambda: blocked(store) == 1)
        assert turns.had == []
        for holder in holders:
            holder.release()
        for one in waiting:
            one.result(20)
        assert blocked(store) == 0

    @on_redis
    async def test_so_do_tasks(self, store: RedisStore, key: str) -> None:
        turns = Turns(store, key)
        holder = await store.ahold(key)
        waiting = [asyncio.create_task(turns.atake(number)) for number in range(40)]
        await asyncio.to_thread(store.eventually_waiting, key, 40)
        await eventually_on_loop(lambda: blocked(store) == 1)
        await holder.arelease()
        async with asyncio.timeout(20):
            await asyncio.gather(*waiting)
        assert sorted(turns.had) == list(range(40))

    @pytest.fixture
    def few(self, store: RedisStore, settings: Settings) -> Iterator[Store]:
        """A client of the same server that may have three connections."""
        entry = settings.DISTLOCKS[store.alias]
        options = {**entry["OPTIONS"], "max_connections": 3}
        options["connection"] = {"socket_timeout": 0.5}
        settings.DISTLOCKS = {**settings.DISTLOCKS, "few": {**entry, "OPTIONS": options}}
        client = Store("few")
        yield client
        client.clean_up()

    @on_redis
    def test_those_who_wait_do_not_use_them_up(
        self, store: RedisStore, few: Store, key: str, start: Start
    ) -> None:
        holder = few.hold(key)
        waiting = [start(few.lock(key, timeout=60).acquire) for _ in range(10)]
        store.eventually_waiting(key, 10)
        assert few.lock(f"{key}:other", timeout=0).acquire().release() is True
        holder.extend()
        assert holder.release() is True
        for _ in range(10):
            (done,) = eventually(lambda: [one for one in waiting if one.done()])
            waiting.remove(done)
            assert done.result().release() is True

    @on_redis
    def test_when_all_are_in_use_the_error_says_what_to_raise(
        self, few: Store, key: str, start: Start
    ) -> None:
        backend: Any = few.backend
        links, address = backend.servers.links, backend.servers.address(b"")
        taken = [links.take(address) for _ in range(3)]
        with pytest.raises(BackendUnavailable, match="max_connections") as caught:
            few.lock(key, timeout=0).acquire()
        assert not caught.value.in_doubt
        asking = start(few.lock(key, timeout=0).acquire)
        links.give(taken.pop())
        assert asking.result(10).release() is True
        for link in taken:
            links.give(link)


class TestWhatItCosts:
    def commands(self, server: RedisServer) -> int:
        """How many commands came from clients: those of scripts are counted apart, below."""
        found: dict[str, Any] = server.info("commandstats")
        outside = ("evalsha", "blpop")
        return sum(int(found.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in outside)

    def per_handoff(
        self, store: RedisStore, key: str, server: RedisServer, start: Start, waiters: int
    ) -> float:
        turns = Turns(store, key)
        holder = store.hold(key, renew=False)
        waiting = [start(turns.take, number) for number in range(waiters)]
        store.eventually_waiting(key, waiters)
        before = self.commands(server)
        assert holder.release() is True
        for one in waiting:
            one.result(30)
        return (self.commands(server) - before) / waiters

    @on_redis
    def test_as_much_for_each_handoff_however_many_wait(
        self, store: RedisStore, key: str, redis_server: RedisServer, start: Start
    ) -> None:
        """A release, a call, a confirmation: in a crowd nobody else is disturbed."""
        few = self.per_handoff(store, f"{key}:few", redis_server, start, 2)
        many = self.per_handoff(store, f"{key}:many", redis_server, start, 200)
        assert few <= 5
        assert many <= 5

    @on_redis
    def test_next_to_nothing_while_nothing_happens(
        self, store: RedisStore, key: str, redis_server: RedisServer, start: Start
    ) -> None:
        """Of a hundred, those next in the queue look after each other; the rest are called."""
        turns = Turns(store, key)
        holder = store.hold(key, renew=False)
        waiting = [start(turns.take, number) for number in range(100)]
        store.eventually_waiting(key, 100)
        began, before = time.monotonic(), self.commands(redis_server)
        eventually(lambda: time.monotonic() > began + 2)
        assert self.commands(redis_server) - before <= 20
        assert holder.release() is True
        for one in waiting:
            one.result(30)


class TestWhatIsTold:
    @on_redis
    def test_that_a_lease_had_expired_which_is_taken_over(
        self, store: RedisStore, key: str, start: Start
    ) -> None:
        """By who had waited for it."""
        heard: list[Any] = []

        def hear(**said: Any) -> None:
            heard.extend(said["holders"])

        signals.locks_expired.connect(hear)
        try:
            dead = store.hold(key, ttl=1, renew=False)
            lease = start(store.lock(key, timeout=20).acquire).result(10)
            found = eventually(lambda: [one for one in heard if one.key == key])
            assert [one.owner_id for one in found] == [dead.owner_id]
            assert lease.release() is True
        finally:
            signals.locks_expired.disconnect(hear)

    @on_redis
    def test_who_waits_and_as_whom(self, store: RedisStore, key: str, start: Start) -> None:
        holder = store.hold(key)
        lock = store.lock(key, timeout=60, label="nightly", metadata={"run": 7})
        waiting = start(lock.acquire)
        (owner,) = store.eventually_waiting(key, 1)
        (waiter,) = store.backend.waiters(key)
        assert (waiter.key, waiter.label, waiter.metadata) == (key, "nightly", {"run": 7})
        assert holder.release() is True
        lease = waiting.result(10)
        assert lease.owner_id == owner
        assert lease.release() is True
