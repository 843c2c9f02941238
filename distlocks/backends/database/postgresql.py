"""PostgreSQL: one statement per verb, server clock, time-outs inside the statement."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ... import clock
from ...claims import EXCLUSIVE, Holder, Request
from ...waiting import ROW_WAIT
from .channels import IDLE_IN_TRANSACTION, OwnConnection, Row, Session, error_code
from .dialect import (
    AUTHORITY,
    HOLDER_COLUMNS,
    MARK_US,
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

# What our notifications are sent on.
LISTEN_CHANNEL = "distlocks"

# Parameters are cast where PostgreSQL could not tell their type if the alias binds on the server.

# The server's clock in microseconds. Not now() nor statement_timestamp(): they are from before a
# wait on the row, and leases came out short by the wait.
US = "(extract(epoch from clock_timestamp()) * 1000000)::bigint"

# A bound on the wait for each row, without session state that would leak through a pooler. It
# counts only if the statement reads from it.
BOUNDED = (
    f"bound AS MATERIALIZED (SELECT set_config('lock_timeout', '{int(ROW_WAIT * 1000)}ms', true))"
)

# Invariant: the token and the expiry of a grant are computed after the row is ours (in the update
# branch, from one reading of the clock), so tokens grow in the order of the grants. A try on a
# live row writes nothing and waits for nobody, because the plain read keeps the insert from being
# tried.
ACQUIRE = """
WITH {bound}{authority}taken AS (
  INSERT INTO {t} AS l (key, owner_id, fencing_token, acquired_at, expires_at, waiting_until,
                        host, pid, thread, label, metadata)
  SELECT %(key)s::text, %(owner)s::text, n, n, n + %(hold)s, 0,
         %(host)s::text, %(pid)s, %(thread)s::text, %(label)s::text, %(metadata)s::jsonb
  FROM (SELECT {us} AS n OFFSET 0) AS clock{join_bound}{join_authority}
  WHERE NOT EXISTS (
    SELECT FROM {t} WHERE key = %(key)s AND expires_at > {us} AND owner_id <> %(owner)s)
  ON CONFLICT (key) DO UPDATE SET
    (owner_id, mode, reserved_until,
     fencing_token, acquired_at, expires_at, host, pid, thread, label, metadata) = (
      SELECT excluded.owner_id, '{exclusive}', 0,
             CASE WHEN again THEN l.fencing_token ELSE greatest(l.fencing_token + 1, n) END,
             CASE WHEN again THEN l.acquired_at ELSE n END,
             n + %(hold)s,
             excluded.host, excluded.pid, excluded.thread, excluded.label, excluded.metadata
      FROM (SELECT n, l.owner_id = excluded.owner_id AND l.expires_at > n AS again
            FROM (SELECT {us} AS n OFFSET 0) AS clock OFFSET 0) AS reading)
    WHERE l.expires_at <= {us} OR l.owner_id = excluded.owner_id
  RETURNING fencing_token, acquired_at)
SELECT true, '', '', fencing_token, acquired_at, 0, '', 0, '', '', NULL::jsonb, '' FROM taken
UNION ALL
SELECT false, {holder} FROM {t}
WHERE key = %(key)s
  AND (NOT EXISTS (SELECT FROM taken)
       OR (expires_at <= {us} AND owner_id <> '' AND owner_id <> %(owner)s))
"""

# Invariant: only the owner's own row changes; the key stays taken until the minimum hold has
# passed; the waiters' mark is cleared in the same update that frees the key, so that whoever
# marked before is announced to and whoever comes later finds the key free.
RELEASE = """
{with_bound}UPDATE {t} SET
  owner_id = '',
  expires_at = CASE WHEN %(min_hold)s > 0 AND acquired_at + %(min_hold)s > {us}
                    THEN acquired_at + %(min_hold)s ELSE 0 END,
  waiting_until = CASE WHEN waiting_until > {us} THEN -1 ELSE 0 END
{from_bound}
WHERE key = %(key)s AND owner_id = %(owner)s{and_token}
RETURNING waiting_until < 0
"""

# Invariant: a lease is extended only while it is the owner's and has not expired by the clock
# after the row is had. Rows in another statement's hands are skipped and read plainly: they are
# busy, not lost.
EXTEND = """
WITH wanted AS (
  SELECT * FROM unnest(%(keys)s::text[], %(owners)s::text[], %(tokens)s::bigint[],
                       %(ttls)s::bigint[], %(min_holds)s::bigint[])
    AS w (key, owner_id, fencing_token, ttl, min_hold)),
