"""Until when a holder trusts a lease whose grant took long to arrive."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distlocks import Lease, db_lock, locks
from distlocks.clock import lease_now
from tests.integration.contract.stores import Gate, gate, start  # noqa: F401
from tests.integration.late_answers import count_leases_from
from tests.servers.redis import RedisServer

TTL = 1.0


def on_lease_clock(lease: Lease) -> float:
    """When the store granted it."""
    return lease_now() - (time.time() - lease.acquired_at.timestamp())


@pytest.mark.parametrize("counted_from", ["the first send", "the reply"])
def test_a_late_answer_does_not_make_a_lease_last_beyond_the_stores_expiry(
    add_store: Callable[..., str],
    redis_server: RedisServer,
    key: str,
    gate: Callable[..., Gate],  # noqa: F811
    start: Callable[..., Future[Any]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    counted_from: str,
) -> None:
    count_leases_from(counted_from, monkeypatch)
    slow = add_store("slow", ttl=TTL, url=redis_server.url)
    quick = add_store("quick", ttl=TTL, url=redis_server.url)
    # The answer arrives when the next one has the lock.
    answer = gate(locks[slow], "try_acquire", after=True)
    coming = start(db_lock(key, backend=slow, timeout=0, renew=False).acquire)
    assert answer.arrived.wait(10)
    second = db_lock(key, backend=quick, timeout=10).acquire()
    answer.open()
    overlap = coming.result(10).deadline - on_lease_clock(second)
    # Two clocks were read one after the other.
    assert overlap > TTL / 2 if counted_from == "the reply" else overlap < 0.001
    second.release()
