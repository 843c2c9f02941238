"""A primary that was a replica for a while, and has lost grants without having been restarted."""

from collections.abc import Callable

import pytest
from django.test import override_settings

from distlocks import LockTimeout, db_lock, locks
from tests.servers.redis import RedisServer
from tests.waiting import eventually


def test_it_grants_nothing_that_it_may_have_granted_before(
    make_redis: Callable[..., RedisServer], key: str
) -> None:
    first, second = make_redis(), make_redis()
    second.replicate(first)
    eventually(second.is_replica_in_sync)
    entry = {
        "BACKEND": "distlocks.backends.redis.RedisBackend",
        "OPTIONS": {"url": first.url},
    }
    with override_settings(DISTLOCKS={"default": entry}):
        locks["default"].quarantine(end=True)
        with db_lock(f"{key}:before"):
            pass
        eventually(second.is_replica_in_sync)
        second.ask("REPLICAOF", "NO", "ONE")
        lease = db_lock(key, renew=False).acquire()
        # Nobody asks the other for a lock meanwhile: it leaves the record as it was.
        first.replicate(second)
        eventually(first.is_replica_in_sync)
        first.ask("REPLICAOF", "NO", "ONE")
        second.replicate(first)
        assert not lease.lost
        with pytest.raises(LockTimeout, match="memory of locks is new"):
            db_lock(key, timeout=0).acquire()
        locks.close_all()