had AS MATERIALIZED (
  SELECT l.key, w.ttl, w.min_hold
  FROM {t} AS l JOIN wanted AS w USING (key, owner_id, fencing_token)
  WHERE l.expires_at > {us}
  ORDER BY l.key FOR UPDATE OF l SKIP LOCKED),
extended AS (
  UPDATE {t} AS l SET expires_at = greatest(
    {us} + had.ttl, CASE WHEN had.min_hold > 0 THEN l.acquired_at + had.min_hold END)
  FROM had WHERE l.key = had.key
  RETURNING l.key, l.owner_id)
SELECT key, owner_id, true FROM extended
UNION ALL
SELECT l.key, l.owner_id, false FROM {t} AS l JOIN wanted AS w USING (key, owner_id, fencing_token)
WHERE l.expires_at > {us} AND l.key NOT IN (SELECT key FROM extended)
"""

# What a waiter has found and wants to sleep beside: a key that is taken, if only its becoming free
# can help; else a row at the version that it knows, taken or reserved.
AS_FOUND = """
CASE WHEN %(version)s::bigint IS NULL THEN expires_at > {us}
     ELSE fencing_token = %(version)s::bigint AND greatest(expires_at, reserved_until) > {us} END
"""
# Invariant: a row comes back exactly if it was as found *and* marked at one moment after the caller
# began to listen. The mark is written under the row's lock; where a fresh one stands already, a
# plain read is enough: who clears it announces afterwards.
MARK = """
WITH {bound}marked AS (
  UPDATE {t} SET waiting_until = {us} + {mark}
  {from_bound}
  WHERE key = %(key)s AND {as_found} AND waiting_until < {us} + {mark} / 2
  RETURNING key)
SELECT key FROM marked
UNION ALL
SELECT key FROM {t} WHERE key = %(key)s AND {as_found} AND waiting_until >= {us} + {mark} / 2
"""

HOLDERS = """
SELECT {holder} FROM {t}
WHERE key >= %(prefix)s::text AND starts_with(key, %(prefix)s::text) AND expires_at > {us}
  AND mode = '{exclusive}'
ORDER BY key LIMIT %(limit)s
"""

# Invariant: what is reported is what was cleared (the row is locked first, then read). The token
# goes up, so that the old holder can tell this from a release of its own.
FORCE_RELEASE = """
WITH {bound}had AS MATERIALIZED (
  SELECT {holder}, waiting_until > {us} AS awaited FROM {t}{join_bound}
  WHERE key = %(key)s AND expires_at > {us} AND mode = '{exclusive}' FOR UPDATE OF {t}),
freed AS (
  UPDATE {t} AS l
  SET owner_id = '', fencing_token = l.fencing_token + 1, expires_at = 0, waiting_until = 0 FROM had
  WHERE l.key = had.key)
SELECT * FROM had
"""

# Invariant: only rows that are expired once they are locked are touched; rows in another
# statement's hands are left for the next sweep. Walks the primary key, so there is no index on
# the expiry that every renewal would have to write.
SWEEP = """
WITH span AS MATERIALIZED (
  SELECT key FROM {t} WHERE key > %(after)s::text ORDER BY key LIMIT %(size)s),
dead AS MATERIALIZED (
  SELECT {holder} FROM {t}
  WHERE key IN (SELECT key FROM span) AND expires_at <= {us}
    AND (owner_id <> '' OR fencing_token <= {us} - %(older)s)
  ORDER BY key {lock}),
{acts}
summary AS (SELECT count(*) AS examined, max(key) AS last_key FROM span)
SELECT examined, last_key, (SELECT count(*) FROM dead WHERE fencing_token <= {us} - %(older)s),
       dead.* FROM summary LEFT JOIN dead ON owner_id <> ''
"""
SWEEP_ACTS = """
deleted AS (
  DELETE FROM {t} AS l USING dead WHERE l.key = dead.key
    AND dead.fencing_token <= {us} - %(older)s),
cleared AS (
  UPDATE {t} AS l SET owner_id = '', fencing_token = l.fencing_token + 1, expires_at = 0
  FROM dead WHERE l.key = dead.key
    AND dead.owner_id <> '' AND dead.fencing_token > {us} - %(older)s),
