"""The statements: the lock is the server's own, the row says who has it and keeps the token.

Parameters are named as in the database backend; `Raw` numbers them for the wire.
"""

from __future__ import annotations

import hashlib
import re

from ..database.postgresql import US

# Between a key's name and an owner id, in the name of a sharer's row: no key can hold it.
OF = "\x1e"
# How a bigint key stands in pg_locks: its halves, and objsubid 1.
LOCKS = """
  SELECT (k.classid::bigint << 32) | k.objid::bigint AS lock_id, k.pid, k.mode
  FROM pg_locks AS k
  WHERE k.locktype = 'advisory' AND k.objsubid = 1 AND k.granted
    AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

# Which server this is: one that was started again, or has taken the other's place, has no locks.
STARTED = "(extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint"
# A lease that was neither released nor has run out, and whose lock is free: whose session has ended
# without it. Its holder may believe in it until it runs out, so it is waited out. Where the end of
# a session is to free its locks at once, the row says so by the other sign, and the lease is waited
# out only at another server than that one: there, nothing has told its holder for sure.
HAUNTED = "({r}.expires_at > {us} AND {r}.incarnation <> -{started})"
FREED_AT_ONCE = f"-{STARTED}"

# What the lock is called for: tried, or had already by a wait.
TRY_EXCLUSIVE = "pg_try_advisory_lock(%(id)s::bigint)"
TRY_SHARED = "pg_try_advisory_lock_shared(%(id)s::bigint)"
HAD = "true"
# Through a proxy that pools transactions, the statement may come to another session than the one
# whose lock is to be taken or freed. Nothing is done there.
OURS = "pg_backend_pid() = %(session)s::int"

# Invariant: the row is written only after the lock is had (it reads from `had`), by one reading of
# the clock after that, so tokens grow in the order of the grants. An update that finds the row
# changed since the statement began decides by its newest version. The lock is taken at most once,
# and only by the session that is meant. Rows of sharers count as they are once they can be locked:
# one whose release is under way is gone then. The session's end by idleness is what ends the lease:
# it begins to count when this statement is over.
EXCLUSIVE = """
WITH had AS MATERIALIZED (
  SELECT CASE WHEN {ours} THEN {take} END AS got),
sharers AS MATERIALIZED (
  SELECT 1 FROM had, {t} AS s
  WHERE had.got AND s.name > %(name)s::text || chr(30) AND s.name < %(name)s::text || chr(31)
    AND {haunted_by_sharer}
  FOR UPDATE OF s),
taken AS (
  INSERT INTO {t} AS l (name, owner_id, fencing_token, acquired_at, expires_at, cools_until,
                        shared_until, lock_id, session, incarnation, host, pid, thread, label,
                        metadata)
  SELECT %(name)s::text, %(owner)s::text, n, n, n + %(ttl)s::bigint,
         CASE WHEN %(min_hold)s::bigint > 0 THEN n + %(min_hold)s::bigint ELSE 0 END,
         0, %(id)s::bigint, %(session)s::int, {granted_at}, %(host)s::text, %(pid)s::bigint,
         %(thread)s::text, %(label)s::text, %(metadata)s::jsonb
  FROM (SELECT {us} AS n FROM had WHERE got AND NOT EXISTS (SELECT FROM sharers) OFFSET 0) AS clock
  ON CONFLICT (name) DO UPDATE SET
    (owner_id, fencing_token, acquired_at, expires_at, cools_until,
     session, incarnation, host, pid, thread, label, metadata) = (
      SELECT excluded.owner_id, greatest(l.fencing_token + 1, n), n, n + %(ttl)s::bigint,
             CASE WHEN %(min_hold)s::bigint > 0 THEN n + %(min_hold)s::bigint ELSE 0 END,
             excluded.session, excluded.incarnation, excluded.host, excluded.pid,
             excluded.thread, excluded.label, excluded.metadata
      FROM (SELECT {us} AS n OFFSET 0) AS clock)
    WHERE (greatest(l.cools_until, l.shared_until) <= {us} OR l.owner_id = %(owner)s::text)
      AND NOT ({haunted} AND l.owner_id <> %(owner)s::text)
  RETURNING fencing_token, acquired_at)
