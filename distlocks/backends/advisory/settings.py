"""What an advisory backend's OPTIONS say, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ...conf import InvalidSetting

DEFAULT_MAX_SESSIONS = 32
ON_SESSION_END = ("wait", "free")
# As many processes of servers' default max_connections as one would want.
MOST_SESSIONS = 10_000


class Settings:
    """The options with defaults filled in; InvalidSetting for the first that is wrong."""

    def __init__(self, alias: str, options: Mapping[str, Any]) -> None:
        where = f"DISTLOCKS[{alias!r}]['OPTIONS']"
        self.using: str = self._using(where, options.get("using", "default"))
        # Of this process: for leases and waiters.
        self.max_sessions: int = options.get("max_sessions", DEFAULT_MAX_SESSIONS)
        if not _is_count(self.max_sessions):
            raise InvalidSetting(
                32,
                f"{where}['max_sessions'] must be a number from 1 to {MOST_SESSIONS}, not "
                f"{self.max_sessions!r}.",
                "Each lease outside of atomic() has a session of the server's while it lasts.",
            )
        self.transactional: bool = options.get("transactional", True)
        if not isinstance(self.transactional, bool):
            raise InvalidSetting(
                33,
                f"{where}['transactional'] must be True or False, not {self.transactional!r}.",
                "False has locks taken inside atomic() live in sessions of their own, too.",
            )

        # Is a lease waited out whose session has ended and that was not released?
        on_session_end = options.get("on_session_end", "wait")
        self.waits_out: bool = on_session_end == "wait"
        if on_session_end not in ON_SESSION_END:
            raise InvalidSetting(
                35,
                f"{where}['on_session_end'] = {on_session_end!r} is not known.",
                "'wait' waits out the lease of who may not know yet, 'free' frees its key at once.",
            )

    @property
    def max_waiting(self) -> int:
        """How many sessions may stand in the server's queue: leases must find some left."""
        return self.max_sessions // 2

    @staticmethod
    def _using(where: str, using: Any) -> str:
        if not isinstance(using, str) or using not in connections.databases:
            raise InvalidSetting(
                11,
                f"{where}['using'] = {using!r} is not a database of DATABASES.",
                f"Configured are: {', '.join(map(repr, connections.databases))}.",
            )
        try:
            vendor = connections[using].vendor
        except ImproperlyConfigured as error:
            raise _without_driver(where, str(error)) from error
        if vendor != "postgresql":
            raise InvalidSetting(
                30,
                f"{where}['using'] = {using!r} is a database of the kind {vendor!r}; only "
                f"PostgreSQL has advisory locks of this kind.",
                "Name a PostgreSQL database, or use distlocks.backends.database.DatabaseBackend.",
            )
        from django.db.backends.postgresql.psycopg_any import is_psycopg3

        if not is_psycopg3:
            raise _without_driver(where, "the driver that is installed is psycopg2")
        return using


def _without_driver(where: str, why: str) -> InvalidSetting:
    return InvalidSetting(
        31, f"{where}: the advisory backend needs psycopg 3: {why}.", "Install distlocks[advisory]."
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_SESSIONS
