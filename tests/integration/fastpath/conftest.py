"""The stores of a fast path, to be killed at will, and the process that forks the workers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings
from psycopg.sql import SQL, Identifier

from tests.integration.fastpath.scene import (
    MODE_LEASE,
    RETURN_AFTER,
    SKEW,
    TTL,
    Scene,
    Stores,
    TwoStores,
)
from tests.integration.nemesis.store import ALIAS
from tests.integration.nemesis.topologies import SOCKET_TIMEOUT
from tests.integration.rig import worker
from tests.integration.rig.conductor import Rig
from tests.servers import session
from tests.servers.children import Child, Spawner
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer
from tests.settings import REDIS_BACKEND

RUNNERS = 6
WORKER = "tests.integration.fastpath.worker.FastWorker"


@pytest.fixture(scope="package")
def stores(django_db_setup: None) -> Iterator[Stores]:
    with ExitStack() as started:
        servers: list[Any] = []
        for kind in (PostgresServer, RedisServer, RedisServer):
            server = session.private(kind)
            if server is None:
                pytest.skip(session.without_program(f"{kind.name} to be killed"))
            servers.append(started.enter_context(server))
        postgres, primary, replica = servers
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(SQL("CREATE DATABASE {}").format(Identifier(_database())))
        proxies = [started.enter_context(FaultProxy(primary.host, primary.port)) for _ in range(2)]
        yield Stores(postgres, primary, replica, *proxies)


def _database() -> str:
    return str(settings.DATABASES["postgres"]["NAME"])


@pytest.fixture(scope="package")
def fork_server(stores: Stores, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """The process that forks the workers. Its "postgres" is the server of these tests."""
    spawner = Spawner(tmp_path_factory.mktemp("fastpath"))
    child = spawner(worker.serve, env={PostgresServer.url_variable: stores.postgres.url})
    child.expect('{"who": "", "word": "ready"}')
    yield child
    # Its input is closed with it.
    child.kill()
    spawner.close()


@pytest.fixture
def stage(
    stores: Stores, fork_server: Child, databases: None, tmp_path: Path, key: str
) -> Iterator[Callable[..., Scene]]:
    """`stage()`: a scene with workers under way, Redis granting."""
    numbers = count()
    with ExitStack() as running:

        def make(keys: int = 3, *, runners: int = RUNNERS, least: int = 0, **plan: Any) -> Scene:
            stores.heal()
            store = TwoStores(stores.postgres.url, _database())
            running.callback(store.close)
            store.forget()
            number = next(numbers)
            folder = tmp_path / f"journals-{number}"
            folder.mkdir()
            entries = [
                {
                    "default": settings.DISTLOCKS["default"],
                    "redis": {
                        "BACKEND": REDIS_BACKEND,
                        "OPTIONS": {
                            "url": f"redis://{proxy.host}:{proxy.port}/0",
                            "namespace": f"{key[-12:]}{number}",
                            "connection": {"socket_timeout": SOCKET_TIMEOUT},
                        },
                    },
                    "database": settings.DISTLOCKS["postgres"],
                    ALIAS: {
                        "BACKEND": "distlocks.backends.fastpath.FastPathBackend",
                        "TTL": TTL,
                        "OPTIONS": {
                            "redis": "redis",
                            "database": "database",
                            "mode_lease": MODE_LEASE,
                            "skew": SKEW,
                            "return_after": RETURN_AFTER,
                        },
                    },
                }
                for proxy in stores.proxies
            ]
            rig = Rig(
                fork_server,
                store,
                folder,
                [f"{key}:{number}:{one}" for one in range(keys)],
                ttls=(1.0, TTL),
                least=least,
                worker=WORKER,
                database="postgres",
                stores=entries[0],
                **plan,
            )
            running.callback(rig.close)
            scene = Scene(stores, store, rig, entries)
            scene.begin(runners)
            return scene

        yield make