SELECT got, fencing_token, acquired_at{idle} FROM had LEFT JOIN taken ON true
"""

# Invariant: as above; the key's row keeps the token and until when sharers keep it, and each
# sharer has a row of its own.
SHARED = """
WITH had AS MATERIALIZED (
  SELECT CASE WHEN {ours} THEN {take} END AS got),
taken AS (
  INSERT INTO {t} AS l (name, owner_id, fencing_token, acquired_at, expires_at, cools_until,
                        shared_until, lock_id, session, incarnation, host, pid, thread, label,
                        metadata)
  SELECT %(name)s::text, '', n, n, 0, 0,
         CASE WHEN %(min_hold)s::bigint > 0 THEN n + %(min_hold)s::bigint ELSE 0 END,
         %(id)s::bigint, 0, {granted_at}, '', 0, '', '', '{{}}'
  FROM (SELECT {us} AS n FROM had WHERE got OFFSET 0) AS clock
  ON CONFLICT (name) DO UPDATE SET
    (owner_id, fencing_token, expires_at, incarnation, shared_until) = (
      SELECT '', greatest(l.fencing_token + 1, n), 0, excluded.incarnation,
             CASE WHEN %(min_hold)s::bigint > 0
                  THEN greatest(l.shared_until, n + %(min_hold)s::bigint)
                  ELSE l.shared_until END
      FROM (SELECT {us} AS n OFFSET 0) AS clock)
    WHERE l.cools_until <= {us} AND NOT {haunted}
  RETURNING fencing_token),
sharer AS (
  INSERT INTO {t} AS l (name, owner_id, fencing_token, acquired_at, expires_at, cools_until,
                        shared_until, lock_id, session, incarnation, host, pid, thread, label,
                        metadata)
  SELECT %(name)s::text || chr(30) || %(owner)s::text, %(owner)s::text, fencing_token, n,
         n + %(ttl)s::bigint,
         CASE WHEN %(min_hold)s::bigint > 0 THEN n + %(min_hold)s::bigint ELSE 0 END,
         0, %(id)s::bigint, %(session)s::int, {granted_at}, %(host)s::text, %(pid)s::bigint,
         %(thread)s::text, %(label)s::text, %(metadata)s::jsonb
  FROM (SELECT fencing_token, {us} AS n FROM taken OFFSET 0) AS clock
  ON CONFLICT (name) DO UPDATE SET
    (fencing_token, acquired_at, expires_at, cools_until, session, incarnation) =
    (excluded.fencing_token, excluded.acquired_at, excluded.expires_at, excluded.cools_until,
     excluded.session, excluded.incarnation)
  RETURNING fencing_token, acquired_at)
SELECT got, fencing_token, acquired_at{idle} FROM had LEFT JOIN sharer ON true
"""
# How long the server lets the session be idle from now on, if the lock was granted.
IDLE = """, CASE WHEN fencing_token IS NOT NULL
            THEN set_config('idle_session_timeout', %(idle)s::text, false) END"""

# Invariant: a lease is extended only by the session that has its locks, whose idleness is counted
# anew from here; a row that is not the owner's any more was freed by force.
EXTEND = """
WITH extended AS (
  UPDATE {t} SET expires_at = {us} + %(ttl)s::bigint
  WHERE name = ANY(%(names)s::text[]) AND owner_id = %(owner)s::text AND {ours}
  RETURNING 1)
SELECT {ours}, (SELECT count(*) FROM extended),
       CASE WHEN {ours} THEN set_config('idle_session_timeout', %(idle)s::text, false) END
"""
# Invariant: a session has the locks of one lease and no others. Rows stay, for who has a key is
# told by the locks, and a minimum hold by the row.
RELEASE = """
SELECT CASE WHEN {ours} THEN pg_advisory_unlock_all()::text END,
       CASE WHEN {ours} THEN set_config('idle_session_timeout', '0', false) END