"""

HAS_AUTHORITY = f"SELECT 1 {AUTHORITY} FOR SHARE"
IS_FREED = "SELECT 1 FROM {t} WHERE key = %(key)s AND owner_id = '' AND fencing_token = %(token)s"
IS_TAKEN = "SELECT 1 FROM {t} WHERE key = %(key)s AND expires_at > {us}"


# Types of the parameters, for PREPARE.
TYPES = {
    **dict.fromkeys(("key", "owner", "host", "thread", "label", "prefix", "after"), "text"),
    "authority": "text",
    "epoch": "bigint",
    **dict.fromkeys(("hold", "min_hold", "token", "pid", "limit", "size"), "bigint"),
    **dict.fromkeys(("older", "version"), "bigint"),
    **dict.fromkeys(("tokens", "ttls", "min_holds"), "bigint[]"),
    **dict.fromkeys(("keys", "owners"), "text[]"),
    "metadata": "jsonb",
}
# Seconds after which a statement is planned anew. The server keeps a plan until the statistics of
# the table are renewed, also one that reads the whole table, because it was small.
REPLAN_AFTER = 30.0

# SQLSTATE of lock_timeout: another statement has the row in its hands.
ROW_BUSY = "55P03"


class Statement:
    """One statement, to be parsed and planned once per connection rather than at each use.

    Planning costs more than execution here. SQL's own PREPARE rather than the driver's: its name
    is made from the text, so whatever a pooling proxy does, a name can only mean this statement.
    """

    def __init__(self, sql: str) -> None:
        self.sql = sql
        names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", sql)))
        numbered = re.sub(r"%\((\w+)\)s", lambda m: f"${names.index(m[1]) + 1}", sql)
        self.name = f"distlocks_{hashlib.sha256(sql.encode()).hexdigest()[:16]}"
        types = ", ".join(TYPES[name] for name in names)
        self.prepare = f"PREPARE {self.name} ({types}) AS {numbered}"
        self.execute = f"EXECUTE {self.name} ({', '.join(f'%({name})s' for name in names)})"

    def run(self, session: Session, params: dict[str, Any]) -> list[Row]:
        prepared = session.prepared
        if prepared is None:
            return session.execute(self.sql, params)
        now = clock.lease_now()
        planned = prepared.get(self.name)
        if planned is None or now - planned > REPLAN_AFTER:
            if planned is not None:
                session.execute(f"DEALLOCATE {self.name}")
            # Noted first: if the name is prepared already, the work is done again with it.
            prepared[self.name] = now
            session.execute(self.prepare)
        return session.execute(self.execute, params)


# In one message, and for the transaction only: through a pooling proxy, a session's setting would
# reach others.
BEGIN = (
    f"BEGIN; SET LOCAL lock_timeout = '{int(ROW_WAIT * 1000)}ms'; "
    f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION}s'"
)


class PostgreSQL(Dialect):
    """PostgreSQL 14 and later, through psycopg 3 or, without announcements, psycopg2."""

    def __init__(self, alias: str, tables: Tables) -> None:
        super().__init__(alias, tables)
        # Not before it is known that there is a driver.
        from django.db.backends.postgresql.psycopg_any import is_psycopg3

        self.can_announce = is_psycopg3
        self._own = self._statements(bounded=True)
        # In a test case's transaction, which is the caller's, no time-out may stay behind.
        self._callers = self._statements(bounded=False)

    def _statements(self, *, bounded: bool) -> dict[str, Statement]:
        names = {
            "t": self.table,
            "us": US,
            "mark": MARK_US,
            "exclusive": EXCLUSIVE,
            "holder": HOLDER_COLUMNS.format(
                key="key", owner="owner_id", remaining=f"expires_at - {US} AS remaining"
            ),
            "bound": f"{BOUNDED}, " if bounded else "",
            "with_bound": f"WITH {BOUNDED} " if bounded else "",
            "from_bound": " FROM bound" if bounded else "",
            "join_bound": ", bound" if bounded else "",
        }
        sweep = {**names, "lock": f"FOR UPDATE OF {self.table} SKIP LOCKED"}
        has_authority = HAS_AUTHORITY.format(authorities=self.tables.authorities)
        texts = {
            "acquire": ACQUIRE.format(**names, authority="", join_authority=""),
            "acquire_if_ours": ACQUIRE.format(
                **names,
                authority=f"authority AS MATERIALIZED ({has_authority}), ",
                join_authority=", authority",
            ),
            "has_authority": has_authority,
            "release": RELEASE.format(**names, and_token=" AND fencing_token = %(token)s"),
            "abandon": RELEASE.format(**names, and_token=""),
            "extend": EXTEND.format(**names),
            "mark": MARK.format(**names, as_found=AS_FOUND.format(us=US).strip()),
            "holders": HOLDERS.format(**names),
            "force_release": FORCE_RELEASE.format(**names),
            "sweep": SWEEP.format(**sweep, acts=SWEEP_ACTS.format(**names)),
            "sweep_dry": SWEEP.format(**{**names, "lock": "", "acts": ""}),
            "is_taken": IS_TAKEN.format(**names),
            "is_freed": IS_FREED.format(**names),
        }
        return {name: Statement(text) for name, text in texts.items()}

    def _execute(self, session: Session, name: str, params: dict[str, Any]) -> list[Row]:
        statements = self._callers if session.in_callers_transaction else self._own
        return statements[name].run(session, params)

    @cached_property
    def several(self) -> SqlSeveral:
        return SqlSeveral(self.table, self.tables.holders, US, STANDARD)

    def channel(self) -> OwnConnection:
        return OwnConnection(self.alias, begin=BEGIN, adapt=_adapt)

    def acquire(self, session: Session, key: str, request: Request) -> Taken | Held:
        name = "acquire_if_ours" if request.authority else "acquire"
        rows = self._execute(session, name, acquire_params(key, request))
        if not rows:
            return Held()
        granted, *row = rows[0]
        if granted:
            # The second row, if there is one, is the key's from before.
            expired = holder_from(rows[1][1:]) if len(rows) > 1 else None
            return Taken(fencing_token=row[2], acquired_us=row[3], expired=expired)
        holder = holder_from(tuple(row))
        if request.authority and holder.remaining <= 0:
            # It is free, and was not granted: by another store it may be.
            return Held()
        return held_by(holder)

    def has_authority(self, session: Session, authority: tuple[str, int]) -> bool:
        params = dict(zip(("authority", "epoch"), authority, strict=True))
        return bool(self._execute(session, "has_authority", params))

    def release(
        self, session: Session, key: str, owner_id: str, token: int | None, min_hold_us: int
    ) -> Freed:
        params = {"key": key, "owner": owner_id, "token": token, "min_hold": min_hold_us}
        if token is None:
            rows = self._execute(session, "abandon", params)
        else:
            rows = self._execute(session, "release", params)
        return Freed(ours=bool(rows), awaited=bool(rows and rows[0][0]))

    def extend(
        self, session: Session, wanted: Sequence[Wanted]
    ) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        columns = [list(column) for column in zip(*wanted, strict=True)]
        names = ("keys", "owners", "tokens", "ttls", "min_holds")
        rows = self._execute(session, "extend", dict(zip(names, columns, strict=True)))
        extended = {(key, owner) for key, owner, done in rows if done}
        busy = {(key, owner) for key, owner, done in rows if not done}
        return extended, busy

    def mark(self, session: Session, key: str, version: int | None) -> bool:
        return bool(self._execute(session, "mark", {"key": key, "version": version}))

    def announce(self, session: Session, text: str) -> None:
        session.execute("SELECT pg_notify(%s::text, %s::text)", (LISTEN_CHANNEL, text))

    def holders(self, session: Session, prefix: str, limit: int | None) -> list[Holder]:
        rows = self._execute(session, "holders", {"prefix": prefix, "limit": limit})
        return [holder_from(row) for row in rows]

    def force_release(self, session: Session, key: str) -> tuple[Holder | None, bool]:
        rows = self._execute(session, "force_release", {"key": key})
        if not rows:
            return None, False
        *holder, awaited = rows[0]
        return holder_from(tuple(holder)), awaited

    def sweep(
        self, session: Session, after: str, batch_size: int, older_than_us: int, dry_run: bool
    ) -> Batch | None:
        name = "sweep_dry" if dry_run else "sweep"
        params = {"after": after, "size": batch_size, "older": older_than_us}
        rows = self._execute(session, name, params)
        examined, last_key, deleted = rows[0][:3]
        if not examined:
            return None
        expired = [holder_from(row[3:]) for row in rows if row[3] is not None]
        return Batch(examined=examined, last_key=last_key, expired=expired, deleted=deleted)

    def is_freed(self, session: Session, key: str, token: int) -> bool:
        return bool(self._execute(session, "is_freed", {"key": key, "token": token}))

    def is_busy(self, error: object) -> bool:
        return error_code(error) == ROW_BUSY

    def is_taken(self, session: Session, key: str) -> bool:
        return bool(self._execute(session, "is_taken", {"key": key}))


def _adapt(settings: dict[str, Any]) -> None:
    """What a connection of ours needs beside what the alias says."""
    # Unless the alias says otherwise, give up on a server that has left the network.
    options = settings["OPTIONS"]
    options.setdefault("connect_timeout", 5)
    # libpq, milliseconds: unacknowledged data this old means that nobody is there.
    options.setdefault("tcp_user_timeout", 5000)
    # EXECUTE takes no parameters bound on the server.
    options["server_side_binding"] = False
    # Our statements hold for READ COMMITTED; a stricter default of the alias is for its users.
    options.pop("isolation_level", None)
