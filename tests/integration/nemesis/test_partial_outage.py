"""One server of a Cluster is gone: leases on the others last."""

import time
from collections.abc import Callable

from distlocks import Lease, db_lock, locks, renewal
from distlocks.backends.redis import RedisBackend
from distlocks.clock import lease_now
from tests.integration.nemesis.nemeses import wait_for
from tests.integration.nemesis.topologies import SOCKET_TIMEOUT, Six

TTL = 5.0
LEASES = 20


def test_leases_on_the_servers_that_are_left_are_extended(
    cluster: Six, add_store: Callable[..., str], key: str
) -> None:
    cluster.heal()
    alias = add_store(
        "partial", ttl=TTL, **cluster.options(), connection={"socket_timeout": SOCKET_TIMEOUT}
    )
    backend = locks[alias]
    assert isinstance(backend, RedisBackend)
    for node in cluster.group.nodes:
        # Else a Cluster without one of its parts refuses everything.
        node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
    try:
        leases = []
        for number in range(LEASES):
            leases.append(db_lock(f"{key}:{number}", backend=alias, timeout=5).acquire())
            # Renewed one by one.
            time.sleep(renewal.TICK)

        def place(lease: Lease) -> object:
            return cluster.primary_of(backend.servers.hash_name(str(lease.keys[0])))

        places = [place(lease) for lease in leases]
        on_others = [
            lease for lease, where in zip(leases, places, strict=True) if where is not places[0]
        ]
        assert on_others
        old = cluster.primary_of(backend.servers.hash_name(str(leases[0].keys[0])))
        old.kill()
        long_since = lease_now() + TTL
        wait_for(lambda: lease_now() > long_since or any(lease.lost for lease in on_others))
        assert not any(lease.lost for lease in on_others)
        for lease in on_others:
            assert lease.release()
    finally:
        for node in cluster.group.nodes:
            if node.running:
                node.ask("CONFIG", "SET", "cluster-require-full-coverage", "yes")
        cluster.heal()
