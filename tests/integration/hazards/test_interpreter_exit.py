"""A process ends while it holds, renews and waits: quietly, and at once."""

from urllib.parse import urlsplit

from tests.integration.contract.stores import (
    KINDS_OF_SHARED_STORES,
    QUORUM_STORES,
    Store,
    for_stores,
)
from tests.integration.hazards import endings
from tests.integration.hazards.conftest import zookeeper_servers
from tests.integration.hazards.proxied import PROXIED_STORES
from tests.servers.base import Server
from tests.servers.children import Spawner
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer
from tests.servers.zookeeper import ZooKeeperEnsemble


@for_stores(("memory", *KINDS_OF_SHARED_STORES, *QUORUM_STORES))
def test_it_is_quiet(store: Store, key: str, spawn: Spawner) -> None:
    """Nothing on stderr, even if the end takes its time: no thread of ours trips over it."""
    child = spawn(endings.end_while_holding, store.alias, key)
    assert child.wait(timeout=15) == 0
    assert child.errors_about(key) == ""


@for_stores((*PROXIED_STORES, "advisory"))
def test_a_store_that_does_not_answer_is_not_waited_for(
    store: Store,
    key: str,
    spawn: Spawner,
    postgres_server: PostgresServer,
    redis_server: RedisServer,
) -> None:
    """A verb that hangs must not keep the process from ending."""
    server: Server = redis_server if store.alias == "redis" else postgres_server
    if store.alias == "zookeeper":
        server = zookeeper_servers()[0]
    with FaultProxy(server.host, server.port) as proxy:
        url = urlsplit(server.url)
        login, at, _ = url.netloc.rpartition("@")
        url = url._replace(netloc=f"{login}{at}{proxy.host}:{proxy.port}")
        child = spawn(
            endings.end_while_the_store_hangs,
            store.alias,
            key,
            env={
                server.url_variable: url.geturl(),
                ZooKeeperEnsemble.variable: f"{proxy.host}:{proxy.port}",
            },
        )
        child.expect("ready")
        proxy.mode = "blackhole"
        child.send()
        assert child.wait(timeout=6) == 0
        assert "Traceback" not in child.errors
