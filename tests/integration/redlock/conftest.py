"""Five Redis servers of these tests' own, and backends on them, through proxies or not."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.conf import settings
from django.core import mail
from django.test import override_settings

from distlocks import locks
from distlocks.backends.redlock import RedlockBackend
from distlocks.renewal import renewer
from tests.integration.contract.stores import start  # noqa: F401
from tests.servers import session
from tests.servers.proxy import FaultProxy
from tests.servers.redis_groups import IndependentGroup

REDLOCK = "distlocks.backends.redlock.RedlockBackend"
# Seconds. A node that is paused must not be taken for one that is slow on a busy machine.
TTL, NODE_TIMEOUT = 3.0, 0.5

Make = Callable[..., RedlockBackend]


@pytest.fixture(scope="package")
def group() -> Iterator[IndependentGroup]:
    """Any of them may be killed, paused and flushed; the next test finds them running."""
    found = session.private_group(IndependentGroup)
    if found is None:
        pytest.skip(session.without_program("Redis servers to be killed"))
    with found:
        yield found


@pytest.fixture
def five(group: IndependentGroup) -> Iterator[IndependentGroup]:
    group.heal()
    yield group
    for member in group.members:
        if member.running:
            member.resume()


@pytest.fixture
def proxies(five: IndependentGroup) -> Iterator[list[FaultProxy]]:
    """One before each server."""
    with ExitStack() as running:
        yield [
            running.enter_context(FaultProxy(member.host, member.port)) for member in five.members
        ]


@pytest.fixture
def make(
    five: IndependentGroup, databases: None, monkeypatch: pytest.MonkeyPatch, key: str
) -> Iterator[Make]:
    """`make("one", urls)`: the backend of an alias on these servers, of which nobody knows that
    they have been restarted."""
    # Else connections to stores are closed whenever no lease is held.
    monkeypatch.delattr(mail, "outbox", raising=False)
    with ExitStack() as changed:
        changed.callback(locks.close_all)
        changed.callback(renewer.releases.settle)

        def make(
            alias: str = "redlock",
            urls: list[str] | None = None,
            *,
            ttl: float = TTL,
            **options: Any,
        ) -> RedlockBackend:
            entry = {
                "BACKEND": REDLOCK,
                "TTL": ttl,
                "MAX_TTL": ttl,
                "OPTIONS": {
                    "servers": urls or [member.url for member in five.members],
                    "namespace": key[-32:],
                    "node_timeout": NODE_TIMEOUT,
                    "clock_skew": 0.1,
                    **options,
                },
            }
            changed.enter_context(override_settings(DISTLOCKS={**settings.DISTLOCKS, alias: entry}))
            backend = locks[alias]
            assert isinstance(backend, RedlockBackend)
            backend.quarantine(end=True)
            return backend

        yield make


def through(proxies: list[FaultProxy]) -> list[str]:
    """URLs of the servers behind them."""
    return [f"redis://{proxy.host}:{proxy.port}/0" for proxy in proxies]


def on_each(backend: RedlockBackend, key: str) -> list[str]:
    """The owner id of who has the key on each server; '' where nobody has."""
    name = backend.prefix + key
    found = []
    for node in backend.nodes:
        holders = node.half.holders(name)
        found.append(next((one.owner_id for one in holders if one.key == key), ""))
    return found
