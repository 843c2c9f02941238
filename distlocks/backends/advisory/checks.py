"""What the database of an advisory backend says when asked whether it will do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.checks import CheckMessage, Error, Warning
from django.db import DatabaseError, InterfaceError, connections

from ...exceptions import NotSupported
from .pool import Pool
from .session import Broken, NoAnswer, Refused

if TYPE_CHECKING:
    from .backend import AdvisoryBackend

# Of the server's max_connections, what one process may take without a word.
SHARE = 0.5


def check_database(backend: AdvisoryBackend) -> list[CheckMessage]:
    """Whether there is a table, a session for each lease, and no proxy in the way."""
    using, alias = backend.using, backend.alias
    messages: list[CheckMessage] = []
    try:
        with connections[using].cursor() as cursor:
            tables = connections[using].introspection.table_names(cursor)
            cursor.execute("SHOW max_connections")
            most = int(cursor.fetchone()[0])
        # An empty database is about to be migrated: its user needs no telling.
        if "distlocks_advisorylock" in tables:
            _open_one(backend)
    except NotSupported as refused:
        messages.append(
            Error(
                f"The lock backend {alias!r} cannot hold locks in sessions: {refused}",
                hint="Locks inside atomic() work nevertheless.",
                id="distlocks.E034",
            )
        )
    except (DatabaseError, InterfaceError, Broken, NoAnswer, Refused) as error:
        return [
            Error(
                f"The database {using!r} of the lock backend {alias!r} cannot be reached: {error}",
                id="distlocks.E016",
            )
        ]
    if tables and "distlocks_advisorylock" not in tables:
        messages.append(
            Warning(
                f"The database {using!r} of the lock backend {alias!r} lacks the table of "
                f"advisory locks.",
                hint=f"Run 'manage.py migrate --database {using}'. If a database router is "
                f"configured, its allow_migrate() must let 'distlocks' in.",
                id="distlocks.W002",
            )
        )
    if backend.settings.max_sessions > most * SHARE:
        messages.append(
            Warning(
                f"Each process may open {backend.settings.max_sessions} sessions for the lock "
                f"backend {alias!r}, and the server of {using!r} allows {most} connections in all.",
                hint="Lower OPTIONS['max_sessions'], or raise the server's max_connections.",
                id="distlocks.W030",
            )
        )
    return messages


def _open_one(backend: AdvisoryBackend) -> None:
    """Open a session as a lease would, and close it."""

    pool = Pool(
        backend.using,
        backend.rows.channel.open,
        1,
        prepared=(),
        lost=lambda hold: True,
        turn=lambda hold: None,
    )
    session = pool.take()
    assert session is not None
    pool.discard(session)
