"""A Cluster whose slots are on the move."""

import asyncio
from collections.abc import Iterator

import pytest
from django.test import override_settings

from distlocks import db_lock, locks
from distlocks.backends.redis import RedisBackend
from tests.servers.redis_groups import ClusterGroup


@pytest.fixture
def backend(fresh_redis_cluster: ClusterGroup) -> Iterator[RedisBackend]:
    entry = {
        "BACKEND": "distlocks.backends.redis.RedisBackend",
        "OPTIONS": {"cluster": fresh_redis_cluster.startup_nodes, "quarantine": 0},
    }
    with override_settings(DISTLOCKS={"default": entry}):
        backend = locks["default"]
        assert isinstance(backend, RedisBackend)
        yield backend
        locks.close_all()


def cycle(key: str) -> None:
    """Both ways of speaking, both kinds of claims."""
    with db_lock(key, timeout=0), db_lock(f"{key}:other", shared=True, timeout=0):
        pass

    async def work() -> None:
        async with db_lock(key, timeout=0):
            pass

    asyncio.run(work())


def test_locks_follow_their_slot(
    fresh_redis_cluster: ClusterGroup, backend: RedisBackend, key: str
) -> None:
    hash_name = backend.servers.hash_name(key)
    slot = fresh_redis_cluster.slot_of(hash_name)
    source = fresh_redis_cluster.master_of(slot)
    target = next(
        node
        for number in range(100)
        if (node := fresh_redis_cluster.master_of(number * 163)) is not source
    )
    with db_lock(f"{key}:warm"):
        pass
    # Begun, and nothing of it is at the source: whoever asks there is asked to ask the target.
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id())
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id())
    cycle(key)
    assert backend.place.known(hash_name) == (source.host, source.port)
    with target.client() as client:
        client.execute_command("ASKING")
        assert client.exists(hash_name)
    # Done: everybody has to learn of it.
    for node in fresh_redis_cluster.nodes:
        if node.info("replication")["role"] == "master":
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id())
    cycle(key)
    assert backend.place.known(hash_name) == (target.host, target.port)
    assert backend.holders() == []
