"""SQLite: one writer at a time, so a busy database is retried here, with jitter."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from django.db import OperationalError

from ... import clock
from ...claims import EXCLUSIVE, Holder, Request
from ...waiting import ROW_WAIT, busy_delays
from .channels import OwnConnection, Row, Session
from .dialect import (
    AUTHORITY,
    HOLDER_COLUMNS,
    Batch,
    Dialect,
    Freed,
    Held,
    Tables,
    Taken,
    Wanted,
    acquire_params,
    held_by,
    holder_from,
)
from .several_sql import STANDARD, SqlSeveral

T = TypeVar("T")

# The clock of the machine that all processes of a SQLite database share, in microseconds, read
# when the statement begins: nothing of ours waits inside a statement.
US = "(CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000)"

# RETURNING came with 3.35.
SUPPORTED = sqlite3.sqlite_version_info >= (3, 35, 0)

# How long a release, an extension or a sweep tries to get past other writers.
WRITE_PATIENCE = 5.0

# Invariant: the token and the expiry are computed in the update branch, under the write lock.
ACQUIRE = """
INSERT INTO {t} AS l (key, owner_id, fencing_token, acquired_at, expires_at, waiting_until,
                      host, pid, thread, label, metadata)
SELECT %(key)s, %(owner)s, {us}, {us}, {us} + %(hold)s, 0,
       %(host)s, %(pid)s, %(thread)s, %(label)s, %(metadata)s
WHERE NOT EXISTS (
  SELECT 1 FROM {t} WHERE key = %(key)s AND expires_at > {us} AND owner_id <> %(owner)s){if_ours}
ON CONFLICT (key) DO UPDATE SET
  fencing_token = CASE WHEN l.owner_id = excluded.owner_id AND l.expires_at > {us}
                       THEN l.fencing_token ELSE max(l.fencing_token + 1, {us}) END,
  acquired_at = CASE WHEN l.owner_id = excluded.owner_id AND l.expires_at > {us}
                     THEN l.acquired_at ELSE {us} END,
  mode = '{exclusive}', reserved_until = 0,
  owner_id = excluded.owner_id, expires_at = {us} + %(hold)s, host = excluded.host,
  pid = excluded.pid, thread = excluded.thread, label = excluded.label,
  metadata = excluded.metadata
  WHERE l.expires_at <= {us} OR l.owner_id = excluded.owner_id
RETURNING fencing_token, acquired_at
"""

# Invariant: only the owner's own row changes; the key stays taken until the minimum hold is over.
RELEASE = """
UPDATE {t} SET
  owner_id = '',
  expires_at = CASE WHEN %(min_hold)s > 0 AND acquired_at + %(min_hold)s > {us}
                    THEN acquired_at + %(min_hold)s ELSE 0 END
WHERE key = %(key)s AND owner_id = %(owner)s{and_token}
RETURNING key
"""

# Invariant: a lease is extended only while it is the owner's and has not expired.
EXTEND = """
UPDATE {t} SET expires_at = max(
  {us} + %(ttl)s, CASE WHEN %(min_hold)s > 0 THEN acquired_at + %(min_hold)s ELSE 0 END)
WHERE key = %(key)s AND owner_id = %(owner)s AND fencing_token = %(token)s AND expires_at > {us}
RETURNING key
"""

HOLDERS = """
SELECT {holder} FROM {t}
WHERE key >= %(prefix)s AND substr(key, 1, length(%(prefix)s)) = %(prefix)s AND expires_at > {us}
  AND mode = '{exclusive}'
ORDER BY key LIMIT %(limit)s
"""

IS_TAKEN = "SELECT {holder} FROM {t} WHERE key = %(key)s AND expires_at > {us}"
IS_FREED = "SELECT 1 FROM {t} WHERE key = %(key)s AND owner_id = '' AND fencing_token = %(token)s"
# The token goes up, so that the old holder can tell this from a release of its own.
FORCE_RELEASE = """
UPDATE {t} SET owner_id = '', fencing_token = fencing_token + 1, expires_at = 0
WHERE key = %(key)s AND expires_at > {us} AND mode = '{exclusive}'
"""

# Invariant: each batch is one short transaction, so what is found expired is still so when it is
# cleared, and no other writer waits for longer than a batch.
SPAN = """
SELECT count(*), max(key)
FROM (SELECT key FROM {t} WHERE key > %(after)s ORDER BY key LIMIT %(size)s)
"""
DEAD = """
SELECT {holder} FROM {t}
WHERE key > %(after)s AND key <= %(last)s AND expires_at <= {us} AND owner_id <> ''
"""
COUNT_OLD = """
SELECT count(*) FROM {t}
WHERE key > %(after)s AND key <= %(last)s AND expires_at <= {us}
  AND fencing_token <= {us} - %(older)s
