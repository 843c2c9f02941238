import copy
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connections
from pytest_django.fixtures import Settings

from distlocks import locks
from distlocks.renewal import renewer
from tests.integration.contract.stores import (  # noqa: F401
    Store,
    gate,
    moved_clock,
    pytest_generate_tests,
    pytest_pyfunc_call,
    start,
    stop,
    store,
    told,
)
from tests.integration.hazards.proxied import Proxied
from tests.servers import session
from tests.servers.base import Server
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer
from tests.servers.zookeeper import ZooKeeperEnsemble, ZooKeeperServer
from tests.statements import watched
from tests.waiting import eventually


def releases_to_come(alias: str) -> list[Any]:
    """What could not be given back yet, or is to be looked at again."""
    return [late for late in renewer.releases.to_come() if late.backend.alias == alias]


def zookeeper_servers() -> list[ZooKeeperServer]:
    """Of the run's ensemble."""
    ensemble = session.group(ZooKeeperEnsemble)
    assert ensemble is not None
    return ensemble.members


@pytest.fixture
def proxied(
    store: Store,  # noqa: F811
    postgres_server: PostgresServer,
    redis_server: RedisServer,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Proxied]:
    """The store, which is on PostgreSQL, Redis or ZooKeeper, under another alias that reaches it
    through a proxy.
    """
    server: Server = redis_server if store.alias == "redis" else postgres_server
    if store.alias == "zookeeper":
        server = zookeeper_servers()[0]
    entry = copy.deepcopy(settings.DISTLOCKS[store.alias])
    with FaultProxy(server.host, server.port) as proxy:
        if store.alias == "redis":
            url = urlsplit(entry["OPTIONS"]["url"])
            login, at, _ = url.netloc.rpartition("@")
            there = f"{login}{at}{proxy.host}:{proxy.port}"
            entry["OPTIONS"]["url"] = url._replace(netloc=there).geturl()
        elif store.alias == "zookeeper":
            entry["OPTIONS"] |= {"hosts": f"{proxy.host}:{proxy.port}", "timeout": 1.5}
        else:
            database = copy.deepcopy(connections["postgres"].settings_dict)
            database |= {"HOST": proxy.host, "PORT": str(proxy.port)}
            connections.databases["proxied"] = database
            entry["OPTIONS"]["using"] = "proxied"
        settings.DISTLOCKS = {**settings.DISTLOCKS, "proxied": entry}
        client = Proxied("proxied", proxy)
        if store.alias == "zookeeper":
            from distlocks.backends.zookeeper.client import Client

            monkeypatch.setattr(Client, "_call", client.watch_zookeeper(Client._call))
        with watched(client.before, client.alias):
            yield client
        proxy.mode = "pass"
        proxy.cut()
        client.clean_up()
        # What is still to be given back is not to be tried in vain beside the tests after this.
        eventually(lambda: not renewer.releases.pending and not releases_to_come("proxied"))
        locks.close_all()
        if "proxied" in connections.databases:
            connections["proxied"].close()
            del connections["proxied"]
            del connections.databases["proxied"]
