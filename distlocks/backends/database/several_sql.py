"""Claims that several may have on one key: the statements for databases with a dialect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ...claims import EXCLUSIVE, Claim, Holder, Request
from .channels import Row, Session
from .dialect import HOLDER_COLUMNS, Taken, Wanted, acquire_params, holder_from
from .several import REMEMBERED_US, Latched, Seen, Several

# Rows that one statement names, at most.
IN_ONE_STATEMENT = 250

# Invariant: returns the row as the last transaction that had it in its hands left it.
LATCH = """
{quick}SELECT mode, fencing_token, expires_at, reserved_by, reserved_until, waiting_until FROM {t}
WHERE {key} = %(key)s{for_update}
"""
OPEN = """
{quick}{insert_or_ignore} {t} ({key}, owner_id, fencing_token, acquired_at, expires_at,
                               waiting_until, host, pid, thread, label, metadata)
VALUES (%(key)s, '', 0, 0, 0, 0, '', 0, '', '', '{{}}'){or_nothing}
"""
# Invariant: one reading of the clock tells the live from the rest, and becomes the time of the
# grant. The left join gives it even where there is no claim.
LOOK = """
SELECT n, COUNT(CASE WHEN others THEN 1 END) AS number, MIN(CASE WHEN others THEN mode END) AS mode,
       MIN(CASE WHEN others THEN expires_at END) AS soonest,
       MAX(CASE WHEN others THEN expires_at END) AS latest,
       MAX(CASE WHEN NOT others THEN fencing_token END) AS own_token,
       MAX(CASE WHEN NOT others THEN acquired_at END) AS own_acquired
FROM (SELECT clock.n, h.mode, h.expires_at, h.fencing_token, h.acquired_at,
             h.owner_id <> %(owner)s OR h.released_at > 0 AS others
      FROM (SELECT {us} AS n) AS clock
      LEFT JOIN {h} AS h ON h.{key} = %(key)s AND h.expires_at > clock.n) AS seen
GROUP BY n
"""
GLANCE = """
SELECT t.mode AS row_mode, t.fencing_token, t.expires_at, t.reserved_by, t.reserved_until,
       t.waiting_until, looked.*
FROM {t} AS t, ({look}) AS looked WHERE t.{key} = %(key)s
"""
# Invariant: an owner has one row on a key, so a request that is sent again finds its own.
PUT = """
{quick}INSERT INTO {h} ({key}, owner_id, mode, released_at, fencing_token, acquired_at, expires_at,
                        host, pid, thread, label, metadata)
VALUES (%(key)s, %(owner)s, %(mode)s, 0, %(token)s, %(acquired)s, %(until)s,
        %(host)s, %(pid)s, %(thread)s, %(label)s, %(metadata)s)
{on_same_owner} released_at = 0, mode = {new_mode}, fencing_token = {new_fencing_token},
  acquired_at = {new_acquired_at}, expires_at = {new_expires_at}
"""
# Invariant: the key's row lasts as long as the last claim on it, this one included. Where it uses
# up a reservation, the waiters' mark goes with it: those whom that kept out are told.
OCCUPY = """
{quick}UPDATE {t} SET
  owner_id = '', host = '', pid = 0, thread = '', label = '', metadata = '{{}}',
  mode = %(mode)s, fencing_token = %(token)s, acquired_at = COALESCE(%(since)s, acquired_at),
  expires_at = %(until)s,
  reserved_until = CASE WHEN reserved_by = %(owner)s THEN 0 ELSE reserved_until END,
  waiting_until = CASE WHEN reserved_by = %(owner)s THEN 0 ELSE waiting_until END
WHERE {key} = %(key)s
"""
# Invariant: only a live claim of the owner ends; it stays taken until its minimum hold is over.
END = """
{quick}UPDATE {h} SET
  released_at = {us},
  expires_at = CASE WHEN %(min_hold)s > 0 AND acquired_at + %(min_hold)s > {us}
                    THEN acquired_at + %(min_hold)s ELSE 0 END
WHERE {key} = %(key)s AND owner_id = %(owner)s AND released_at = 0
  AND (expires_at > {us} OR %(even_expired)s){and_token}
