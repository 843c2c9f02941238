"""A server that counts."""

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from django.conf import settings
from psycopg.sql import SQL, Identifier

from tests.benchmarks import children
from tests.servers import session
from tests.servers.children import Child, Spawner
from tests.servers.postgres import PostgresServer


class QuietPostgres(PostgresServer):
    """PostgreSQL that does nothing of its own accord while we count."""

    def command(self) -> list[str]:
        return [*super().command(), "-c", "autovacuum=off"]


class Counter:
    """One database on a server of our own, with what the server knows of it."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self._server = server
        self._database = str(settings.DATABASES["postgres"]["NAME"])
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(SQL("CREATE DATABASE {}").format(Identifier(self._database)))
        self.connection = psycopg.connect(server.url, dbname=self._database, autocommit=True)
        self.spawner = Spawner(folder)
        self.spawn(children.migrate).result()
        self._log_at = 0

    def forget(self) -> None:
        self.connection.execute("TRUNCATE distlocks_lock")
        self.connection.execute(
            SQL("ALTER DATABASE {} RESET log_statement").format(Identifier(self._database))
        )

    def spawn(self, *call: object) -> Child:
        """Run a function beside the test, on this database."""
        return self.spawner(*call, env={PostgresServer.url_variable: self._server.url})  # type: ignore[arg-type]

    def ask(self, query: str) -> object:
        """The one value that a query answers."""
        row = self.connection.execute(query).fetchone()  # type: ignore[call-overload]
        return row[0]

    def count_statements(self) -> None:
        """From now on, let the server write down each statement of new sessions."""
        self.connection.execute(
            SQL("ALTER DATABASE {} SET log_statement = 'all'").format(Identifier(self._database))
        )

    def reset(self) -> None:
        self._log_at = len(self._server.log)

    def statements(self) -> list[str]:
        """What the server was asked since reset(), one line for each round trip."""
        lines = self._server.log[self._log_at :].splitlines()
        asked = (line.partition("LOG:  ")[2] for line in lines)
        return [line for line in asked if line.startswith(("statement: ", "execute "))]

    def close(self) -> None:
        self.spawner.close()
        self.connection.close()


@pytest.fixture(scope="package")
def counting_server() -> Iterator[PostgresServer]:
    server = session.private(QuietPostgres)
    if server is None:
        pytest.skip("somebody else's PostgreSQL does not show us its log, and no other is here")
    with server:
        yield server


@pytest.fixture(scope="package")
def one_counter(
    counting_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Counter]:
    counter = Counter(counting_server, tmp_path_factory.mktemp("counter"))
    yield counter
    counter.close()


@pytest.fixture
def counter(one_counter: Counter) -> Counter:
    """With an empty table, and statements not written down."""
    one_counter.forget()
    return one_counter


class Stepper:
    """A process beside the test that does what it is told, step by step."""

    def __init__(self, child: Child) -> None:
        self._child = child
        child.expect("ready")

    def __call__(self, line: str) -> None:
        """Let it do a step of `children.STEPS`, with its arguments."""
        self.begin(line)
        self.finish()

    def begin(self, line: str) -> None:
        self._child.send(line)

    def finish(self) -> None:
        self._child.expect("done")

    def stop(self) -> None:
        self.begin("stop")
        self._child.result()


@pytest.fixture
def stepper(counter: Counter) -> Iterator[Callable[[], Stepper]]:
    """Starts processes whose statements are counted."""
    started: list[Stepper] = []

    def start() -> Stepper:
        started.append(Stepper(counter.spawn(children.steps)))
        return started[-1]

    counter.count_statements()
    yield start
    for stepper in started:
        stepper.stop()
