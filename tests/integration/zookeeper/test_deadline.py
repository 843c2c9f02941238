"""Until when a holder trusts a lease whose grant took long to arrive."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from distlocks import Lease, acquisition
from distlocks.clock import lease_now
from tests.integration.contract.stores import ZOOKEEPER_STORES, Store, for_stores
from tests.integration.contract.zookeeper_stores import ZooKeeperStore
from tests.servers.proxy import FaultProxy
from tests.waiting import eventually

TTL = 2.0
# Seconds: of each answer.
DELAY = 0.3


@for_stores(ZOOKEEPER_STORES)
@pytest.mark.parametrize("counted_from", ["the first send", "the reply"])
def test_a_late_answer_does_not_make_a_lease_last_beyond_its_end_for_others(
    store: ZooKeeperStore,
    key: str,
    settings: Settings,
    start: Callable[..., Future[Any]],
    monkeypatch: pytest.MonkeyPatch,
    counted_from: str,
) -> None:
    if counted_from == "the reply":

        def counted_late(*args: Any, first_send: float, **options: Any) -> Lease:
            return Lease(*args, first_send=lease_now(), **options)

        monkeypatch.setattr(acquisition, "Lease", counted_late)
    host, _, port = store.zookeeper.settings.hosts.split(",")[0].partition(":")
    with FaultProxy(host, int(port), delay=DELAY) as proxy:
        entry = settings.DISTLOCKS[store.alias]
        options = {**entry["OPTIONS"], "hosts": f"{proxy.host}:{proxy.port}", "timeout": 2.0}
        entry = {**entry, "TTL": TTL, "OPTIONS": options}
        settings.DISTLOCKS = {**settings.DISTLOCKS, "slow": entry}
        slow = Store("slow")
        # Connected, and the key is there.
        slow.hold(key).release()
        proxy.answers = "delay"
        coming = start(slow.lock(key, timeout=0, renew=False).acquire)
        eventually(lambda: not store.is_free(key))
        # It sees the lease from its beginning, and waits for nothing but its end.
        heir = start(store.lock(key, timeout=10).acquire)
        first = coming.result(10)
        second = heir.result(10)
        began = lease_now() - (second.ttl * 0.99 - second.remaining)
        overlap = first.deadline - began
        if counted_from == "the reply":
            assert overlap > DELAY / 2
        else:
            assert overlap < 0.01
        second.release()
        proxy.mode = "pass"
        first.release()
        slow.clean_up()
