"""Until when a holder trusts a lease whose grant took long to arrive."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from distlocks import Lease, acquisition, db_lock
from distlocks.clock import lease_now
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer

TTL = 1.0
# Seconds: of the answer.
DELAY = 0.6


def on_lease_clock(lease: Lease) -> float:
    """When the store granted it."""
    return lease_now() - (time.time() - lease.acquired_at.timestamp())


@pytest.mark.parametrize("counted_from", ["the first send", "the reply"])
def test_a_late_answer_does_not_make_a_lease_last_beyond_the_stores_expiry(
    add_store: Callable[..., str],
    redis_server: RedisServer,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    counted_from: str,
) -> None:
    if counted_from == "the reply":

        def counted_late(*args: Any, first_send: float, **options: Any) -> Lease:
            return Lease(*args, first_send=lease_now(), **options)

        monkeypatch.setattr(acquisition, "Lease", counted_late)
    with (
        FaultProxy(redis_server.host, redis_server.port, delay=DELAY) as proxy,
        ThreadPoolExecutor() as threads,
    ):
        slow = add_store("slow", ttl=TTL, url=f"redis://{proxy.host}:{proxy.port}/0")
        quick = add_store("quick", ttl=TTL, url=redis_server.url)
        # Connected, and with the script loaded.
        db_lock(f"{key}:warm", backend=slow, timeout=0).acquire().release()

        proxy.answers = "delay"
        asked = lease_now()
        coming = threads.submit(db_lock(key, backend=slow, timeout=0, renew=False).acquire)
        heir = db_lock(key, backend=quick, timeout=5)
        while not heir_has_to_wait(quick, key):
            pass
        taken_over = threads.submit(heir.acquire)
        first = coming.result(10)
        assert lease_now() - asked >= DELAY
        second = taken_over.result(10)

        overlap = first.deadline - on_lease_clock(second)
        # Two clocks were read one after the other.
        if counted_from == "the reply":
            assert overlap > DELAY / 2
        else:
            assert overlap < 0.001
        second.release()
        proxy.mode = "pass"


def heir_has_to_wait(backend: str, key: str) -> bool:
    from distlocks import locks

    return any(holder.key == key for holder in locks[backend].holders(key))
