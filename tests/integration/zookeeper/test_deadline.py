"""Until when a holder trusts a lease whose grant took long to arrive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from tests.integration.contract.stores import ZOOKEEPER_STORES, Gate, Store, for_stores
from tests.integration.late_answers import count_leases_from

TTL = 1.0


@for_stores(ZOOKEEPER_STORES)
@pytest.mark.parametrize("counted_from", ["the first send", "the reply"])
def test_a_late_answer_does_not_make_a_lease_last_beyond_its_end_for_others(
    store: Store,
    key: str,
    settings: Settings,
    start: Callable[..., Future[Any]],
    gate: Callable[..., Gate],
    monkeypatch: pytest.MonkeyPatch,
    counted_from: str,
) -> None:
    count_leases_from(counted_from, monkeypatch)
    entry = {**settings.DISTLOCKS[store.alias], "TTL": TTL}
    settings.DISTLOCKS = {**settings.DISTLOCKS, "slow": entry}
    slow = Store("slow")
    # The answer arrives when the next one, who has seen the lease from its beginning, has the lock.
    answer = gate(slow.backend, "try_acquire", after=True)
    coming = start(slow.lock(key, timeout=0, renew=False).acquire)
    assert answer.arrived.wait(10)
    second = store.lock(key, timeout=10).acquire()
    answer.open()
    first = coming.result(10)
    overlap = first.deadline - (second.deadline - second.ttl * 0.99)
    assert overlap > TTL / 2 if counted_from == "the reply" else overlap < 0.01
    second.release()
    slow.clean_up()