"""
# The server need not wait for its disk: what is lost of this keeps a key for a lease longer.
LAZILY = "lazily AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))"
# Invariant: as RELEASE; and who comes next finds the lease released: the row is marked before the
# lock comes free (it is asked for the count first), and whoever has the lock then waits at the row
# for the end of this statement.
RELEASE_MARKED = """
WITH {lazily},
marked AS (
  UPDATE {t} AS l SET expires_at = 0 FROM lazily
  WHERE name = ANY(%(names)s::text[]) AND owner_id = %(owner)s::text AND {ours}
  RETURNING 1)
SELECT CASE WHEN (SELECT count(*) FROM marked) >= 0 AND {ours}
            THEN pg_advisory_unlock_all()::text END,
       CASE WHEN {ours} THEN set_config('idle_session_timeout', '0', false) END
"""
# Invariant: as RELEASE_MARKED; the rows of a sharer go, unless they keep the key from others yet.
RELEASE_SHARED = """
WITH {lazily},
marked AS (
  UPDATE {t} AS l SET expires_at = 0 FROM lazily
  WHERE name = ANY(%(names)s::text[]) AND owner_id = %(owner)s::text AND {ours}
    AND cools_until > {us}
  RETURNING 1),
gone AS (
  DELETE FROM {t} USING lazily
  WHERE name = ANY(%(names)s::text[]) AND owner_id = %(owner)s::text AND {ours}
    AND cools_until <= {us}
  RETURNING 1)
SELECT CASE WHEN (SELECT count(*) FROM marked) + (SELECT count(*) FROM gone) >= 0 AND {ours}
            THEN pg_advisory_unlock_all()::text END,
       CASE WHEN {ours} THEN set_config('idle_session_timeout', '0', false) END
"""
# Invariant: waits in the server's own queue, first come first served. A session that is granted
# the lock and does not say soon that it lives comes to its end.
WAIT = """
SELECT CASE WHEN {ours} THEN set_config('idle_session_timeout', %(idle)s::text, false) END,
       CASE WHEN {ours} THEN {lock}(%(id)s::bigint)::text END
"""

HOLDER_COLUMNS = """
  r.name, CASE WHEN k.pid IS NULL THEN '' ELSE r.owner_id END, r.fencing_token, r.acquired_at,
  greatest(r.cools_until, CASE WHEN k.pid IS NOT NULL OR {haunted} THEN r.expires_at END) - {us},
  r.host, r.pid,
  r.thread, r.label, r.metadata,
  jsonb_build_object('pid', a.pid, 'state', a.state, 'query_start', a.query_start,
                     'state_change', a.state_change, 'application', a.application_name,
                     'unreleased', k.pid IS NULL AND {haunted} AND r.cools_until < r.expires_at)
"""
# Invariant: who has a key is who has its lock now, by the server's own list; a row whose session
# has not counts only while its minimum hold keeps the key, or while its holder may not know that it
# has lost it.
HOLDERS = """
WITH locks AS MATERIALIZED ({locks})
SELECT {columns}
FROM {t} AS r
LEFT JOIN locks AS k ON k.lock_id = r.lock_id AND k.pid = r.session
  AND k.mode = CASE WHEN strpos(r.name, chr(30)) > 0 THEN 'ShareLock' ELSE 'ExclusiveLock' END
LEFT JOIN pg_stat_activity AS a ON a.pid = k.pid
WHERE r.name >= %(from)s::text AND starts_with(r.name, %(from)s::text) {only}
  AND (k.pid IS NOT NULL OR r.cools_until > {us} OR {haunted})
