"""What a database backend's settings and tables lack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.apps import apps
from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections

from .sqlite import SQLite

if TYPE_CHECKING:
    from .backend import DatabaseBackend


def check_settings(backend: DatabaseBackend) -> list[CheckMessage]:
    """What can be told from the settings alone."""
    if connections[backend.using].vendor == "mysql" and apps.is_installed("distlocks"):
        # Which dialect it is, only the server can tell.
        return []
    try:
        dialect = backend.dialect
    except ImproperlyConfigured as fault:
        return [Error(str(fault), id="distlocks.E014")]
    from django.conf import settings

    from .portable import Portable

    database = connections[backend.using].settings_dict
    messages: list[CheckMessage] = []
    if isinstance(dialect, Portable) and not settings.USE_TZ:
        messages.append(
            Error(
                f"The lock backend {backend.alias!r} reads the server's clock through the ORM, "
                f"which is ambiguous once a year with USE_TZ = False.",
                hint="Set USE_TZ = True, or use a database with a dialect of its own.",
                id="distlocks.E015",
            )
        )
    options = database["OPTIONS"]
    if isinstance(dialect, SQLite) and options.get("transaction_mode") not in (
        "IMMEDIATE",
        "EXCLUSIVE",
    ):
        messages.append(
            Warning(
                f"Transactions on the SQLite database {backend.using!r} begin as DEFERRED: beside "
                f"other writers they fail with 'database is locked' once they write, and a lock "
                f"taken after a read cannot be had.",
                hint="Give the database OPTIONS = {'transaction_mode': 'IMMEDIATE'}.",
                id="distlocks.W001",
            )
        )
    return messages


def check_database(backend: DatabaseBackend) -> list[CheckMessage]:
    """What the database says when asked."""
    from .connected import is_in_memory

    wrapper = connections[backend.using]
    try:
        with wrapper.cursor() as cursor:
            tables = wrapper.introspection.table_names(cursor)
            journal = ""
            if wrapper.vendor == "sqlite" and not is_in_memory(wrapper):
                cursor.execute("PRAGMA journal_mode")
                journal = str(cursor.fetchone()[0])
    except DatabaseError as error:
        return [
            Error(
                f"The database {backend.using!r} of the lock backend {backend.alias!r} cannot be "
                f"reached: {error}",
                id="distlocks.E016",
            )
        ]
    messages: list[CheckMessage] = []
    # An empty database is about to be migrated: its user needs no telling.
    if tables and not {"distlocks_lock", "distlocks_lockholder"} <= set(tables):
        messages.append(
            Warning(
                f"The database {backend.using!r} of the lock backend {backend.alias!r} lacks the "
                f"tables of distlocks, or some of them.",
                hint=f"Run 'manage.py migrate --database {backend.using}'. If a database router "
                f"is configured, its allow_migrate() must let 'distlocks' in.",
                id="distlocks.W002",
            )
        )
    if journal not in ("", "wal"):
        messages.append(
            Warning(
                f"The SQLite database {backend.using!r} uses the journal mode {journal!r}: every "
                f"writer waits for every reader.",
                hint="Give the database OPTIONS = {'init_command': 'PRAGMA journal_mode=wal; "
                "PRAGMA synchronous=normal'}.",
                id="distlocks.W003",
            )
        )
    return messages
