"""Where the history of which backends is, and what is wrong there when it cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from django.db import Error, connections, transaction

from .. import conf

T = TypeVar("T")


def kept_days() -> dict[str, dict[str, float]]:
    """By database, then by backend alias: for how many days it is kept what happened; 0: it is not.

    In the order of the settings, of which the system checks report what is wrong: it is left out.
    """
    found: dict[str, dict[str, float]] = {}
    for alias in conf.aliases():
        try:
            params = conf.params(alias)
        except conf.InvalidSetting:
            continue
        if params.history_days or params.history_database in connections:
            found.setdefault(params.history_database, {})[alias] = params.history_days
    return found


def databases() -> list[str]:
    """Those in which history is kept."""
    return [database for database, aliases in kept_days().items() if any(aliases.values())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why one database's history cannot be read."""

    database: str
    # Has nobody made the tables?
    tables_missing: bool
    # What the database said.
    error: str

    @property
    def command(self) -> str:
        """What makes the tables."""
        return f"manage.py migrate distlocks --database {self.database}"


class Unreadable(Exception):
    """A database's history cannot be read."""

    def __init__(self, trouble: Trouble) -> None:
        text = f"the database {trouble.database!r} says: {trouble.error}"
        if trouble.tables_missing:
            text = f"the database {trouble.database!r} lacks its tables. Run '{trouble.command}'."
        super().__init__(text)
        self.trouble = trouble


@contextmanager
def reading(database: str, table: str) -> Iterator[None]:
    """Whatever the database refuses inside becomes Unreadable."""
    connection = connections[database]
    try:
        if connection.in_atomic_block:
            # What the request does after it must not fail too.
            with transaction.atomic(using=database):
                yield
        else:
            yield
    except Error as error:
        said = str(error).strip() or type(error).__name__
        raise Unreadable(
            Trouble(database=database, tables_missing=_lacks(database, table), error=said)
        ) from error


def _lacks(database: str, table: str) -> bool:
    try:
        return table not in connections[database].introspection.table_names()
    except Error:
        return False


def of_each(database_names: list[str], read: Callable[[str], T]) -> tuple[list[T], list[Trouble]]:
    """What `read` returns of each database, and what is wrong with the others."""
    found: list[T] = []
    troubles: list[Trouble] = []
    for database in database_names:
        try:
            found.append(read(database))
        except Unreadable as error:
            troubles.append(error.trouble)
    return found, troubles