ORDER BY r.name LIMIT %(limit)s::bigint
"""
ONLY = "AND (r.name = %(from)s::text OR starts_with(r.name, %(from)s::text || chr(30)))"
# Which sessions have the lock with this number, whoever took it.
LOCKED_BY = """
WITH locks AS MATERIALIZED ({locks})
SELECT a.pid, a.application_name, a.state FROM locks AS k JOIN pg_stat_activity AS a USING (pid)
WHERE k.lock_id = %(id)s::bigint
"""
IS_TAKEN = """
SELECT 1 FROM pg_locks AS k
WHERE k.locktype = 'advisory' AND k.objsubid = 1 AND k.granted
  AND (k.classid::bigint << 32) | k.objid::bigint = %(id)s::bigint
  AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
UNION ALL
SELECT 1 FROM {t} AS r
WHERE name = %(name)s AND (greatest(cools_until, shared_until) > {us} OR {haunted})
UNION ALL
SELECT 1 FROM {t} AS s
WHERE s.name > %(name)s::text || chr(30) AND s.name < %(name)s::text || chr(31)
  AND {haunted_by_sharer}
LIMIT 1
"""

# Invariant: what is freed is what was found, by owner and token; a later grant is not touched. The
# token goes up, so that the old holder can tell this from a release of its own.
CLEAR = """
UPDATE {t} SET owner_id = '', fencing_token = fencing_token + 1, cools_until = 0, expires_at = 0,
               shared_until = 0
WHERE name = %(name)s AND ((owner_id = %(owner)s AND fencing_token = %(token)s) OR %(any)s)
"""
# What else those sessions have, ends with them.
CLEAR_SESSIONS = """
UPDATE {t} SET expires_at = 0
WHERE session = ANY(%(sessions)s::int[]) AND owner_id = ANY(%(owners)s::text[])
"""
# Invariant: a session is ended only while it has the lock.
END_SESSIONS = """
WITH locks AS MATERIALIZED ({locks})
SELECT pg_terminate_backend(pid) FROM locks
WHERE lock_id = %(id)s::bigint AND pid = ANY(%(sessions)s::int[]) AND pid <> pg_backend_pid()
"""
HAVE_LOCK = """
WITH locks AS MATERIALIZED ({locks})
SELECT pid FROM locks WHERE lock_id = %(id)s::bigint AND pid = ANY(%(sessions)s::int[])
"""
SESSIONS_OF = """
SELECT lock_id, session FROM {t} WHERE name = ANY(%(names)s::text[]) AND owner_id = %(owner)s
"""
FORGET = """
UPDATE {t} SET cools_until = 0, expires_at = 0, session = 0
WHERE name = ANY(%(names)s::text[]) AND owner_id = %(owner)s
"""
# A key's sharers may go with an abandoned one's minimum hold.
FORGET_SHARED = """
UPDATE {t} AS l SET shared_until = coalesce((
  SELECT max(s.cools_until) FROM {t} AS s
  WHERE s.name > l.name || chr(30) AND starts_with(s.name, l.name || chr(30))), 0)
WHERE name = ANY(%(names)s::text[])
"""
IS_LAST = """
WITH marked AS (
  UPDATE {t} AS m SET expires_at = 0
  FROM unnest(%(names)s::text[], %(tokens)s::bigint[]) AS v (name, token)
  WHERE m.name = v.name AND m.fencing_token = v.token AND m.owner_id = %(owner)s)
SELECT count(*) FROM unnest(%(names)s::text[], %(tokens)s::bigint[]) AS w (name, token)
LEFT JOIN {t} AS l ON l.name = w.name
WHERE (l.fencing_token = w.token AND l.owner_id = %(owner)s)
   OR (l.name IS NULL AND strpos(w.name, chr(30)) > 0)
"""
# Invariant: a row is deleted only while nobody has its lock, nor can get it before the deletion is
# there for all to see; rows in other statements' hands are left for the next sweep.
SWEEP = """
WITH span AS MATERIALIZED (
  SELECT name FROM {t} WHERE name > %(after)s::text ORDER BY name LIMIT %(size)s),
old AS MATERIALIZED (
  SELECT name, lock_id FROM {t}
  WHERE name IN (SELECT name FROM span)
    AND greatest(cools_until, shared_until, expires_at) <= {us}
    AND fencing_token <= {us} - %(older)s {lock}),
