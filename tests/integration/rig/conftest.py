"""The rig's server, the process that forks its workers, and the stores."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings
from psycopg.sql import SQL, Identifier

from tests.integration.rig import worker
from tests.integration.rig.conductor import Rig
from tests.integration.rig.store import (
    AdvisoryStore,
    MariaDBStore,
    ObservablePostgres,
    PostgresStore,
    SQLiteStore,
    Store,
)
from tests.servers import session
from tests.servers.children import Child, Spawner
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer


@pytest.fixture(scope="package")
def rig_postgres(django_db_setup: None) -> Iterator[str]:
    """The URL of a PostgreSQL of the rig's own, or, where there is no program, of the run's."""
    server = session.private(ObservablePostgres)
    if server is None:
        yield session.server(PostgresServer).url
        return
    with server, psycopg.connect(server.url, autocommit=True) as connection:
        name = settings.DATABASES["postgres"]["NAME"]
        connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        yield server.url


@pytest.fixture(scope="package")
def fork_server(rig_postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """The process that forks the workers."""
    spawner = Spawner(tmp_path_factory.mktemp("rig"))
    child = spawner(worker.serve, env={PostgresServer.url_variable: rig_postgres})
    child.expect('{"who": "", "word": "ready"}')
    yield child
    # Its input is closed with it.
    child.kill()
    spawner.close()


@pytest.fixture
def stores(rig_postgres: str, fork_server: Child) -> Iterator[dict[str, Store]]:
    found: dict[str, Store] = {
        "sqlite": SQLiteStore(str(settings.DATABASES["default"]["NAME"])),
        "postgres": PostgresStore(rig_postgres, settings.DATABASES["postgres"]["NAME"]),
        "advisory": AdvisoryStore(rig_postgres, settings.DATABASES["postgres"]["NAME"]),
        "mariadb": MariaDBStore(
            session.server(MariaDBServer), settings.DATABASES["mariadb"]["NAME"]
        ),
    }
    yield found
    for store in found.values():
        store.close()


@pytest.fixture
def make_rig(
    fork_server: Child, stores: dict[str, Store], tmp_path: Path, key: str
) -> Iterator[Callable[..., Rig]]:
    """`make_rig("postgres", 10)`: a rig on a store, over that many keys that no other test uses."""
    numbers = count()
    with ExitStack() as running:

        def make(store: str, keys: int = 1, **plan: Any) -> Rig:
            folder = tmp_path / f"journals-{key}-{next(numbers)}"
            folder.mkdir()
            names = [f"{folder.name}-{number}" for number in range(keys)]
            rig = Rig(fork_server, stores[store], folder, names, **plan)
            running.callback(rig.close)
            return rig

        yield make
