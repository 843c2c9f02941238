"""Until when a holder trusts a lease whose grant took long to arrive, while the stores change."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import pytest
from django.conf import settings
from django.core import mail
from django.test import override_settings

from distlocks import Lease, acquisition, db_lock, locks
from distlocks.backends.fastpath import FastPathBackend
from distlocks.clock import lease_now
from tests.integration.nemesis.test_deadline import on_lease_clock
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer
from tests.settings import REDIS_BACKEND

TTL, MODE_LEASE = 1.0, 1.0
# Seconds: of the answer; more than what the wait has to spare for clocks.
DELAY = 1.0


@pytest.fixture
def slow_and_quick(
    databases: None, fresh_redis: RedisServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FastPathBackend, FastPathBackend, FaultProxy]]:
    """Two processes' worth of one fast path, and the proxy between the slow one and Redis."""
    # Else connections to stores are closed whenever no lease is held.
    monkeypatch.delattr(mail, "outbox", raising=False)
    with ExitStack() as opened:
        proxy = opened.enter_context(FaultProxy(fresh_redis.host, fresh_redis.port, delay=DELAY))
        urls = {"slow": f"redis://{proxy.host}:{proxy.port}/0", "quick": fresh_redis.url}
        entries: dict[str, Any] = {}
        for name, url in urls.items():
            redis = {"url": url, "namespace": key[-32:]}
            options = {"redis": f"redis_{name}", "database": "postgres", "mode_lease": MODE_LEASE}
            entries[f"redis_{name}"] = {"BACKEND": REDIS_BACKEND, "OPTIONS": redis}
            entries[name] = {
                "BACKEND": "distlocks.backends.fastpath.FastPathBackend",
                "TTL": TTL,
                # What others hold in the table is not waited for.
                "KEY_PREFIX": key[-32:],
                "OPTIONS": {**options, "skew": 0.1},
            }
        opened.enter_context(override_settings(DISTLOCKS={**settings.DISTLOCKS, **entries}))
        opened.callback(locks.close_all)
        slow, quick = (cast(FastPathBackend, locks[name]) for name in urls)
        yield slow, quick, proxy


@pytest.mark.parametrize("counted_from", ["the first send", "the reply"])
def test_a_late_answer_does_not_make_a_lease_last_beyond_the_drain(
    slow_and_quick: tuple[FastPathBackend, FastPathBackend, FaultProxy],
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    counted_from: str,
) -> None:
    slow, quick, proxy = slow_and_quick
    if counted_from == "the reply":

        def counted_late(*args: Any, first_send: float, **options: Any) -> Lease:
            return Lease(*args, first_send=lease_now(), **options)

        monkeypatch.setattr(acquisition, "Lease", counted_late)
    # Connected, and with the script loaded.
    db_lock(f"{key}:warm", backend="slow", timeout=0).acquire().release()

    # It has read who grants just before that changes, and does not come to read it again.
    read_at = slow.authority.look().read_at
    monkeypatch.setattr(slow.authority, "look_soon", lambda: None)
    quick.authority.drain("the test")
    with ThreadPoolExecutor() as threads:
        taken_over = threads.submit(db_lock(key, backend="quick", timeout=20).acquire)
        proxy.answers = "delay"
        while lease_now() < read_at + MODE_LEASE * 0.7:
            pass
        first = db_lock(key, backend="slow", timeout=0, renew=False).acquire()
        second = taken_over.result(30)
    overlap = first.deadline - on_lease_clock(second)
    if counted_from == "the reply":
        assert overlap > DELAY / 2
    else:
        assert overlap < 0.001
    proxy.mode = "pass"
    second.release()
