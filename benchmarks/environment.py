"""The servers and databases of one run, and the processes beside it."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from tests.servers import finding, session
from tests.servers.base import Server
from tests.servers.children import Child, Spawner
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer

Kind = type[Server]
# Whose versions are named beside the results.
PACKAGES: Mapping[Kind, tuple[str, ...]] = {
    PostgresServer: ("psycopg", "django-pglock", "django-db-mutex"),
    RedisServer: ("redis", "python-redis-lock", "django-redis", "redlock-ng", "pottery"),
}


@contextmanager
def environment(wanted: Mapping[Kind, str | None]) -> Iterator["Environment"]:
    """Servers of our own, or those at the URLs, with databases of our own in them."""
    folder = session.open_folder()
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    try:
        with ExitStack() as stack:
            servers = {}
            for kind in PACKAGES:
                url = os.environ.pop(kind.url_variable, None)
                if kind in wanted:
                    server = stack.enter_context(_server(kind, wanted[kind] or url))
                    os.environ[kind.url_variable] = server.url
                    servers[kind] = server
            found = Environment(servers, folder)
            stack.callback(found.close)
            yield found
    finally:
        session.close()


def _server(kind: Kind, url: str | None) -> Server:
    return kind(url=url) if url else kind(finding.find([kind])[kind])


class Environment:
    """Servers, databases, processes."""

    def __init__(self, servers: Mapping[Kind, Server], folder: Path) -> None:
        import django
        from django.conf import settings
        from django.core.management import call_command

        self._servers = servers
        self._folder = folder
        if PostgresServer in servers:
            self._create_database()
        if RedisServer in servers:
            self._open_redis()
        django.setup()
        for alias in settings.DATABASES:
            call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
        self.has = {peer: peer in settings.INSTALLED_APPS for peer in settings.PEERS}

    def _create_database(self) -> None:
        import psycopg
        from django.conf import settings
        from psycopg.sql import SQL, Identifier

        self._database = settings.DATABASES["default"]["NAME"]
        with psycopg.connect(self._servers[PostgresServer].url, autocommit=True) as connection:
            connection.execute(SQL("CREATE DATABASE {}").format(Identifier(self._database)))

    def _open_redis(self) -> None:
        import redis

        self.redis = redis.Redis.from_url(self._servers[RedisServer].url)
        if self.redis.dbsize():
            raise SystemExit("There is something in this database of Redis: name an empty one.")

    @contextmanager
    def processes(self) -> Iterator["Processes"]:
        """Starts processes, and ends them with the block."""
        folder = self._folder / f"processes-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        spawner = Spawner(folder)
        try:
            yield Processes(spawner)
        finally:
            spawner.close()

    def close(self) -> None:
        from django.db import connections

        from distlocks import locks

        locks.close_all()
        connections.close_all()
        postgres = self._servers.get(PostgresServer)
        if isinstance(postgres, PostgresServer) and not postgres.owned:
            postgres.drop(self._database)
        if RedisServer in self._servers:
            self.redis.flushdb()
            self.redis.close()

    def versions(self) -> dict[str, str]:
        """What was measured, in order to be named beside the results."""
        import platform
        import sqlite3
        from importlib.metadata import PackageNotFoundError, version

        import django

        found = {
            "Python": platform.python_version(),
            "Django": django.__version__,
            "SQLite": sqlite3.sqlite_version,
            "processors": str(os.cpu_count()),
        }
        if PostgresServer in self._servers:
            found["PostgreSQL"] = self.ask("SHOW server_version").split()[0]
        if RedisServer in self._servers:
            found["Redis"] = self.redis.info("server")["redis_version"]
        for package in chain.from_iterable(PACKAGES[kind] for kind in self._servers):
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                found[package] = "not installed"
        return found

    def ask(self, query: str, *params: object) -> Any:
        """The one value that a query answers on PostgreSQL."""
        return self.row(query, *params)[0]

    def row(self, query: str, *params: object) -> tuple[Any, ...]:
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute(query, params or None)
            row: tuple[Any, ...] = cursor.fetchone()
            return row

    def run(self, query: str, *params: object) -> None:
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute(query, params or None)

    def empty_table(self) -> None:
        """As freshly migrated, statistics too."""
        self.run("TRUNCATE distlocks_lock")
        self.run("SELECT pg_stat_reset()")

    def sizes(self) -> tuple[int, int]:
        """Bytes of the lock table and of its indexes."""
        table, indexes = self.row(
            "SELECT pg_table_size('distlocks_lock'), pg_indexes_size('distlocks_lock')"
        )
        return table, indexes

    def updates(self) -> tuple[int, int]:
        """Updates of the lock table so far, and how many were made in place (HOT)."""
        in_all, in_place = self.row(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
            "WHERE relname = 'distlocks_lock'"
        )
        return in_all, in_place


class Processes:
    """Processes that do what they are told, one function call after the other."""

    def __init__(self, spawner: Spawner) -> None:
        self._spawner = spawner

    def start(self, module: str, count: int = 1) -> "list[Process]":
        """Processes that know the functions of a module of this package."""
        started = [Process(self._spawner(serve, module)) for _ in range(count)]
        for process in started:
            process.answer()
        return started


class Process:
    def __init__(self, child: Child) -> None:
        self._child = child

    def begin(self, function: str, *args: Any) -> None:
        self._child.send(json.dumps([function, args]))

    def answer(self, timeout: float = 3600) -> Any:
        """What the function has returned."""
        return json.loads(self._child.readline(timeout))

    def call(self, function: str, *args: Any) -> Any:
        self.begin(function, *args)
        return self.answer()


def serve(module: str) -> None:
    """The process' side."""
    import sys
    from importlib import import_module

    functions: dict[str, Callable[..., Any]] = vars(import_module(module))
    print(json.dumps("ready"))
    for line in sys.stdin:
        name, args = json.loads(line)
        print(json.dumps(functions[name](*args)))
