"""Redis behind a network that loses replies, resets and swallows."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from distlocks import BackendUnavailable
from distlocks.backends.redis.links import Link
from distlocks.clock import lease_now
from tests.integration.contract.redis_stores import RedisStore
from tests.integration.contract.stores import Store, for_stores
from tests.integration.hazards.proxied import Proxied
from tests.servers.redis import RedisServer
from tests.waiting import eventually, eventually_on_loop

pytestmark = for_stores(("redis",))

Start = Callable[..., Future[Any]]
# Far less than a sleeper would sleep that is not told, and than a lease lasts.
SOON = 3.0
# What a server gets to answer, unless the settings say more or less.
TIMEOUT = 2.0


def is_read(server: RedisServer) -> bool:
    """Whether a client is blocked on its mailbox."""
    return b"cmd=blpop" in server.ask("CLIENT", "LIST")


def waiters(store: Store, key: str) -> list[str]:
    found = store.aside(lambda: store.backend.waiters(key))
    return [waiter.owner_id for waiter in found]


@pytest.mark.parametrize("first", ["direct", "proxied"])
def test_a_server_is_the_same_behind_a_proxy(
    store: Store, proxied: Proxied, key: str, first: str
) -> None:
    """Whoever finds it by another address does not take it for one that has lost its memory."""
    one, other = (store, proxied) if first == "direct" else (proxied, store)
    lease = one.hold(key)
    assert other.lock(key, timeout=0).try_acquire() is None
    assert other.hold(f"{key}:other").release() is True
    lease.extend()
    assert one.backend.quarantine() == other.backend.quarantine() == 0
    assert lease.release() is True


class TestWhoWaits:
    """The connection on which it is to be called breaks."""

    def test_it_is_called_all_the_same(
        self,
        store: Store,
        proxied: Proxied,
        key: str,
        redis_server: RedisServer,
        start: Start,
    ) -> None:
        holder = store.hold(key)
        waiting = start(proxied.lock(key, timeout=60).acquire)
        eventually(lambda: is_read(redis_server))
        proxied.proxy.cut()
        assert holder.release() is True
        lease = waiting.result(10)
        assert lease.waited < SOON
        assert lease.release() is True

    async def test_so_is_a_task(
        self, store: Store, proxied: Proxied, key: str, redis_server: RedisServer
    ) -> None:
        holder = await store.ahold(key)
        waiting = asyncio.create_task(proxied.lock(key, timeout=60).aacquire())
        await eventually_on_loop(lambda: is_read(redis_server))
        await asyncio.to_thread(proxied.proxy.cut)
        assert await holder.arelease() is True
        async with asyncio.timeout(10):
            lease = await waiting
        assert lease.waited < SOON
        assert await lease.arelease() is True

    def test_it_keeps_its_place(
        self,
        store: Store,
        proxied: Proxied,
        key: str,
        redis_server: RedisServer,
        start: Start,
    ) -> None:
        holder = store.hold(key)
        first = start(proxied.lock(key, timeout=60).acquire)
        eventually(lambda: waiters(store, key))
        second = start(store.lock(key, timeout=60).acquire)
        eventually(lambda: len(waiters(store, key)) == 2)
        queue = waiters(store, key)
        proxied.proxy.cut()
        eventually(lambda: is_read(redis_server))
        assert waiters(store, key) == queue
        assert holder.release() is True
        lease = first.result(10)
        assert not second.done()
        assert lease.owner_id == queue[0]
        assert lease.release() is True
        assert second.result(10).release() is True


class TestSwallowedRequests:
    """Nothing comes back, nor does an error."""

    @pytest.mark.parametrize("on_loop", [False, True], ids=["sync", "async"])
    def test_the_asker_is_told_in_time_and_nothing_stays_behind(
        self, store: RedisStore, proxied: Proxied, key: str, on_loop: bool
    ) -> None:
        """The network delivers late what it had swallowed: the grant is given back."""

        async def ask_on_loop() -> None:
            await (await proxied.ahold(key)).arelease()
            await asyncio.to_thread(setattr, proxied.proxy, "mode", "blackhole")
            await proxied.lock(key, ttl=5, timeout=0).aacquire()

        def ask() -> None:
            proxied.hold(key).release()
            proxied.proxy.mode = "blackhole"
            proxied.lock(key, ttl=5, timeout=0).acquire()

        def last_token() -> int:
            return int(store.command(key, "HGET", "{}", "\x01t"))

        began = lease_now()
        with pytest.raises(BackendUnavailable, match="does not answer") as caught:
            asyncio.run(ask_on_loop()) if on_loop else ask()
        assert caught.value.in_doubt
        assert TIMEOUT <= lease_now() - began < TIMEOUT + SOON
        before = last_token()
        proxied.proxy.mode = "pass"
        eventually(lambda: last_token() > before)
        eventually(lambda: store.is_free(key), within=SOON)

    def test_who_waits_is_told_when_its_own_time_is_up(
        self, store: Store, proxied: Proxied, key: str, redis_server: RedisServer, start: Start
    ) -> None:
        """Not earlier: the network may heal. Its place in the queue is given up."""
        holder = store.hold(key)
        waiting = start(proxied.lock(key, timeout=0.5).acquire)
        eventually(lambda: is_read(redis_server))
        proxied.proxy.mode = "blackhole"
        with pytest.raises(BackendUnavailable):
            waiting.result(20)
        proxied.proxy.mode = "pass"
        eventually(lambda: not waiters(store, key))
        assert holder.release() is True
        eventually(lambda: store.is_free(key))


@pytest.fixture
def hasty(store: Store, settings: Settings) -> Iterator[Store]:
    """A client of the same server that wants its answers within 0.3 s."""
    entry = settings.DISTLOCKS[store.alias]
    options = {**entry["OPTIONS"], "connection": {"socket_timeout": 0.3}}
    settings.DISTLOCKS = {**settings.DISTLOCKS, "hasty": {**entry, "OPTIONS": options}}
    client = Store("hasty")
    yield client
    client.clean_up()


class TestShortSocketTimeout:
    """The client's connections time out while it waits for its turn."""

    def test_a_longer_wait_is_no_error(
        self, store: Store, hasty: Store, key: str, start: Start
    ) -> None:
        holder = store.hold(key)
        began = lease_now()
        waiting = start(hasty.lock(key, timeout=20).acquire)
        eventually(lambda: lease_now() > began + 1 or waiting.done())
        assert holder.release() is True
        lease = waiting.result(10)
        assert 0.9 < lease.waited < 1 + SOON
        assert lease.release() is True

    async def test_nor_is_a_tasks(self, store: Store, hasty: Store, key: str) -> None:
        holder = await store.ahold(key)
        began = lease_now()
        waiting = asyncio.create_task(hasty.lock(key, timeout=20).aacquire())
        await eventually_on_loop(lambda: lease_now() > began + 1 or waiting.done())
        assert await holder.arelease() is True
        async with asyncio.timeout(10):
            lease = await waiting
        assert 0.9 < lease.waited < 1 + SOON
        assert await lease.arelease() is True


