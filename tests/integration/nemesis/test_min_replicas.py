"""`min_replicas`: a grant that fewer replicas have than that is none."""

from collections.abc import Callable

import pytest

from distlocks import BackendUnavailable, db_lock, locks
from tests.integration.nemesis.nemeses import wait_for
from tests.servers.redis import RedisServer

TTL = 10.0
# Seconds: half of it is how long replicas are waited for.
TIMEOUT = 2.0


@pytest.fixture
def servers(make_redis: Callable[..., RedisServer]) -> list[RedisServer]:
    """A primary and two replicas."""
    primary, *replicas = (make_redis() for _ in range(3))
    for replica in replicas:
        replica.replicate(primary)
    wait_for(lambda: acknowledging(primary) == 2)
    return [primary, *replicas]


def acknowledging(primary: RedisServer) -> int:
    """How many replicas the primary counts."""
    with primary.client() as client:
        client.set("asked", 1)
        return int(client.wait(2, 100))


async def test_a_grant_that_too_few_replicas_have_is_given_back(
    add_store: Callable[..., str], servers: list[RedisServer], key: str
) -> None:
    primary, one, _ = servers
    connection = {"socket_timeout": TIMEOUT}
    plain = add_store("plain", ttl=TTL, url=primary.url)
    wary = add_store("wary", ttl=TTL, url=primary.url, min_replicas=2, connection=connection)

    def has_holder() -> bool:
        return bool(locks[plain].holders(key))

    lock = db_lock(key, backend=wary, timeout=0, ttl=TTL)
    lease = await lock.aacquire()
    token = lease.fencing_token
    await lease.arelease()

    one.pause()
    try:
        with pytest.raises(BackendUnavailable, match=r"1 of 2 replicas.*given back"):
            await lock.aacquire()
        wait_for(lambda: not has_holder(), TTL / 2)
    finally:
        one.resume()
    wait_for(lambda: acknowledging(primary) == 2)
    lease = await lock.aacquire()
    assert lease.fencing_token > token
    await lease.arelease()


def test_what_a_replica_has_acknowledged_is_there_after_the_failover(
    add_store: Callable[..., str], servers: list[RedisServer], key: str
) -> None:
    primary, one, other = servers
    connection = {"socket_timeout": TIMEOUT}
    wary = add_store("wary", ttl=TTL, url=primary.url, min_replicas=1, connection=connection)
    lock = db_lock(key, backend=wary, timeout=0, renew=False)
    one.pause()
    lease = lock.acquire()
    other.pause()
    try:
        with pytest.raises(BackendUnavailable, match="0 of 1 replicas"):
            lease.extend()
        lease.check()
        with pytest.raises(BackendUnavailable, match="0 of 1 replicas"):
            db_lock(f"{key}:more", backend=wary, timeout=0).acquire()
    finally:
        one.resume()
        other.resume()

    primary.kill()
    other.ask("REPLICAOF", "NO", "ONE")
    promoted = add_store("promoted", ttl=TTL, url=other.url, fresh=False)
    (holder,) = locks[promoted].holders(key)
    assert (holder.owner_id, holder.fencing_token) == (lease.owner_id, lease.fencing_token)
