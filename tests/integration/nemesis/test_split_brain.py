"""A primary that goes on beside its successor: the one case in which a lock can be had twice."""

import time
from collections.abc import Callable

import pytest

from distlocks import BackendUnavailable, Lease, StaleToken, db_lock, locks
from distlocks.clock import lease_now
from tests.integration.guard.sites import POSTGRES, Site
from tests.integration.nemesis.nemeses import wait_for
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer

TTL = 1.0
# Seconds: min-replicas-max-lag. A primary counts in whole seconds and looks once in one, so that
# it may take writes for two more.
LAG = 1
ROUNDING = 2


class Split:
    """A primary with two replicas, until a failover by hand that the primary does not hear of."""

    def __init__(self, make_redis: Callable[..., RedisServer], *arguments: str) -> None:
        self.old, self.new, self.third = (make_redis(*arguments) for _ in range(3))
        self.proxy = FaultProxy(self.old.host, self.old.port)

    def __enter__(self) -> "Split":
        self.proxy.__enter__()
        for replica in (self.new, self.third):
            replica.ask("REPLICAOF", self.proxy.host, self.proxy.port)
        self.await_replicas()
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.__exit__()

    def await_replicas(self) -> None:
        """Until they have all that the primary has now."""
        wait_for(lambda: self.new.is_replica_in_sync() and self.third.is_replica_in_sync())

    def fail_over(self) -> None:
        """Cut the old primary off, which its clients do not notice, and set up the new one."""
        self.proxy.mode = "blackhole"
        self.new.ask("REPLICAOF", "NO", "ONE")
        self.third.replicate(self.new)


def test_a_live_split_brain_grants_twice_and_the_guard_refuses_the_older_holder(
    add_store: Callable[..., str], make_redis: Callable[..., RedisServer], key: str
) -> None:
    with Split(make_redis) as split:
        old = add_store("old", ttl=TTL, url=split.old.url)
        first = db_lock(key, backend=old, timeout=0).acquire()
        split.await_replicas()
        split.fail_over()
        new = add_store("new", ttl=TTL, url=split.new.url, fresh=False)
        second = db_lock(key, backend=new, timeout=TTL + 5).acquire()

        # The documented exception.
        first.check()
        second.check()
        assert second.fencing_token > first.fencing_token

        site = Site(POSTGRES, new)
        site.open_account(key)
        with second.atomic(POSTGRES):
            site.deposit(key)
        with pytest.raises(StaleToken), first.atomic(POSTGRES):
            site.deposit(key)
        assert site.balance(key) == 1
        first.release()
        second.release()


def test_a_primary_that_needs_its_replicas_grants_nothing_beside_its_successor(
    add_store: Callable[..., str], make_redis: Callable[..., RedisServer], key: str
) -> None:
    needing = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", str(LAG))
    with Split(make_redis, *needing) as split:
        lag = {"failover_lag": LAG + ROUNDING}
        old = add_store("old", ttl=TTL, url=split.old.url, **lag)
        # It is extended for as long as the old primary takes it.
        first = db_lock(key, backend=old, timeout=0).acquire()
        split.await_replicas()
        split.fail_over()
        new = add_store("new", ttl=TTL, url=split.new.url, fresh=False, **lag)
        second = db_lock(key, backend=new, timeout=TTL + LAG + ROUNDING + 5).acquire()

        assert first.lost
        assert first.deadline < granted_at(second)
        with pytest.raises(BackendUnavailable, match=r"NOREPLICAS.*min-replicas-to-write"):
            db_lock(f"{key}:other", backend=old, timeout=0).acquire()
        assert locks[new].quarantine() == 0
        second.release()


def granted_at(lease: Lease) -> float:
    """On the lease clock."""
    return lease_now() - (time.time() - lease.acquired_at.timestamp())