"""
HAS_ENDED = """
SELECT 1 FROM {h}
WHERE {key} = %(key)s AND owner_id = %(owner)s AND fencing_token = %(token)s AND released_at > 0
"""
# When the last live claim on the key ends; 0 if there is none.
LATEST = """
COALESCE((SELECT MAX(h.expires_at) FROM {h} AS h
          WHERE h.{key} = {t}.{key} AND h.expires_at > {us}), 0)
"""
# Invariant: the row is free once no claim is live. The waiters' mark is cleared in the same update,
# so that whoever marked before is announced to and whoever comes later finds another token.
SETTLE = """
{quick}UPDATE {t} SET
  expires_at = {latest}, fencing_token = fencing_token + 1,
  waiting_until = CASE WHEN waiting_until > {us} THEN -1 ELSE 0 END
WHERE {key} = %(key)s AND mode <> '{exclusive}'
"""
AWAITED = "SELECT waiting_until < 0 FROM {t} WHERE {key} = %(key)s"
VERSION = """
SELECT fencing_token FROM {t}
WHERE {key} = %(key)s AND (expires_at > {us} OR reserved_until > {us})
"""
# Invariant: waits for nobody, and takes rows in one order.
LATCH_FREE = "SELECT {key} FROM {t} WHERE {key} IN ({{keys}}) ORDER BY {key}{skip_locked}"
# Invariant: a claim that has ended never lives again.
PROLONG = """
{quick}UPDATE {h}{by_owner} SET
  expires_at = {greatest}(
    {us} + %(ttl)s, CASE WHEN %(min_hold)s > 0 THEN acquired_at + %(min_hold)s ELSE 0 END)
WHERE ({key}, owner_id) IN ({values}{{claims}}) AND released_at = 0 AND expires_at > {us}
"""
LIVE = """
SELECT {key}, owner_id FROM {h}
WHERE ({key}, owner_id) IN ({values}{{claims}}) AND released_at = 0 AND expires_at > {us}
"""
COVER = """
{quick}UPDATE {t}{by_key} SET expires_at = {latest}
WHERE {key} IN ({{keys}}) AND mode <> '{exclusive}'
"""
REMOVE = "{quick}DELETE FROM {h} WHERE {key} = %(key)s"
# Invariant: a claim that may be live, or whose release may be sent again, stays.
FORGET = """
{quick}DELETE FROM {h}
WHERE {key} = %(key)s AND expires_at <= {us} - {remembered} AND released_at <= {us} - {remembered}
"""
ON_KEY = """
SELECT {holder} FROM {h} WHERE {key} = %(key)s AND expires_at > {us}
ORDER BY fencing_token LIMIT %(limit)s
"""
HOLDERS = """
SELECT {holder} FROM {h}
WHERE {key} >= %(prefix)s AND SUBSTR({key}, 1, {length}(%(prefix)s)) = %(prefix)s
  AND expires_at > {us}
ORDER BY {key}, fencing_token LIMIT %(limit)s
"""
# Invariant: only keys whose claims others could join are reserved, by one waiter at a time.
RESERVE = """
{quick}UPDATE {t} SET reserved_by = %(owner)s, reserved_until = {us} + %(life)s
WHERE {key} = %(key)s AND mode <> '{exclusive}' AND expires_at > {us}
  AND (reserved_until <= {us} OR reserved_by = %(owner)s)
"""
# Invariant: what has ended is never extended, so a row found here stays ended until it is deleted.
ENDED = """
SELECT {holder}, id, released_at FROM {h}
WHERE {key} > %(after)s AND {key} <= %(last)s AND expires_at <= {us}
  AND (released_at = 0 OR released_at <= {us} - {remembered})
