"""On which connection a statement of ours runs."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from django.db import (
    DatabaseError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper

from ...exceptions import BackendUnavailable
from ...threads import JobThreads
from ..offload import submit

T = TypeVar("T")


class NotAll(Exception):
    """A key of several is taken: undo the others. Raised by work on purpose."""


Row = tuple[Any, ...]

# SQLSTATEs of a prepared statement that the server does not know, because a pooling proxy has
# passed us to another session, or that no longer fits its table.
PREPARED_IS_GONE = ("26000", "0A000")

# SQLSTATE of a name that is prepared already, by another client of a pooling proxy. The name is a
# digest of the text, so it is the same statement; but the error may have broken a transaction.
PREPARED_ALREADY = "42P05"

# How often work whose connection broke is done again: a server that restarts ends sessions that
# have only just begun.
RESENDS = 2

# What MariaDB's and MySQL's drivers say of a session that is gone. Asked whether the connection is
# usable, they connect anew and say yes.
SESSION_IS_GONE = (1927, 2006, 2013, 4031)

# Seconds after which the server ends a session of ours that is idle inside a transaction. Its
# process stands still, or has left the network, and others wait for the rows that it has in its
# hands; between two statements of ours lie microseconds.
IDLE_IN_TRANSACTION = 2

# A table or a column that there is not: PostgreSQL; MariaDB and MySQL. SQLite has words for it.
UNDEFINED = ("42P01", "42703", 1146, 1054)
UNDEFINED_IN_SQLITE = ("no such table", "no such column", "has no column named")

# How long a thread waits for another one's statement on the shared connection: longer than any
# statement of ours takes on a server that answers.
MUTEX_WAIT = 10.0


class Session:
    """A connection with which a dialect speaks."""

    def __init__(
        self, wrapper: BaseDatabaseWrapper, *, begin: str = "", is_callers: bool = False
    ) -> None:
        self.wrapper = wrapper
        # The connection of the code that called, rather than one of ours.
        self.is_callers = is_callers
        # The statement that begins a transaction on a connection that Django does not know of.
        self._begin = begin
        # Names of statements that the server has prepared for this connection, with the moment on
        # the lease clock; None where they must not be used.
        self.prepared: dict[str, float] | None = {} if begin else None
        self._cursor: Any = None

    @property
    def in_callers_transaction(self) -> bool:
        return self.is_callers and self.wrapper.in_atomic_block

    def execute(self, sql: str, params: Sequence[Any] | dict[str, Any] | None = None) -> list[Row]:
        if not self._begin:
            with self.wrapper.cursor() as cursor:
                return self._execute(cursor, sql, params)
        # Nobody else uses a connection of ours, so one cursor serves for its life.
        if self._cursor is None:
            self._cursor = self.wrapper.cursor()
        return self._execute(self._cursor, sql, params)

    def count(self, sql: str, params: dict[str, Any]) -> int:
        """Execute `sql`; how many rows it matched."""
        with self.wrapper.cursor() as cursor:
            cursor.execute(sql, params)
            return int(cursor.rowcount)

    @staticmethod
    def _execute(cursor: Any, sql: str, params: Any) -> list[Row]:
        cursor.execute(sql, params)
        rows: list[Row] = cursor.fetchall() if cursor.description else []
        return rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements of the block together, or, if it raises, none."""
        if not self._begin:
            with transaction.atomic(using=self.wrapper.alias):
                yield
            return
        self.execute(self._begin)
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            with suppress(DatabaseError, InterfaceError):
                self.execute("ROLLBACK")
            raise


class Channel(ABC):
    """A way to a database alias that is not the caller's connection, shared by all threads."""

    @abstractmethod
    def run(self, work: Callable[[Session], T]) -> T:
        """Do `work` outside any transaction of the caller's, and return what it returns.

        When the connection turns out to be broken, `work` is done again on a new one: it must be
        something that may be sent several times.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection; it is opened anew when next used."""


