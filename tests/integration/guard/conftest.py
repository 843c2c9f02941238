import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from django.core import mail
from django.db import connections

from distlocks import locks
from tests.integration.guard.sites import DATABASES, Site


@pytest.fixture
def production(databases: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All databases and the library as production code finds them.

    Under Django's test environment, connections to stores are closed whenever no lease is held.
    """
    monkeypatch.delattr(mail, "outbox", raising=False)
    yield
    locks.close_all()


@pytest.fixture(
    params=[(using, store) for using, own in DATABASES.items() for store in (own, "memory")],
    ids=lambda pair: f"{pair[1]} lock, {pair[0]} data",
)
def site(request: pytest.FixtureRequest, production: None) -> Site:
    """Each database with locks in that database, and with locks elsewhere."""
    return Site(*request.param)


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, production: None) -> Site:
    """Each database, with locks in it."""
    return Site(request.param, DATABASES[request.param])


@pytest.fixture
def add_alias(monkeypatch: pytest.MonkeyPatch, production: None) -> Iterator[Callable[..., str]]:
    """`add_alias("postgres", CONN_MAX_AGE=0)`: the same database in other settings; its alias."""
    added: list[str] = []

    def add(like: str, **changes: Any) -> str:
        alias = f"{like}_{len(added)}"
        settings = copy.deepcopy(connections.databases[like])
        settings["OPTIONS"] = settings["OPTIONS"] | changes.pop("OPTIONS", {})
        monkeypatch.setitem(connections.databases, alias, settings | changes)
        added.append(alias)
        return alias

    yield add
    locks.close_all()
    for alias in added:
        with suppress(Exception):
            connections[alias].close()
        with suppress(AttributeError):
            del connections[alias]


@pytest.fixture
def start(production: None) -> Iterator[Callable[..., Future[Any]]]:
    """`start(function, *args)` in a thread of its own; its connections are closed at its end."""
    with ThreadPoolExecutor(16, thread_name_prefix="rival") as pool:

        def run(function: Callable[..., Any], *args: Any) -> Any:
            try:
                return function(*args)
            finally:
                connections.close_all()

        yield lambda function, *args: pool.submit(run, function, *args)