ORDER BY id{skip_locked}
"""
DELETE_ENDED = "{quick}DELETE FROM {h} WHERE id IN ({{ids}})"

# What databases spell differently. `quick`: before a statement that must not wait for a row in
# other statements' hands, where no time-out of the transaction sees to that.
STANDARD = {
    "key": "key",
    "quick": "",
    "insert_or_ignore": "INSERT INTO",
    "or_nothing": " ON CONFLICT DO NOTHING",
    "on_same_owner": "ON CONFLICT (key, owner_id) DO UPDATE SET",
    "new": "excluded.{}",
    "length": "length",
    "by_key": "",
    "by_owner": "",
    "for_update": " FOR UPDATE",
    "skip_locked": " FOR UPDATE SKIP LOCKED",
    "greatest": "greatest",
    # Before a list of rows.
    "values": "",
    "no_limit": None,
}


class SqlSeveral(Several):
    """The statements, in one of the dialects' spellings."""

    def __init__(self, locks: str, holders: str, us: str, spelling: dict[str, Any]) -> None:
        names: dict[str, Any] = {
            **spelling,
            "t": locks,
            "h": holders,
            "us": us,
            "exclusive": EXCLUSIVE,
            "remembered": REMEMBERED_US,
        }
        names["latest"] = LATEST.format(**names).strip()
        names["holder"] = HOLDER_COLUMNS.format(
            key=spelling["key"],
            owner="CASE WHEN released_at > 0 THEN '' ELSE owner_id END AS owner_id",
            remaining=f"expires_at - {us} AS remaining",
        )
        for column in ("mode", "fencing_token", "acquired_at", "expires_at"):
            names[f"new_{column}"] = spelling["new"].format(column)
        self._no_limit = spelling["no_limit"]
        self._latch = LATCH.format(**names)
        self._open = OPEN.format(**names)
        self._look = LOOK.format(**names)
        self._glance = GLANCE.format(**names, look=self._look)
        self._put = PUT.format(**names)
        self._occupy = OCCUPY.format(**names)
        self._end = END.format(**names, and_token=" AND fencing_token = %(token)s")
        self._end_any = END.format(**names, and_token="")
        self._has_ended = HAS_ENDED.format(**names)
        self._settle = SETTLE.format(**names)
        self._awaited = AWAITED.format(**names)
        self._version = VERSION.format(**names)
        self._latch_free = LATCH_FREE.format(**names)
        self._prolong = PROLONG.format(**names)
        self._live = LIVE.format(**names)
        self._cover = COVER.format(**names)
        self._remove = REMOVE.format(**names)
        self._forget = FORGET.format(**names)
        self._on_key = ON_KEY.format(**names)
        self._holders = HOLDERS.format(**names)
        self._reserve = RESERVE.format(**names)
        self._ended = ENDED.format(**{**names, "skip_locked": ""})
        self._ended_locked = ENDED.format(**names)
        self._delete_ended = DELETE_ENDED.format(**names)

    def read(self, session: Session, sql: str, params: dict[str, Any]) -> list[Row]:
        """What a statement returns that reads outside of a transaction of ours."""
        return session.execute(sql, params)

    def latch(self, session: Session, key: str) -> Latched:
        while not (rows := session.execute(self._latch, {"key": key})):
            session.execute(self._open, {"key": key})
        return Latched(*rows[0])

    def glance(self, session: Session, key: str, owner_id: str) -> tuple[Latched, Seen] | None:
        rows = self.read(session, self._glance, {"key": key, "owner": owner_id})
        return (Latched(*rows[0][:6]), _seen(rows[0][6:])) if rows else None

    def look(self, session: Session, key: str, owner_id: str) -> Seen:
        return _seen(session.execute(self._look, {"key": key, "owner": owner_id})[0])

    def put(
        self, session: Session, claim: Claim, request: Request, taken: Taken, until_us: int
    ) -> None:
        params = acquire_params(claim.key, request)
        params["mode"] = claim.mode
        params["token"], params["acquired"] = taken.fencing_token, taken.acquired_us
        params["until"] = until_us
        session.execute(self._put, params)

    def occupy(
        self,
        session: Session,
        claim: Claim,
        owner_id: str,
        *,
        last_token: int,
        since_us: int | None,
        until_us: int,
    ) -> None:
        params = {
            "key": claim.key,
            "mode": claim.mode,
            "owner": owner_id,
            "token": last_token,
            "since": since_us,
            "until": until_us,
        }
        session.execute(self._occupy, params)

    def end(
        self, session: Session, key: str, owner_id: str, token: int | None, min_hold_us: int
    ) -> bool:
        params = {
            "key": key,
            "owner": owner_id,
            "token": token,
            "min_hold": min_hold_us,
            # Nobody else can have come before the caller's transaction ends.
            "even_expired": session.in_callers_transaction,
        }
        return bool(session.count(self._end_any if token is None else self._end, params))

    def has_ended(self, session: Session, key: str, owner_id: str, token: int) -> bool:
        params = {"key": key, "owner": owner_id, "token": token}
        return bool(session.execute(self._has_ended, params))

    def settle(self, session: Session, key: str) -> bool:
        session.execute(self._settle, {"key": key})
        return bool(session.execute(self._awaited, {"key": key})[0][0])

    def latch_free(self, session: Session, keys: Sequence[str]) -> set[str]:
        return {
            row[0]
            for some in _batches(keys)
            for row in _execute(session, self._latch_free, {}, keys=some)
        }

    def prolong(
        self, session: Session, wanted: Sequence[Wanted], ttl_us: int, min_hold_us: int
    ) -> None:
        for some in _batches(wanted):
            claims = [(one.key, one.owner_id) for one in some]
            _execute(
                session, self._prolong, {"ttl": ttl_us, "min_hold": min_hold_us}, claims=claims
            )

    def live(self, session: Session, wanted: Sequence[Wanted]) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for some in _batches(wanted):
            claims = [(one.key, one.owner_id) for one in some]
            found.update(map(tuple, _execute(session, self._live, {}, claims=claims)))
        return found

    def cover(self, session: Session, keys: Sequence[str]) -> None:
        for some in _batches(keys):
            _execute(session, self._cover, {}, keys=some)

    def remove(self, session: Session, key: str) -> None:
        session.execute(self._remove, {"key": key})

    def forget(self, session: Session, key: str) -> None:
        session.execute(self._forget, {"key": key})

    def version(self, session: Session, key: str) -> int:
        rows = self.read(session, self._version, {"key": key})
        return int(rows[0][0]) if rows else 0

    def on_key(self, session: Session, key: str, limit: int | None) -> list[Holder]:
        params = {"key": key, "limit": self._no_limit if limit is None else limit}
        return [holder_from(row) for row in self.read(session, self._on_key, params)]

    def holders(self, session: Session, prefix: str, limit: int | None) -> list[Holder]:
        params = {"prefix": prefix, "limit": self._no_limit if limit is None else limit}
        return [holder_from(row) for row in self.read(session, self._holders, params)]

    def reserve(self, session: Session, key: str, owner_id: str, life_us: int) -> None:
        session.execute(self._reserve, {"key": key, "owner": owner_id, "life": life_us})

    def ended(self, session: Session, after: str, last: str) -> tuple[list[Holder], bool]:
        rows = self.read(session, self._ended, {"after": after, "last": last})
        return _left_behind(rows), bool(rows)

    def sweep(self, session: Session, after: str, last: str) -> list[Holder]:
        rows = session.execute(self._ended_locked, {"after": after, "last": last})
        for some in _batches([row[-2] for row in rows]):
            _execute(session, self._delete_ended, {}, ids=some)
        return _left_behind(rows)


def _seen(row: Row) -> Seen:
    now, others, mode, *numbers = row
    return Seen(now, others, mode or "", *(number or 0 for number in numbers))


def _left_behind(rows: Sequence[Row]) -> list[Holder]:
    """Those of ENDED's rows that were never released."""
    return [holder_from(row[:-2]) for row in rows if not row[-1]]


def _batches(items: Sequence[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(islice(rest, IN_ONE_STATEMENT)):
        yield some


def _execute(
    session: Session, sql: str, params: dict[str, Any], **lists: Sequence[Any]
) -> list[Row]:
    """Execute `sql` with a list of values, or of pairs of values, for each `{name}` in it."""
    params = dict(params)
    places = {name: ", ".join(_places(params, name, values)) for name, values in lists.items()}
    return session.execute(sql.format(**places), params)


def _places(params: dict[str, Any], name: str, values: Sequence[Any]) -> Iterator[str]:
    """Add the values to the parameters; where they stand in the statement."""
    for number, value in enumerate(values):
        place = f"{name}_{number}"
        if isinstance(value, tuple):
            yield f"({', '.join(_places(params, place, value))})"
        else:
            params[place] = value
            yield f"%({place})s"
