"""A process ends while it holds, renews and waits: quietly, and at once."""

from tests.integration.contract.stores import (
    KINDS_OF_SHARED_STORES,
    POSTGRES_STORES,
    Store,
    for_stores,
)
from tests.integration.hazards import endings
from tests.servers.children import Spawner
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy


@for_stores(("memory", *KINDS_OF_SHARED_STORES))
def test_it_is_quiet(store: Store, key: str, spawn: Spawner) -> None:
    """Nothing on stderr, even if the end takes its time: no thread of ours trips over it."""
    child = spawn(endings.end_while_holding, store.alias, key)
    assert child.wait(timeout=15) == 0
    assert child.errors == ""


@for_stores(POSTGRES_STORES)
def test_a_store_that_does_not_answer_is_not_waited_for(
    store: Store, key: str, spawn: Spawner, postgres_server: PostgresServer
) -> None:
    """A verb that hangs must not keep the process from ending."""
    with FaultProxy(postgres_server.host, postgres_server.port) as proxy:
        url = f"postgresql://{postgres_server.user}@{proxy.host}:{proxy.port}/postgres"
        child = spawn(
            endings.end_while_the_store_hangs,
            store.alias,
            key,
            env={PostgresServer.url_variable: url},
        )
        child.expect("ready")
        proxy.mode = "blackhole"
        child.send()
        assert child.wait(timeout=6) == 0
        assert "Traceback" not in child.errors
