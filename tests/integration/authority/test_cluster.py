"""The fast path over a Cluster: many buckets, which are opened and left together."""

from typing import Any

import pytest
from django.conf import settings

from tests.integration.authority.scene import FAST, Scene
from tests.servers import session
from tests.servers.redis_groups import ClusterGroup
from tests.settings import redis_stores


@pytest.fixture
def clustered(scene: Scene) -> Scene:
    """With one process."""
    session.start_for("redis_cluster")
    settings.DISTLOCKS.update(redis_stores())
    settings.DISTLOCKS[f"{FAST} redis"] = settings.DISTLOCKS["redis_cluster"]
    scene.add()
    return scene


def test_keys_of_all_its_servers_are_had_and_lost_together(clustered: Scene, key: str) -> None:
    keys = [f"{key} {number}" for number in range(8)]
    servers = clustered.backend.redis.servers
    with clustered.lock(*keys, timeout=0) as lease:
        names = [servers.hash_name(clustered.prefix + one) for one in keys]
        assert len({servers.address(name) for name in names}) > 1
        assert [holder.key for holder in clustered.backend.holders(key)] == keys
    before: dict[Any, int] = lease.fencing_tokens

    # One bucket is forgotten, of which the others know nothing.
    group = session.group(ClusterGroup)
    assert group is not None
    with group.master_of(names[0]).client() as client:
        client.delete(names[0])
    with clustered.lock(*keys, timeout=20) as lease:
        assert clustered.store_of(lease) == "database"
        assert all(lease.fencing_tokens[one] > before[one] for one in keys)
    clustered.reaches("redis")
    with clustered.lock(*keys, timeout=0) as later:
        assert all(later.fencing_tokens[one] > lease.fencing_tokens[one] for one in keys)
