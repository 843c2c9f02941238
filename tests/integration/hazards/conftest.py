import copy
from collections.abc import Iterator

import pytest
from django.db import connections
from django.db.backends.signals import connection_created
from pytest_django.fixtures import Settings

from distlocks import locks
from tests.integration.contract.stores import (  # noqa: F401
    Store,
    gate,
    moved_clock,
    pytest_generate_tests,
    start,
    store,
    told,
)
from tests.integration.hazards.proxied import Proxied
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy


@pytest.fixture
def proxied(
    store: Store,  # noqa: F811
    postgres_server: PostgresServer,
    settings: Settings,
) -> Iterator[Proxied]:
    """The store, which is on PostgreSQL, under another alias that reaches it through a proxy."""
    database = copy.deepcopy(connections["postgres"].settings_dict)
    with FaultProxy(postgres_server.host, postgres_server.port) as proxy:
        connections.databases["proxied"] = database | {"HOST": proxy.host, "PORT": str(proxy.port)}
        entry = copy.deepcopy(settings.DISTLOCKS[store.alias])
        entry["OPTIONS"]["using"] = "proxied"
        settings.DISTLOCKS = {**settings.DISTLOCKS, "proxied": entry}
        client = Proxied("proxied", proxy)
        connection_created.connect(client.watch)
        yield client
        connection_created.disconnect(client.watch)
        proxy.mode = "pass"
        proxy.cut()
        client.clean_up()
        locks.close_all()
        connections["proxied"].close()
        del connections["proxied"]
        del connections.databases["proxied"]
