"""Until when a holder trusts a lease whose grant took long to arrive, while the stores change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, cast

import pytest
from django.conf import settings
from django.core import mail
from django.test import override_settings

from distlocks import db_lock, locks
from distlocks.backends.fastpath import FastPathBackend
from tests.integration.contract.stores import Gate, gate, start  # noqa: F401
from tests.integration.late_answers import count_leases_from
from tests.integration.nemesis.test_deadline import on_lease_clock
from tests.servers.redis import RedisServer
from tests.settings import REDIS_BACKEND

TTL, MODE_LEASE = 1.0, 1.0


@pytest.fixture
def slow_and_quick(
    databases: None, fresh_redis: RedisServer, key: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FastPathBackend, FastPathBackend]]:
    """Two processes' worth of one fast path."""
    # Else connections to stores are closed whenever no lease is held.
    monkeypatch.delattr(mail, "outbox", raising=False)
    names = ("slow", "quick")
    entries: dict[str, Any] = {}
    for name in names:
        redis = {"url": fresh_redis.url, "namespace": key[-32:]}
        options = {"redis": f"redis_{name}", "database": "postgres", "mode_lease": MODE_LEASE}
        entries[f"redis_{name}"] = {"BACKEND": REDIS_BACKEND, "OPTIONS": redis}
        entries[name] = {
            "BACKEND": "distlocks.backends.fastpath.FastPathBackend",
            "TTL": TTL,
            # What others hold in the table is not waited for.
            "KEY_PREFIX": key[-32:],
            "OPTIONS": {**options, "skew": 0.1},
        }
    with ExitStack() as opened:
        opened.enter_context(override_settings(DISTLOCKS={**settings.DISTLOCKS, **entries}))
        opened.callback(locks.close_all)
        slow, quick = (cast(FastPathBackend, locks[name]) for name in names)
        yield slow, quick


@pytest.mark.parametrize("counted_from", ["the first send", "the reply"])
def test_a_late_answer_does_not_make_a_lease_last_beyond_the_drain(
    slow_and_quick: tuple[FastPathBackend, FastPathBackend],
    key: str,
    gate: Callable[..., Gate],  # noqa: F811
    start: Callable[..., Future[Any]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    counted_from: str,
) -> None:
    slow, quick = slow_and_quick
    count_leases_from(counted_from, monkeypatch)
    # It has read who grants just before that changes, and does not come to read it again.
    db_lock(f"{key}:warm", backend="slow", timeout=0).acquire().release()
    monkeypatch.setattr(slow.authority, "look_soon", lambda: None)
    # The answer of Redis arrives when the next one has the lock from the database.
    answer = gate(slow, "try_acquire", after=True)
    coming = start(db_lock(key, backend="slow", timeout=0, renew=False).acquire)
    assert answer.arrived.wait(10)
    quick.authority.drain("the test")
    second = db_lock(key, backend="quick", timeout=20).acquire()
    answer.open()
    overlap = coming.result(10).deadline - on_lease_clock(second)
    assert overlap > TTL / 2 if counted_from == "the reply" else overlap < 0.001
    second.release()