class TestWhoIsStopped:
    """Cancelled, out of time or interrupted: neither an orphan nor a place in the queue."""

    async def test_while_waiting_on_an_event_loop(self, store: Store, key: str) -> None:
        holder = await store.ahold(key)
        for _ in range(10):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(store.lock(key, timeout=60).aacquire(), 0.02)
        await eventually_on_loop(lambda: not waiters(store, key))
        assert await holder.arelease() is True
        assert await (await store.ahold(key)).arelease() is True

    async def test_while_the_answer_is_lost(self, store: Store, proxied: Proxied, key: str) -> None:
        await (await proxied.ahold(key)).arelease()
        await asyncio.to_thread(proxied.lose_next_answer)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(proxied.lock(key, timeout=60).aacquire(), 0.2)
        assert store.owner(key), "it was granted"
        await asyncio.to_thread(proxied.heal)
        await eventually_on_loop(lambda: store.is_free(key), within=SOON)

    async def test_at_the_moment_of_its_call(self, store: Store, key: str) -> None:
        """The key is handed to who is just being cancelled: the next has it."""
        for steps in range(15):
            holder = await store.ahold(key)
            first = asyncio.create_task(store.lock(key, timeout=60).aacquire())
            await eventually_on_loop(lambda: len(waiters(store, key)) == 1)
            second = asyncio.create_task(store.lock(key, timeout=60).aacquire())
            await eventually_on_loop(lambda: len(waiters(store, key)) == 2)
            await holder.arelease()
            for _ in range(steps):
                await asyncio.sleep(0)
            first.cancel()
            with suppress(asyncio.CancelledError):
                await (await first).arelease()
            async with asyncio.timeout(10):
                lease = await second
            assert await lease.arelease() is True
            await eventually_on_loop(lambda: not waiters(store, key) and store.is_free(key))

    def test_while_reading_its_mailbox(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C comes while the thread waits for the server."""
        real = Link.ask

        def interrupt(link: Link, request: bytes, *args: Any) -> Any:
            if b"BLPOP" in request:
                raise KeyboardInterrupt
            return real(link, request, *args)

        holder = store.hold(key)
        with monkeypatch.context() as patched:
            patched.setattr(Link, "ask", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.lock(key, timeout=20).acquire()
        eventually(lambda: not waiters(store, key))
        assert store.owner(key) == holder.owner_id
        assert holder.release() is True
        assert store.hold(key).release() is True
