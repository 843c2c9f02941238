"""The servers and databases of one run, and the processes beside it."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.servers import finding, session
from tests.servers.children import Child, Spawner
from tests.servers.postgres import PostgresServer


@contextmanager
def environment(url: str | None) -> Iterator["Environment"]:
    """A PostgreSQL of our own, or the one at the URL, with a database of our own in it."""
    folder = session.open_folder()
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    url = url or os.environ.get(PostgresServer.url_variable)
    try:
        if url:
            server = PostgresServer(url=url)
        else:
            server = PostgresServer(finding.find([PostgresServer])[PostgresServer])
        with ExitStack() as stack:
            stack.enter_context(server)
            os.environ[PostgresServer.url_variable] = server.url
            found = Environment(server, folder)
            stack.callback(found.close)
            yield found
    finally:
        session.close()


class Environment:
    """Servers, databases, processes."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        import django
        import psycopg
        from django.conf import settings
        from django.core.management import call_command
        from psycopg.sql import SQL, Identifier

        self._server = server
        self._folder = folder
        self._database = settings.DATABASES["default"]["NAME"]
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(SQL("CREATE DATABASE {}").format(Identifier(self._database)))
        django.setup()
        for alias in settings.DATABASES:
            call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
        self.has = {peer: peer in settings.INSTALLED_APPS for peer in settings.PEERS}

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
        if not self._server.owned:
            self._server.drop(self._database)

    def versions(self) -> dict[str, str]:
        """What was measured, in order to be named beside the results."""
        import platform
        import sqlite3
        from importlib.metadata import PackageNotFoundError, version

        import django

        found = {
            "Python": platform.python_version(),
            "Django": django.__version__,
            "PostgreSQL": self.ask("SHOW server_version").split()[0],
            "SQLite": sqlite3.sqlite_version,
            "processors": str(os.cpu_count()),
        }
        for package in ("psycopg", "django-pglock", "django-db-mutex"):
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