"""
DELETE_OLD = """
DELETE FROM {t}
WHERE key > %(after)s AND key <= %(last)s AND expires_at <= {us}
  AND fencing_token <= {us} - %(older)s
"""
CLEAR = """
UPDATE {t} SET owner_id = '', fencing_token = fencing_token + 1, expires_at = 0
WHERE key > %(after)s AND key <= %(last)s AND expires_at <= {us} AND owner_id <> ''
"""

# BEGIN IMMEDIATE is the latch of all rows.
SPELLING = {
    **STANDARD,
    "for_update": "",
    "skip_locked": "",
    "greatest": "max",
    "values": "VALUES ",
    "no_limit": -1,
}

DEFERRED_TRANSACTION = (
    "Take the lock before the transaction begins, or give the database "
    "OPTIONS = {'transaction_mode': 'IMMEDIATE'}."
)


class SQLite(Dialect):
    """SQLite 3.35 and later, in any journal mode."""

    one_writer = True

    def __init__(self, alias: str, tables: Tables) -> None:
        super().__init__(alias, tables)
        names = {
            "t": tables.locks,
            "us": US,
            "exclusive": EXCLUSIVE,
            "holder": HOLDER_COLUMNS.format(
                key="key", owner="owner_id", remaining=f"expires_at - {US}"
            ),
        }
        self._has_authority = f"SELECT 1 {AUTHORITY}".format(authorities=tables.authorities)
        self._acquire = ACQUIRE.format(**names, if_ours="")
        self._acquire_if_ours = ACQUIRE.format(
            **names, if_ours=f"\nAND EXISTS ({self._has_authority})"
        )
        self._release = RELEASE.format(**names, and_token=" AND fencing_token = %(token)s")
        self._abandon = RELEASE.format(**names, and_token="")
        self._extend = EXTEND.format(**names)
        self._holders = HOLDERS.format(**names)
        self._is_taken = IS_TAKEN.format(**names)
        self._is_freed = IS_FREED.format(**names)
        self._force_release = FORCE_RELEASE.format(**names)
        self._span = SPAN.format(**names)
        self._dead = DEAD.format(**names)
        self._count_old = COUNT_OLD.format(**names)
        self._delete_old = DELETE_OLD.format(**names)
        self._clear = CLEAR.format(**names)

    @cached_property
    def several(self) -> SQLiteSeveral:
        return SQLiteSeveral(self.table, self.tables.holders, US, SPELLING)

    def channel(self) -> OwnConnection:
        return OwnConnection(
            self.alias, begin="BEGIN IMMEDIATE", adapt=_leave_waiting_to_us, survives_fork=False
        )

    def acquire(self, session: Session, key: str, request: Request) -> Taken | Held:
        params = acquire_params(key, request)
        sql = self._acquire_if_ours if request.authority else self._acquire
        try:
            rows = _persistently(
                session,
                lambda: session.execute(sql, params),
                patience=ROW_WAIT,
                enough=lambda: self.is_taken(session, key),
            )
        except OperationalError as error:
            if session.in_callers_transaction or not is_busy(error):
                raise
            rows = []
        if rows:
            token, acquired_us = rows[0]
            return Taken(fencing_token=token, acquired_us=acquired_us)
        held = session.execute(self._is_taken, {"key": key})
        if held and held[0][1] != request.owner_id:
            return held_by(holder_from(held[0]))
        if request.authority:
            return Held(reason="Another writer is busy, or another store grants.")
        return Held(reason="The database is locked by another writer.")

    def has_authority(self, session: Session, authority: tuple[str, int]) -> bool:
        # BEGIN IMMEDIATE has made us the only writer.
        params = dict(zip(("authority", "epoch"), authority, strict=True))
        return bool(session.execute(self._has_authority, params))

    def release(
        self, session: Session, key: str, owner_id: str, token: int | None, min_hold_us: int
    ) -> Freed:
        sql = self._abandon if token is None else self._release
        params = {"key": key, "owner": owner_id, "token": token, "min_hold": min_hold_us}
        rows = _persistently(session, lambda: session.execute(sql, params))
        return Freed(ours=bool(rows))

    def extend(
        self, session: Session, wanted: Sequence[Wanted]
    ) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        def extend_all() -> set[tuple[str, str]]:
            extended = set()
            with session.transaction():
                for one in wanted:
                    params = {
                        "key": one.key,
                        "owner": one.owner_id,
                        "token": one.fencing_token,
                        "ttl": one.ttl_us,
                        "min_hold": one.min_hold_us,
                    }
                    if session.execute(self._extend, params):
                        extended.add((one.key, one.owner_id))
            return extended

        return _persistently(session, extend_all), set()

    def holders(self, session: Session, prefix: str, limit: int | None) -> list[Holder]:
        params = {"prefix": prefix, "limit": -1 if limit is None else limit}
        rows = _persistently(session, lambda: session.execute(self._holders, params))
        return [holder_from(row) for row in rows]

    def force_release(self, session: Session, key: str) -> tuple[Holder | None, bool]:
        def free() -> Holder | None:
            with session.transaction():
                held = session.execute(self._is_taken, {"key": key})
                session.execute(self._force_release, {"key": key})
            holder = holder_from(held[0]) if held else None
            return holder if holder and holder.mode == EXCLUSIVE else None

        return _persistently(session, free), False

    def sweep(
        self, session: Session, after: str, batch_size: int, older_than_us: int, dry_run: bool
    ) -> Batch | None:
        params: dict[str, Any] = {"after": after, "size": batch_size, "older": older_than_us}

        def inspect() -> Batch | None:
            examined, params["last"] = session.execute(self._span, params)[0]
            if not examined:
                return None
            return Batch(
                examined=examined,
                last_key=params["last"],
                expired=[holder_from(row) for row in session.execute(self._dead, params)],
                deleted=session.execute(self._count_old, params)[0][0],
            )

        def clean() -> Batch | None:
            with session.transaction():
                batch = inspect()
                if batch is not None and batch.deleted:
                    session.execute(self._delete_old, params)
                if batch is not None and batch.expired:
                    session.execute(self._clear, params)
            return batch

        if dry_run:
            return _persistently(session, inspect)
        # Look first: a batch with nothing to do must not take the write lock.
        batch = _persistently(session, inspect)
        if batch is None or not (batch.expired or batch.deleted):
            return batch
        return _persistently(session, clean)

    def is_freed(self, session: Session, key: str, token: int) -> bool:
        params = {"key": key, "token": token}
        return bool(_persistently(session, lambda: session.execute(self._is_freed, params)))

    def all_or_none(self, session: Session, work: Callable[[], T]) -> T:
        once = super().all_or_none
        return _persistently(session, lambda: once(session, work), patience=ROW_WAIT)

    def is_busy(self, error: object) -> bool:
        return is_busy(error)

    def is_taken(self, session: Session, key: str) -> bool:
        return bool(_persistently(session, lambda: session.execute(self._is_taken, {"key": key})))

    def explain(self, error: Exception, *, in_transaction: bool) -> str:
        if in_transaction and is_busy(error):
            return (
                "Another writer was busy for longer than the connection's time-out, or came in "
                "between after the transaction had begun by reading. " + DEFERRED_TRANSACTION
            )
        return ""


class SQLiteSeveral(SqlSeveral):
    """Reads may find the file locked too: as it is opened, or recovered."""

    def read(self, session: Session, sql: str, params: dict[str, Any]) -> list[Row]:
        return _persistently(session, lambda: session.execute(sql, params))


def is_busy(error: object) -> bool:
    """Whether SQLite refused because of another connection's lock."""
    cause = getattr(error, "__cause__", None)
    if not isinstance(cause, sqlite3.OperationalError):
        return False
    # The low byte is the primary code; BUSY_SNAPSHOT, BUSY_RECOVERY and others share it.
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _persistently(
    session: Session,
    write: Callable[[], T],
    *,
    patience: float = WRITE_PATIENCE,
    enough: Callable[[], bool] | None = None,
) -> T:
    """`write()`, again and again while other writers are busy, for `patience` seconds.

    Inside the caller's transaction there is one try: what the user's own time-out did not bring,
    a retry will not. `enough` ends the retries early.
    """
    if session.in_callers_transaction:
        return write()
    give_up = clock.lease_now() + patience
    for delay in busy_delays():
        try:
            return write()
        except OperationalError as error:
            if not is_busy(error) or clock.lease_now() > give_up or (enough and enough()):
                raise
            time.sleep(delay)
    raise AssertionError("busy_delays() never ends")


def _leave_waiting_to_us(settings: dict[str, Any]) -> None:
    """SQLite's own busy handler sleeps up to 100 ms at a time and starves waiters."""
    settings["OPTIONS"]["timeout"] = 0
