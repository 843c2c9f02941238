"""MariaDB: one statement per acquire and release, and no waiting inside a statement."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from ... import clock
from ...claims import EXCLUSIVE, Holder, Request
from ...waiting import ROW_WAIT, busy_delays
from .channels import IDLE_IN_TRANSACTION, OwnConnection, Session, error_code
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

# The server's clock in microseconds, in UTC: UNIX_TIMESTAMP(SYSDATE(6)) goes back by an hour when
# the server's time zone leaves summer time. It is the beginning of the statement, which no
# wait for a row follows: earlier than the decision by as long as the thread stands still at most,
# so a lease may end a little early, and no live one is taken for dead.
US = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"

# Rows in another transaction's hands are an error at once; who needs them tries again.
NOT_WAITING = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
# Error number: a row in another transaction's hands.
ROW_BUSY = 1205

# Invariant: every condition looks at the old expiry and owner, so all columns change or none:
# assignments take effect from left to right, hence the owner and the expiry come last. A row that
# is live and somebody else's keeps every value.
ACQUIRE = """
INSERT INTO {t} (`key`, owner_id, fencing_token, acquired_at, expires_at, waiting_until,
                 host, pid, thread, label, metadata)
{values}
ON DUPLICATE KEY UPDATE
  fencing_token = IF(expires_at <= VALUES(acquired_at),
                     GREATEST(fencing_token + 1, VALUES(fencing_token)), fencing_token),
  acquired_at = IF(expires_at <= VALUES(acquired_at), VALUES(acquired_at), acquired_at),
  host = IF({ours}, VALUES(host), host),
  pid = IF({ours}, VALUES(pid), pid),
  thread = IF({ours}, VALUES(thread), thread),
  label = IF({ours}, VALUES(label), label),
  metadata = IF({ours}, VALUES(metadata), metadata),
  mode = IF({ours}, '{exclusive}', mode),
  reserved_until = IF({ours}, 0, reserved_until),
  owner_id = IF({ours}, VALUES(owner_id), owner_id),
  expires_at = IF({ours}, VALUES(expires_at), expires_at)
RETURNING {holder}
"""
VALUES = """%(key)s, %(owner)s, {us}, {us}, {us} + %(hold)s, 0,
        %(host)s, %(pid)s, %(thread)s, %(label)s, %(metadata)s"""
OURS = "expires_at <= VALUES(acquired_at) OR owner_id = VALUES(owner_id)"

# Invariant: only the owner's own row changes; the key stays taken until the minimum hold is over.
RELEASE = """
UPDATE {t} SET
  owner_id = '',
  expires_at = IF(%(min_hold)s > 0 AND acquired_at + %(min_hold)s > {us},
                  acquired_at + %(min_hold)s, 0)
WHERE `key` = %(key)s AND owner_id = %(owner)s{and_token}
"""

# Invariant: only live rows of this owner and token change. The wanted ones are a JSON array; the
# join looks each key up, where a small table would otherwise be read, and locked row by row, from
# end to end: others, who wait for nothing, would find rows busy that nobody wants.
EXTEND = """
UPDATE JSON_TABLE(%(wanted)s, '$[*]' COLUMNS (
  k VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$[0]',
  owner_id VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$[1]',
  fencing_token BIGINT PATH '$[2]',
  ttl BIGINT PATH '$[3]',
  min_hold BIGINT PATH '$[4]')) AS wanted
STRAIGHT_JOIN {t} AS l FORCE INDEX (PRIMARY) ON l.`key` = wanted.k
SET l.expires_at = GREATEST(
  {us} + wanted.ttl, IF(wanted.min_hold > 0, l.acquired_at + wanted.min_hold, 0))
WHERE l.owner_id = wanted.owner_id AND l.fencing_token = wanted.fencing_token
  AND l.expires_at > {us}
"""
LIVE = """
SELECT `key`, owner_id, fencing_token FROM {t}
WHERE `key` IN %(keys)s AND expires_at > {us}
"""

HOLDERS = """
SELECT {holder} FROM {t}
WHERE `key` >= %(prefix)s AND LEFT(`key`, CHAR_LENGTH(%(prefix)s)) = %(prefix)s
  AND expires_at > {us} AND mode = '{exclusive}'
ORDER BY `key` LIMIT %(limit)s
"""
IS_TAKEN = "SELECT {holder} FROM {t} WHERE `key` = %(key)s AND expires_at > {us}"
IS_FREED = "SELECT 1 FROM {t} WHERE `key` = %(key)s AND owner_id = '' AND fencing_token = %(token)s"

IF_OURS = AUTHORITY + " LOCK IN SHARE MODE"

# The token goes up, so that the old holder can tell this from a release of its own.
CLEAR = """
UPDATE {t} FORCE INDEX (PRIMARY)
SET owner_id = '', fencing_token = fencing_token + 1, expires_at = 0
WHERE `key` IN %(keys)s
"""

# Invariant: dead rows are found by a plain read, locked by their keys and checked again, so no
# live row is ever locked by a sweep.
SPAN = """
SELECT COUNT(*), MAX(`key`)
FROM (SELECT `key` FROM {t} WHERE `key` > %(after)s ORDER BY `key` LIMIT %(size)s) AS span
"""
DEAD = """
SELECT {holder}, fencing_token <= {us} - %(older)s FROM {t}
WHERE `key` > %(after)s AND `key` <= %(last)s AND expires_at <= {us}
  AND (owner_id <> '' OR fencing_token <= {us} - %(older)s)
