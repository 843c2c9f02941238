"""Looking at each statement that Django sends over connections that are opened meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

Note = Callable[..., Any]


@contextmanager
def watched(note: Note, alias: str | None = None) -> Iterator[None]:
    """`note(execute, sql, params, many, context)` stands around the statements of connections (to
    this alias) that are opened in the block, until its end."""
    opened: list[BaseDatabaseWrapper] = []

    def attach(connection: BaseDatabaseWrapper, **_: object) -> None:
        if alias in (None, connection.alias) and note not in connection.execute_wrappers:
            connection.execute_wrappers.append(note)
            opened.append(connection)

    connection_created.connect(attach)
    try:
        yield
    finally:
        connection_created.disconnect(attach)
        for connection in opened:
            connection.execute_wrappers.remove(note)