class OwnConnection(Channel):
    """An autocommit connection of our own, behind a mutex.

    A copy of the alias' settings, without its pool: through a shared pool, threads that hold a
    connection each and want another one starve.
    """

    def __init__(
        self,
        alias: str,
        *,
        begin: str,
        adapt: Callable[[dict[str, Any]], None],
        on_open: str = "",
        survives_fork: bool = True,
    ) -> None:
        self._alias = alias
        self._begin = begin
        self._on_open = on_open
        self._adapt = adapt
        self._mutex = threading.Lock()
        self._wrapper: BaseDatabaseWrapper | None = None
        self._session: Session | None = None
        self._name: object = None
        self._pid = os.getpid()
        if not survives_fork:
            _closed_for_forks.add(self)

    def run(self, work: Callable[[Session], T]) -> T:
        if not self._mutex.acquire(timeout=MUTEX_WAIT):
            raise BackendUnavailable(
                f"The database {self._alias!r} has not answered a lock statement of another "
                f"thread for {MUTEX_WAIT:g} s."
            )
        try:
            for _ in range(RESENDS):
                try:
                    return work(self._usable())
                except DatabaseError as error:
                    if error_code(error) in PREPARED_IS_GONE and self._session is not None:
                        self._session.prepared = None
                    elif self._is_broken(error):
                        self._drop()
                    elif error_code(error) != PREPARED_ALREADY:
                        raise
            return work(self._usable())
        except DatabaseError as error:
            if self._is_broken(error):
                self._drop()
            raise
        except BaseException as error:
            # Interrupted between a statement and its answer, by a signal's handler or a time limit,
            # the connection cannot be trusted.
            if not isinstance(error, DatabaseError | InterfaceError | NotAll):
                self._drop()
            raise
        finally:
            self._mutex.release()

    def open(self) -> BaseDatabaseWrapper:
        """A new connection of this kind, not shared with anybody."""
        settings = copy.deepcopy(connections[self._alias].settings_dict)
        settings["OPTIONS"].pop("pool", None)
        settings["CONN_MAX_AGE"] = None
        settings["AUTOCOMMIT"] = True
        settings["ATOMIC_REQUESTS"] = False
        self._adapt(settings)
        wrapper = type(connections[self._alias])(settings, self._alias)
        wrapper.inc_thread_sharing()
        return wrapper

    def _usable(self) -> Session:
        # Under a test runner, the alias comes to mean another database at run time.
        name = connections.databases[self._alias]["NAME"]
        if self._session is None or self._name != name:
            self._drop()
            self._wrapper = self.open()
            session = Session(self._wrapper, begin=self._begin)
            if self._on_open:
                session.execute(self._on_open)
            self._session, self._name = session, name
        return self._session

    def _is_broken(self, error: Exception) -> bool:
        return self._wrapper is not None and is_broken(self._wrapper, error)

    def _drop(self) -> None:
        wrapper, self._wrapper, self._session = self._wrapper, None, None
        if wrapper is not None:
            with suppress(Exception):
                wrapper.close()

    def close(self) -> None:
        with self._mutex:
            self._drop()

    def __del__(self) -> None:
        # Of a backend that the settings no longer name, and that was used once more. Never in a
        # forked child: closing would end the parent's session.
        if self._pid == os.getpid():
            self._drop()


# What SQLite has locked in the parent would count as locked in a forked child for ever: its
# connections are closed, between two statements, while the process forks.
_closed_for_forks: weakref.WeakSet[OwnConnection] = weakref.WeakSet()
_held_for_fork: list[OwnConnection] = []


def _before_fork() -> None:
    for connection in list(_closed_for_forks):
        if connection._mutex.acquire(timeout=1.0):
            connection._drop()
            _held_for_fork.append(connection)


def _after_fork() -> None:
    while _held_for_fork:
        _held_for_fork.pop()._mutex.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )


class OwnThread(Channel):
    """A thread of our own, and with it the connection that Django keeps for that thread.

    For dialects that go through the ORM, whose queries name an alias and not a connection.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._thread = JobThreads(f"distlocks-database-{alias}")

    def run(self, work: Callable[[Session], T]) -> T:
        return submit(lambda: self._do(work), self._thread).result()

    def _do(self, work: Callable[[Session], T]) -> T:
        wrapper = connections[self._alias]
        session = Session(wrapper)
        for _ in range(RESENDS):
            try:
                return work(session)
            except (OperationalError, InterfaceError) as error:
                if not is_broken(wrapper, error):
                    raise
                wrapper.close()
        return work(session)

    def close(self) -> None:
        self._thread.put(connections.close_all)
        self._thread.close()


def is_broken(wrapper: BaseDatabaseWrapper, error: Exception) -> bool:
    """Whether the error means that the connection is gone, and all of its session with it."""
    return (
        error_code(error) in SESSION_IS_GONE
        or wrapper.connection is None
        or not wrapper.is_usable()
    )


def error_code(error: object) -> str | int:
    """The SQLSTATE of a database error, or the number where the driver has no SQLSTATE, through
    whatever wraps it; or ''."""
    while error is not None:
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if code:
            return str(code)
        args = getattr(error, "args", ())
        if args and isinstance(args[0], int):
            return args[0]
        error = getattr(error, "__cause__", None)
    return ""


def unavailable(alias: str, error: Exception) -> BackendUnavailable:
    """One of Django's database errors as ours, with the way out."""
    ours = BackendUnavailable(_explain(alias, error))
    # The database has understood the statement well enough to refuse it.
    ours.in_doubt = not (isinstance(error, ProgrammingError) or _is_undefined(error))
    return ours


def _is_undefined(error: Exception) -> bool:
    """Whether a table or a column is missing."""
    return error_code(error) in UNDEFINED or any(
        words in str(error) for words in UNDEFINED_IN_SQLITE
    )


def _explain(alias: str, error: Exception) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    # Before the migrations, or one that this version needs.
    if _is_undefined(error):
        return (
            f"The database {alias!r} lacks the tables of distlocks, or columns of them ({text}): "
            f"run 'manage.py migrate --database {alias}', with 'distlocks' in INSTALLED_APPS."
        )
    if "BUSY_SNAPSHOT" in text or "database is locked" in text:
        return f"The database {alias!r} is locked by another writer: {text}."
    return f"The database {alias!r} cannot be used for locks: {text}"