ORDER BY `key`
"""
STILL_DEAD = """
SELECT {holder}, fencing_token <= {us} - %(older)s FROM {t}
WHERE `key` IN %(keys)s AND expires_at <= {us}
ORDER BY `key` FOR UPDATE SKIP LOCKED
"""
# A DELETE takes no such hint, and would even wait for the rows that it does not want: a join looks
# each key up. The keys are a JSON array.
DELETE = """
DELETE l FROM JSON_TABLE(%(keys)s, '$[*]' COLUMNS (
  k VARCHAR(250) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin PATH '$')) AS wanted
STRAIGHT_JOIN {t} AS l FORCE INDEX (PRIMARY) ON l.`key` = wanted.k
"""


SPELLING = {
    **STANDARD,
    "key": "`key`",
    "quick": NOT_WAITING,
    "insert_or_ignore": "INSERT IGNORE INTO",
    "or_nothing": "",
    "on_same_owner": "ON DUPLICATE KEY UPDATE",
    "new": "VALUES({})",
    "length": "CHAR_LENGTH",
    "by_key": " FORCE INDEX (PRIMARY)",
    "by_owner": " FORCE INDEX (distlocks_lockholder_key_owner)",
    "no_limit": 2**63 - 1,
}


class MariaDB(Dialect):
    """MariaDB 10.6 and later. MySQL proper goes through the ORM path."""

    def __init__(self, alias: str, tables: Tables) -> None:
        super().__init__(alias, tables)
        holder = HOLDER_COLUMNS.format(
            key="`key`", owner="owner_id", remaining=f"CAST(expires_at AS SIGNED) - {US}"
        )
        names = {
            "exclusive": EXCLUSIVE,
            "t": tables.locks,
            "us": US,
            "ours": OURS,
            "holder": holder,
        }
        values = VALUES.format(us=US)
        if_ours = IF_OURS.format(authorities=tables.authorities)
        self._acquire = NOT_WAITING + ACQUIRE.format(**names, values=f"VALUES ({values})")
        self._acquire_if_ours = NOT_WAITING + ACQUIRE.format(
            **names, values=f"SELECT {values} {if_ours}"
        )
        self._has_authority = f"{NOT_WAITING}SELECT 1 {if_ours}"
        release = NOT_WAITING + RELEASE
        self._release = release.format(**names, and_token=" AND fencing_token = %(token)s")
        self._abandon = release.format(**names, and_token="")
        self._extend = NOT_WAITING + EXTEND.format(**names)
        self._live = LIVE.format(**names)
        self._holders = HOLDERS.format(**names)
        self._is_taken = IS_TAKEN.format(**names)
        self._is_taken_locked = NOT_WAITING + self._is_taken + " FOR UPDATE"
        self._is_freed = IS_FREED.format(**names)
        self._clear = CLEAR.format(**names)
        self._span = SPAN.format(**names)
        self._dead = DEAD.format(**names)
        self._still_dead = STILL_DEAD.format(**names)
        self._delete = DELETE.format(**names)

    @cached_property
    def several(self) -> SqlSeveral:
        return SqlSeveral(self.table, self.tables.holders, US, SPELLING)

    def all_or_none(self, session: Session, work: Callable[[], T]) -> T:
        once = super().all_or_none
        return _persistently(session, lambda: once(session, work))

    def channel(self) -> OwnConnection:
        return OwnConnection(
            self.alias,
            begin="START TRANSACTION",
            adapt=_adapt,
            on_open=f"SET SESSION idle_transaction_timeout = {IDLE_IN_TRANSACTION}",
        )

    def acquire(self, session: Session, key: str, request: Request) -> Taken | Held:
        params = acquire_params(key, request)
        sql = self._acquire_if_ours if request.authority else self._acquire
        rows = _persistently(session, lambda: session.execute(sql, params))
        if not rows:
            return Held()
        _, owner_id, token, acquired_us = rows[0][:4]
        if owner_id == request.owner_id:
            return Taken(fencing_token=token, acquired_us=acquired_us)
        return held_by(holder_from(rows[0]))

    def has_authority(self, session: Session, authority: tuple[str, int]) -> bool:
        params = dict(zip(("authority", "epoch"), authority, strict=True))
        return bool(session.execute(self._has_authority, params))

    def release(
        self, session: Session, key: str, owner_id: str, token: int | None, min_hold_us: int
    ) -> Freed:
        sql = self._abandon if token is None else self._release
        params = {"key": key, "owner": owner_id, "token": token, "min_hold": min_hold_us}
        return Freed(ours=bool(_persistently(session, lambda: session.count(sql, params))))

    def extend(
        self, session: Session, wanted: Sequence[Wanted]
    ) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        wanted = sorted(wanted)
        try:
            return self._extend_all(session, wanted), set()
        except OperationalError as error:
            if error_code(error) != ROW_BUSY:
                raise
        # Some row is in another transaction's hands: that one must not fail the others.
        extended, busy = set(), set()
        for one in wanted:
            try:
                extended |= self._extend_all(session, [one])
            except OperationalError as error:
                if error_code(error) != ROW_BUSY:
                    raise
                busy |= self._still_ours(session, [one])
        return extended, busy

    def _extend_all(self, session: Session, wanted: Sequence[Wanted]) -> set[tuple[str, str]]:
        if session.count(self._extend, {"wanted": as_json(wanted)}) == len(wanted):
            return {(key, owner_id) for key, owner_id, *_ in wanted}
        # Nobody else extends them: what is ours and live now has been extended.
        return self._still_ours(session, wanted)

    def _still_ours(self, session: Session, wanted: Sequence[Wanted]) -> set[tuple[str, str]]:
        rows = set(session.execute(self._live, {"keys": tuple({key for key, *_ in wanted})}))
        return {
            (key, owner_id) for key, owner_id, token, *_ in wanted if (key, owner_id, token) in rows
        }

    def holders(self, session: Session, prefix: str, limit: int | None) -> list[Holder]:
        params = {"prefix": prefix, "limit": 2**63 - 1 if limit is None else limit}
        return [holder_from(row) for row in session.execute(self._holders, params)]

    def force_release(self, session: Session, key: str) -> tuple[Holder | None, bool]:
        def free() -> Holder | None:
            with session.transaction():
                held = session.execute(self._is_taken_locked, {"key": key})
                holder = holder_from(held[0]) if held else None
                if holder is None or holder.mode != EXCLUSIVE:
                    return None
                session.execute(self._clear, {"keys": (key,)})
            return holder

        return _persistently(session, free), False

    def sweep(
        self, session: Session, after: str, batch_size: int, older_than_us: int, dry_run: bool
    ) -> Batch | None:
        params: dict[str, Any] = {"after": after, "size": batch_size, "older": older_than_us}
        examined, params["last"] = session.execute(self._span, params)[0]
        if not examined:
            return None
        dead = session.execute(self._dead, params)
        if dead and not dry_run:
            params["keys"] = tuple(row[0] for row in dead)
            with session.transaction():
                dead = session.execute(self._still_dead, params)
                if old := [row[0] for row in dead if row[-1]]:
                    session.execute(self._delete, {"keys": as_json(old)})
                if expired := tuple(row[0] for row in dead if row[1] and not row[-1]):
                    session.execute(self._clear, {"keys": expired})
        return Batch(
            examined=examined,
            last_key=params["last"],
            expired=[holder_from(row[:-1]) for row in dead if row[1]],
            deleted=sum(row[-1] for row in dead),
        )

    def is_freed(self, session: Session, key: str, token: int) -> bool:
        return bool(session.execute(self._is_freed, {"key": key, "token": token}))

    def is_taken(self, session: Session, key: str) -> bool:
        return bool(session.execute(self._is_taken, {"key": key}))

    def is_busy(self, error: object) -> bool:
        return error_code(error) == ROW_BUSY


def as_json(rows: Sequence[object]) -> str:
    """The rows that EXTEND and DELETE join."""
    return json.dumps(rows, ensure_ascii=False)


def _persistently(session: Session, work: Callable[[], T]) -> T:
    """`work()`, again while the row is in other statements' hands, for a moment."""
    give_up = clock.lease_now() + ROW_WAIT
    for delay in busy_delays():
        try:
            return work()
        except OperationalError as error:
            if error_code(error) != ROW_BUSY or session.in_callers_transaction:
                raise
            if clock.lease_now() > give_up:
                raise
            time.sleep(delay)
    raise AssertionError("busy_delays() never ends")


def _adapt(settings: dict[str, Any]) -> None:
    """What a connection of ours needs beside what the alias says."""
    options = settings["OPTIONS"]
    options.setdefault("connect_timeout", 5)
    # Our statements hold for it; a stricter default of the alias is for its users.
    options["isolation_level"] = "read committed"


def is_supported(wrapper: BaseDatabaseWrapper) -> bool:
    """Whether the server is MariaDB and has SKIP LOCKED and RETURNING. Asks it once."""
    return bool(
        getattr(wrapper, "mysql_is_mariadb", False)
        and wrapper.features.has_select_for_update_skip_locked
    )
