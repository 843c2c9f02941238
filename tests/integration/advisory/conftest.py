"""Advisory locks on the run's PostgreSQL, on ways around it, and on one to be killed."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from django.conf import settings
from django.core import mail
from django.core.management import call_command
from django.db import connections
from django.test import override_settings

from distlocks import locks
from tests.integration.contract.advisory_stores import AdvisoryStore
from tests.integration.contract.stores import told  # noqa: F401
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy

Way = Callable[..., AdvisoryStore]
Start = Callable[..., Future[Any]]


@pytest.fixture
def way(databases: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """`way("slow", HOST=…, OPTIONS=…)`: the store of that alias, by a database of other settings.

    `options` are the backend's.
    """
    monkeypatch.delattr(mail, "outbox", raising=False)
    with ExitStack() as stack:
        stack.callback(locks.close_all)

        def make(
            alias: str = "advisory", *, options: dict[str, Any] | None = None, **database: Any
        ) -> AdvisoryStore:
            using = "postgres"
            if database:
                using = f"{alias}_database"
                entry = copy.deepcopy(connections["postgres"].settings_dict) | database
                connections.databases[using] = entry
                stack.callback(_forget, using)
            entry = {
                **settings.DISTLOCKS["advisory"],
                "OPTIONS": {"using": using, **(options or {})},
            }
            stack.enter_context(override_settings(DISTLOCKS={**settings.DISTLOCKS, alias: entry}))
            store = AdvisoryStore(alias)
            stack.callback(store.clean_up)
            return store

        yield make


def _forget(using: str) -> None:
    connections[using].close()
    del connections[using]
    del connections.databases[using]


@pytest.fixture
def start(way: Way) -> Iterator[Start]:
    """`start(function, *args)` in a thread of its own; its connections are closed at its end."""
    with ThreadPoolExecutor(16, thread_name_prefix="rival") as pool:

        def run(function: Callable[..., Any], *args: Any) -> Any:
            try:
                return function(*args)
            finally:
                connections.close_all()

        yield lambda function, *args: pool.submit(run, function, *args)


@pytest.fixture
def store(way: Way) -> AdvisoryStore:
    return way()


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[FaultProxy]:
    with FaultProxy(postgres_server.host, postgres_server.port) as proxy:
        yield proxy
        proxy.mode = "pass"
        proxy.cut()


@pytest.fixture
def proxied(way: Way, proxy: FaultProxy) -> AdvisoryStore:
    """The store, reached through the proxy."""
    return way("proxied", HOST=proxy.host, PORT=str(proxy.port))


@pytest.fixture
def mortal(way: Way, fresh_postgres: PostgresServer) -> AdvisoryStore:
    """The store on a server that may be killed, with its tables."""
    store = way("mortal", HOST=fresh_postgres.host, PORT=str(fresh_postgres.port), NAME="postgres")
    call_command("migrate", database=store.using, run_syncdb=True, verbosity=0)
    return store
