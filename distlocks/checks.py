"""System checks: each wrong setting by number, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections

from . import conf
from .backends.base import BaseBackend
from .handler import locks
from .http_settings import check_http


def register_all() -> None:
    """Register the checks with Django."""
    register(check_settings, "distlocks")
    register(check_http, "distlocks")
    register(check_stores, Tags.database)
    register(check_servers, "distlocks", deploy=True)


def check_settings(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Everything that is wrong with DISTLOCKS, and what each backend says of its own options."""
    messages: list[CheckMessage] = [as_error(fault) for fault in conf.faults()]
    if messages:
        return messages
    for alias in locks:
        backend = _backend(alias, messages)
        if backend is not None:
            messages += backend.check()
    return messages


def check_stores(
    app_configs: Sequence[Any] | None = None,
    databases: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[CheckMessage]:
    """What the stores themselves lack: for databases, only those that the check may ask."""
    messages: list[CheckMessage] = []
    guarded: set[str] = set()
    recorded: set[str] = set()
    if any(conf.faults()):
        return messages
    for alias in locks:
        backend = _backend(alias, [])
        using = getattr(backend, "using", None)
        if backend is not None and using in (databases or ()):
            messages += backend.check_store()
        if backend is not None:
            guarded |= {*backend.params.guard_databases} & {*(databases or ())}
            if backend.recorded:
                recorded |= {backend.params.history_database} & {*(databases or ())}
    for database in sorted(guarded):
        messages += check_guard_table(database)
    for database in sorted(recorded):
        messages += check_history_tables(database)
    return messages


def check_servers(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """What the stores lack that are no databases: asked by `check --deploy`."""
    messages: list[CheckMessage] = []
    if any(conf.faults()):
        return messages
    for alias in locks:
        backend = _backend(alias, [])
        if backend is not None and not hasattr(backend, "using"):
            messages += backend.check_store()
    return messages


def check_guard_table(database: str) -> list[CheckMessage]:
    """Whether guarded transactions can run on the database."""
    from .models import LockGuard

    return _missing(
        database,
        [LockGuard._meta.db_table],
        f"The database {database!r} is in GUARD_DATABASES and lacks the table of the guards: "
        f"lease.atomic() and force-releases fail there.",
        "",
        "distlocks.W004",
    )


def check_history_tables(database: str) -> list[CheckMessage]:
    """Whether the history of locks can be kept in the database."""
    from .models import LockEvent, LockRollup, LockWaiter

    return _missing(
        database,
        [model._meta.db_table for model in (LockEvent, LockRollup, LockWaiter)],
        f"The database {database!r} lacks the tables of the history: what happens to locks is "
        f"not kept, and who waits for whom is not seen.",
        " To keep no history, set HISTORY_DAYS to 0.",
        "distlocks.W060",
    )


def _missing(
    database: str, wanted: list[str], message: str, more: str, number: str
) -> list[CheckMessage]:
    """A warning if a table is missing."""
    try:
        tables = connections[database].introspection.table_names()
    except DatabaseError:
        # Django's own checks, and the backend's, report a database that is down.
        return []
    # An empty database is about to be migrated: its user needs no telling.
    if not tables or set(wanted) <= set(tables):
        return []
    return [
        Warning(
            message,
            hint=f"Run 'manage.py migrate distlocks --database {database}'. If a database router "
            f"is configured, its allow_migrate() must let 'distlocks' in.{more}",
            id=number,
        )
    ]


def as_error(fault: ImproperlyConfigured) -> Error:
    """The system check message of a wrong setting."""
    if isinstance(fault, conf.InvalidSetting):
        return Error(fault.message, hint=fault.hint, id=fault.check_id)
    return Error(str(fault), id="distlocks.E000")


def _backend(alias: str, messages: list[CheckMessage]) -> BaseBackend | None:
    try:
        return locks[alias]
    except ImproperlyConfigured as fault:
        messages.append(as_error(fault))
        return None