dead AS MATERIALIZED (
  SELECT name FROM old WHERE pg_try_advisory_xact_lock(lock_id)){act}
SELECT count(*), max(name), (SELECT count(*) FROM dead) FROM span
"""
SWEEP_ACT = ", deleted AS (DELETE FROM {t} WHERE name IN (SELECT name FROM dead))"


class Raw:
    """One statement as the wire has it: numbered parameters, and a name made from its text."""

    def __init__(self, sql: str) -> None:
        self.names = tuple(dict.fromkeys(re.findall(r"%\((\w+)\)s", sql)))
        self.text = re.sub(r"%\((\w+)\)s", lambda m: f"${self.names.index(m[1]) + 1}", sql).encode()
        self.name = f"distlocks_{hashlib.sha256(self.text).hexdigest()[:16]}".encode()

    @property
    def prepare(self) -> bytes:
        """The statement that prepares it under its name."""
        return b"PREPARE " + self.name + b" AS " + self.text


def lock_id(name: str) -> int:
    """The number by which the server knows the lock of a key: SHA-256, cut to 64 bits."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


class Texts:
    """All statements, for one table; `waits_out` for leases whose sessions have ended."""

    def __init__(self, table: str, *, waits_out: bool) -> None:
        names = {"t": table, "us": US, "locks": LOCKS, "started": STARTED, "lazily": LAZILY}
        names["granted_at"] = STARTED if waits_out else FREED_AT_ONCE
        names["haunted_by_sharer"] = HAUNTED.format(**names, r="s")
        listed = {**names, "haunted": HAUNTED.format(**names, r="r")}
        names["haunted"] = HAUNTED.format(**names, r="l")

        def asked(sql: str, *, take: str = "", idle: str = IDLE) -> Raw:
            return Raw(sql.format(**names, ours=OURS, take=take, idle=idle))

        self.exclusive = asked(EXCLUSIVE, take=TRY_EXCLUSIVE)
        self.exclusive_had = asked(EXCLUSIVE, take=HAD)
        self.shared = asked(SHARED, take=TRY_SHARED)
        self.shared_had = asked(SHARED, take=HAD)
        self.extend = asked(EXTEND)
        self.free = asked(RELEASE)
        self.release = asked(RELEASE_MARKED if waits_out else RELEASE)
        self.release_shared = asked(RELEASE_SHARED)
        self.wait_exclusive = Raw(WAIT.format(ours=OURS, lock="pg_advisory_lock"))
        self.wait_shared = Raw(WAIT.format(ours=OURS, lock="pg_advisory_lock_shared"))
        # On any connection: the lock is in the caller's transaction.
        self.note_exclusive = EXCLUSIVE.format(**names, ours="true", take=HAD, idle="")
        self.note_shared = SHARED.format(**names, ours="true", take=HAD, idle="")
        columns = HOLDER_COLUMNS.format(**listed)
        self.holders = HOLDERS.format(**listed, columns=columns, only="")
        self.on_key = HOLDERS.format(**listed, columns=columns, only=ONLY)
        self.locked_by = LOCKED_BY.format(**names)
        self.is_taken = IS_TAKEN.format(**listed)
        self.clear = CLEAR.format(**names)
        self.clear_sessions = CLEAR_SESSIONS.format(**names)
        self.end_sessions = END_SESSIONS.format(**names)
        self.have_lock = HAVE_LOCK.format(**names)
        self.sessions_of = SESSIONS_OF.format(**names)
        self.forget = FORGET.format(**names)
        self.forget_shared = FORGET_SHARED.format(**names)
        self.is_last = IS_LAST.format(**names)
        act, row_lock = SWEEP_ACT.format(**names), "FOR UPDATE SKIP LOCKED"
        self.sweep = SWEEP.format(**names, act=act, lock=row_lock)
        self.sweep_dry = SWEEP.format(**names, act="", lock="")
