"""The stores that the rig runs on, seen from outside: by plain drivers, not through the library."""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import psycopg

from distlocks.backends.database import mariadb, postgresql, sqlite
from tests.integration.rig import checker
from tests.integration.rig.observer import Observer, check_versions
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer


class ObservablePostgres(PostgresServer):
    """PostgreSQL that writes enough into its log to read back from it what became of each row."""

    def command(self) -> list[str]:
        return [*super().command(), "-c", "wal_level=logical"]


class Store(ABC):
    """One database with the lock table, and with accounts that the locks protect."""

    # Of DISTLOCKS, in the workers.
    alias: ClassVar[str]
    placeholder: ClassVar[str]

    @abstractmethod
    def execute(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        """Run a statement in autocommit."""

    @abstractmethod
    def now_us(self) -> int:
        """The server's clock."""

    def waits_for_row(self) -> bool:
        """Whether somebody waits, in a statement or between two, for a row that another has in its
        hands."""
        raise NotImplementedError

    def is_writable(self) -> bool:
        """False if some process stands still in the middle of what no other can get past."""
        return True

    def open_accounts(self, keys: Iterable[str]) -> None:
        query = f"INSERT INTO testapp_account (name, balance) VALUES ({self.placeholder}, 0)"
        for key in keys:
            self.execute(query, key)

    def report(self, events: Sequence[checker.Event]) -> checker.Report:
        """What the journals show, and what the accounts hold."""
        balances = dict(self.execute("SELECT name, balance FROM testapp_account"))
        return checker.check(events, balances)

    def close(self) -> None:
        """Give up the connection."""


class SQLiteStore(Store):
    alias = "sqlite"
    placeholder = "?"

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=5)

    def execute(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, params).fetchall()

    def now_us(self) -> int:
        return int(self.execute(f"SELECT {sqlite.US}")[0][0])

    def is_writable(self) -> bool:
        self.execute("PRAGMA busy_timeout = 300")
        try:
            self.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            # Time for the one that stood still to get out of there, once it goes on.
            return False
        self.execute("ROLLBACK")
        return True

    def close(self) -> None:
        self._connection.close()


class PostgresStore(Store):
    alias = "postgres"
    placeholder = "%s"

    def __init__(self, url: str, database: str) -> None:
        self._url, self._database = url, database
        self._connection = psycopg.connect(url, dbname=database, autocommit=True)
        # Somebody else's server may not let its log be read.
        self._observable = self.execute("SHOW wal_level") == [("logical",)]
        self._observer: Observer | None = None

    def execute(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(query, params or None)  # type: ignore[call-overload]
        return cursor.fetchall() if cursor.description else []

    def now_us(self) -> int:
        return int(self.execute(f"SELECT {postgresql.US}")[0][0])

    def waits_for_row(self) -> bool:
        return bool(
            self.execute(
                "SELECT 1 FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )

    def has_sleeper(self, key: str) -> bool:
        """Whether somebody has left word that it sleeps beside the key."""
        return self.execute("SELECT waiting_until > 0 FROM distlocks_lock WHERE key = %s", key) == [
            (True,)
        ]

    def open_accounts(self, keys: Iterable[str]) -> None:
        super().open_accounts(keys)
        if self._observable:
            self._observer = Observer(self._url, self._database)

    def report(self, events: Sequence[checker.Event]) -> checker.Report:
        report = super().report(events)
        if self._observer is not None:
            with self._observer as observer:
                seen = check_versions(observer.versions(), checker.holds(events))
            self._observer = None
            report.violations += seen.violations
            report.counts.update({f"{name} in the log": n for name, n in seen.counts.items()})
        return report

    def close(self) -> None:
        if self._observer is not None:
            self._observer.__exit__()
        self._connection.close()


class AdvisoryStore(PostgresStore):
    """The same database, with locks of the server's own, of which its log tells nothing."""

    alias = "advisory"

    def open_accounts(self, keys: Iterable[str]) -> None:
        Store.open_accounts(self, keys)


class MariaDBStore(Store):
    alias = "mariadb"
    placeholder = "%s"

    def __init__(self, server: MariaDBServer, database: str) -> None:
        self._server = server
        self._connection = server.connect(database)
        self._inserts = 0

    def execute(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(query, params or None)
            return list(cursor.fetchall())

    def now_us(self) -> int:
        return int(self.execute(f"SELECT {mariadb.US}")[0][0])

    def waits_for_row(self) -> bool:
        if self.execute(
            "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        ):
            return True
        # Who does not wait inside the statement sends it again.
        before, self._inserts = (
            self._inserts,
            int(self.execute("SHOW GLOBAL STATUS LIKE 'Com_insert'")[0][1]),
        )
        return 0 < before < self._inserts

    def close(self) -> None:
        self._connection.close()
