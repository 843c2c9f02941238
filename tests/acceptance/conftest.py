"""Server processes of the demo project, on a database and, if it is Redis, a lock store of their
own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from project.redis_server import running_redis
from project.servers import BASE_DIR, Server, running_servers
from tests.servers import session
from tests.servers.postgres import PostgresServer
from tests.servers.zookeeper import ZooKeeperEnsemble

# Short, so that a killed server's jobs come free soon.
LEASE_SECONDS = 2.0
INTERVAL_SECONDS = 1.0
JOB_LIMIT = 6
# Where the locks may be, for most tests; and where else: see test_every_store.
BACKENDS = ("database", "redis")
OTHER_BACKENDS = ("redlock", "zookeeper", "advisory")


def environment(database: Path, store: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a command of the demo project: not the settings of the tests, nor of who runs them."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DEMO_")}
    return {
        **inherited,
        "DJANGO_SETTINGS_MODULE": "project.settings",
        "DEMO_DATABASE": str(database),
        "DEMO_BACKEND": "database",
        "PYTHONUNBUFFERED": "1",
        **(store or {}),
    }


@contextmanager
def locks_in(backend: str, database: Path) -> Iterator[dict[str, str]]:
    """What processes have to know for their locks to be there, in a store that grants some."""
    with ExitStack() as running:
        store = {"DEMO_BACKEND": backend, **STORES[backend](running)}
        if backend in ("redis", "redlock"):
            manage(database, store, "lock_quarantine", "--end", "--no-input")
        if backend == "advisory":
            manage(database, store, "migrate", "--database", "locks", "--verbosity", "0")
        yield store


def _redis(running: ExitStack) -> dict[str, str]:
    return {"DEMO_REDIS_URL": running.enter_context(running_redis())}


def _redlock(running: ExitStack) -> dict[str, str]:
    urls = [running.enter_context(running_redis()) for _ in range(5)]
    return {"DEMO_REDLOCK_URLS": ",".join(urls)}


def _zookeeper(running: ExitStack) -> dict[str, str]:
    group = session.group(ZooKeeperEnsemble)
    assert group is not None
    return {"DEMO_ZOOKEEPER_HOSTS": group.addresses}


def _advisory(running: ExitStack) -> dict[str, str]:
    import psycopg
    from psycopg.sql import SQL, Identifier

    server = session.server(PostgresServer)
    name = f"demo_{uuid.uuid4().hex}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
    running.callback(server.drop, name)
    return {"DEMO_POSTGRES_URL": urlsplit(server.url)._replace(path=f"/{name}").geturl()}


STORES: dict[str, Callable[[ExitStack], dict[str, str]]] = {
    "database": lambda running: {},
    "redis": _redis,
    "redlock": _redlock,
    "zookeeper": _zookeeper,
    "advisory": _advisory,
}


def manage(database: Path, store: Mapping[str, str], *arguments: str) -> None:
    """Run a command of the demo project."""
    command = [sys.executable, "manage.py", *arguments]
    subprocess.run(command, cwd=BASE_DIR, env=environment(database, store), check=True, timeout=60)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables, to be copied."""
    database = tmp_path_factory.mktemp("migrated") / "demo.sqlite3"
    manage(database, {}, "migrate", "--verbosity", "0")
    return database


@contextmanager
def two_servers(folder: Path, migrated: Path, store: Mapping[str, str]) -> Iterator[list[Server]]:
    """Servers alpha and beta on a fresh database in `folder`, which also takes their logs."""
    database = folder / "demo.sqlite3"
    shutil.copy(migrated, database)
    numbers = {
        "DEMO_LEASE_SECONDS": str(LEASE_SECONDS),
        "DEMO_INTERVAL_SECONDS": str(INTERVAL_SECONDS),
        "DEMO_JOB_LIMIT": str(JOB_LIMIT),
    }
    with running_servers(
        {"alpha": 0, "beta": 0}, database, log_dir=folder, environment={**numbers, **store}
    ) as servers:
        yield servers


@pytest.fixture(scope="module", params=BACKENDS)
def store(request: pytest.FixtureRequest, migrated: Path) -> Iterator[dict[str, str]]:
    """Where the locks of `servers` are, as environment variables."""
    with locks_in(request.param, migrated) as found:
        yield found


@pytest.fixture(scope="module")
def servers(
    store: dict[str, str], migrated: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """Two servers for all tests of a module, which use jobs of their own."""
    with two_servers(tmp_path_factory.mktemp("servers"), migrated, store) as both:
        yield both


@pytest.fixture(params=BACKENDS)
def mortal_servers(
    request: pytest.FixtureRequest, migrated: Path, tmp_path: Path
) -> Iterator[list[Server]]:
    """Two servers for a test that does not leave them as they were."""
    with (
        locks_in(request.param, migrated) as store,
        two_servers(tmp_path, migrated, store) as both,
    ):
        yield both
