"""What servers do at their administrators' hands: flushed scripts and caches, other encodings."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.cache import caches
from pytest_django.fixtures import Settings

from distlocks.keys import SEPARATOR
from tests.integration.contract.redis_stores import RedisStore
from tests.integration.contract.stores import REDIS_STORES, Store, for_stores
from tests.servers.redis_groups import ClusterGroup


class TestFlushedScripts:
    """SCRIPT FLUSH, as a restart does it too: nobody has to do anything about it."""

    @for_stores(REDIS_STORES)
    def test_each_verb_loads_its_own_again(self, store: RedisStore, key: str) -> None:
        store.flush_scripts()
        lease = store.hold(key)
        store.flush_scripts()
        lease.extend()
        store.flush_scripts()
        assert store.lock(key, timeout=0.01).try_acquire() is None
        store.flush_scripts()
        assert store.owner(key) == lease.owner_id
        store.flush_scripts()
        store.sweep()
        store.flush_scripts()
        assert lease.release() is True
        store.hold(key)
        store.flush_scripts()
        assert len(store.backend.force_release(key)) == 1

    @for_stores(("redis", "redis_cluster"))
    async def test_so_does_each_async_one(self, store: RedisStore, key: str) -> None:
        for options in ({}, {"shared": True}):
            await asyncio.to_thread(store.flush_scripts)
            lease = await store.ahold(key, **options)
            await asyncio.to_thread(store.flush_scripts)
            await lease.aextend()
            await asyncio.to_thread(store.flush_scripts)
            assert await store.lock(key, timeout=0.01).atry_acquire() is None
            await asyncio.to_thread(store.flush_scripts)
            assert await lease.arelease() is True

    @for_stores(("redis", "redis_cluster"))
    def test_who_waits_has_its_turn(self, store: RedisStore, key: str, start: Any) -> None:
        holder = store.hold(key)
        waiting = start(store.lock(key, timeout=20).acquire)
        store.eventually_waiting(key, 1)
        store.flush_scripts()
        assert holder.release() is True
        assert waiting.result(10).release() is True


@for_stores(("redis_cluster",))
class TestSlots:
    """A script may touch one slot: all that belongs to a lock is in it."""

    def test_of_whatever_is_asked_at_once(
        self, store: RedisStore, key: str, redis_cluster: ClusterGroup, start: Any
    ) -> None:
        a, b = f"{key}:a", f"{key}:b"
        lease = store.hold((a, "x"), (a, "y"), b)
        waiting = start(store.lock((a, "x"), (a, "z"), timeout=20).acquire)
        readers = [store.hold(f"{key}:c", shared=True) for _ in range(2)]
        store.eventually_waiting(f"{a}{SEPARATOR}x", 1)
        lease.extend()
        assert lease.release() is True
        assert waiting.result(10).release() is True
        assert all(reader.release() for reader in readers)
        self.have_all_names_a_tag(store)

    async def test_also_on_an_event_loop(self, store: RedisStore, key: str) -> None:
        a, b = f"{key}:a", f"{key}:b"
        async with store.lock((a, "x"), b, timeout=0) as lease:
            await lease.aextend()
            waiting = asyncio.create_task(store.lock((a, "x"), (a, "z"), timeout=20).aacquire())
            await asyncio.to_thread(store.eventually_waiting, f"{a}{SEPARATOR}x", 1)
        async with asyncio.timeout(10):
            assert await (await waiting).arelease() is True

    def have_all_names_a_tag(self, store: RedisStore) -> None:
        names = {name.decode() for found in store.on_every_server("KEYS", "*") for name in found}
        of_locks = [name for name in names if store.redis.settings.namespace in name]
        assert of_locks
        tagged = re.compile(r"\{[^{}]+\.\d+\}(:[a-z](:.*)?)?", re.S)
        assert [name for name in of_locks if not tagged.fullmatch(name)] == []


@pytest.fixture
def decoding(store: Store, settings: Settings) -> Iterator[Store]:
    """A client whose settings ask for replies as text."""
    entry = settings.DISTLOCKS[store.alias]
    options = {**entry["OPTIONS"], "connection": {"decode_responses": True}}
    settings.DISTLOCKS = {**settings.DISTLOCKS, "decoding": {**entry, "OPTIONS": options}}
    client = Store("decoding")
    yield client
    client.clean_up()


@for_stores(("redis", "redis_sentinel", "redis_cluster"))
async def test_replies_may_be_wanted_as_text(store: Store, decoding: Store, key: str) -> None:
    """By the settings of a client that is used for other things as well."""
    name = f"{key}:é"
    async with decoding.lock(name, timeout=0, metadata={"what": "é"}) as lease:
        await lease.aextend()
        (holder,) = await asyncio.to_thread(decoding.backend.holders, name)
        assert holder.metadata == {"what": "é"}
        assert await store.lock(name, timeout=0).atry_acquire() is None
    assert store.is_free(name)


@pytest.mark.parametrize(
    ("store", "cache"),
    [("redis_cache", "django_redis"), ("redis_django", "django")],
    indirect=["store"],
)
def test_a_cache_that_is_cleared_takes_no_locks_along(
    store: RedisStore, key: str, cache: str
) -> None:
    """Not even by FLUSHDB, which is what clearing a cache is."""
    caches[cache].set(key, 1)
    with store.lock(key, timeout=0) as lease:
        caches[cache].clear()
        assert caches[cache].get(key) is None
        lease.extend()
        assert store.owner(key) == lease.owner_id
        assert store.lock(key, timeout=0).try_acquire() is None
