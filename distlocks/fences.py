"""The guard rows: who may pass, by the statements of each database."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.db import IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet, Value

from .clock import current
from .exceptions import StaleToken
from .keys import key_of
from .models import LockGuard, StoreClock
from .transactions import is_testcases

# Guard rows younger than this stay, and older tokens are refused: so it is also the longest hold
# that may still enter a guarded transaction. Microseconds.
RETENTION_US = 30 * 86400 * 1_000_000

TABLE = LockGuard._meta.db_table

# PostgreSQL: the wait for an earlier holder is bounded, and the bound is put back within the
# statement, or it would govern the user's whole transaction. A holder that is paused in its
# transaction is cut off after one ttl.
POSTGRESQL_BOUND = """
WITH before AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS lock_timeout,
         current_setting('idle_in_transaction_session_timeout') AS idle),
bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', %(wait)s::text, true),
         set_config('idle_in_transaction_session_timeout',
                    CASE WHEN idle::interval BETWEEN '1ms' AND %(idle)s::text::interval THEN idle
                         ELSE %(idle)s::text END, true)
  FROM before),
"""

# Invariant, of each statement: it raises the row to our token, or gives nothing back, in which
# case a higher token has been here. It writes the row even if our token stands there already, so
# the transactions of one key take turns, and whatever ours reads after it is newer than every
# commit of an earlier token.
POSTGRESQL = (
    POSTGRESQL_BOUND
    + """raised AS (
  INSERT INTO {table} AS g (key, token) SELECT %(key)s, %(token)s::bigint FROM bound
  WHERE %(token)s::bigint > {us} - {retention}
  ON CONFLICT (key) DO UPDATE SET token = excluded.token WHERE g.token <= excluded.token
  RETURNING token)
SELECT token, set_config('lock_timeout', lock_timeout, true) FROM before JOIN raised ON true
"""
)
# Also PostgreSQL's where no time-outs may be set.
PLAIN = """
INSERT INTO {table} AS g (key, token) SELECT %(key)s, %(token)s
WHERE %(token)s > {us} - {retention}
ON CONFLICT (key) DO UPDATE SET token = excluded.token WHERE g.token <= excluded.token
RETURNING token
"""
MARIADB = """
SET STATEMENT innodb_lock_wait_timeout = {{wait}} FOR
INSERT INTO {table} (`key`, token) SELECT %(key)s, %(token)s FROM DUAL
WHERE %(token)s > {us} - {retention}
ON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token))
RETURNING token
"""
# For claims that are not exclusive. Invariant: no higher exclusive token has been here, and later
# exclusive ones wait for our commit. The row is there for that: it begins at 0, and never gets our
# token, which would refuse others of our kind that are older.
POSTGRESQL_CHECK = (
    POSTGRESQL_BOUND
    + """found AS MATERIALIZED (
  SELECT g.token FROM {table} AS g, bound WHERE g.key = %(key)s FOR SHARE OF g)
SELECT token, %(token)s::bigint > {us} - {retention}, set_config('lock_timeout', lock_timeout, true)
FROM before LEFT JOIN found ON true
"""
)
PLAIN_CHECK = """
SELECT token, %(token)s > {us} - {retention} FROM {table} WHERE key = %(key)s FOR SHARE
"""
MARIADB_CHECK = """
SET STATEMENT innodb_lock_wait_timeout = {{wait}} FOR
SELECT token, %(token)s > {us} - {retention} FROM {table} WHERE `key` = %(key)s LOCK IN SHARE MODE
"""
# A read would pass on an old snapshot there.
SQLITE_CHECK = """
INSERT INTO {table} AS g (key, token) SELECT %(key)s, 0 WHERE %(token)s > {us} - {retention}
ON CONFLICT (key) DO UPDATE SET token = g.token WHERE g.token <= %(token)s
RETURNING token, true
"""
POSTGRESQL_OPEN = """
WITH before AS MATERIALIZED (SELECT current_setting('lock_timeout') AS lock_timeout),
bound AS MATERIALIZED (SELECT set_config('lock_timeout', %(wait)s::text, true) FROM before),
opened AS (
  INSERT INTO {table} (key, token) SELECT %(key)s, 0 FROM bound
  ON CONFLICT DO NOTHING RETURNING token)
SELECT token, set_config('lock_timeout', lock_timeout, true) FROM before LEFT JOIN opened ON true
"""
OPEN = "INSERT INTO {table} (key, token) VALUES (%(key)s, 0) ON CONFLICT DO NOTHING"
MARIADB_OPEN = """
SET STATEMENT innodb_lock_wait_timeout = {{wait}} FOR
INSERT IGNORE INTO {table} (`key`, token) VALUES (%(key)s, 0)
"""


def raise_fence(
    wrapper: BaseDatabaseWrapper, key: str, token: int, *, wait: float, idle: float
) -> None:
    """Raise the guard row of `key` to `token` in the transaction that is open; StaleToken if a
    higher one stands there. `wait` and `idle` are seconds."""
    statement = _spelled(wrapper, POSTGRESQL, PLAIN, MARIADB, PLAIN)
    if statement is None:
        _raise_through_orm(wrapper.alias, key, token)
        return
    row = _ask(wrapper, statement, key, token, wait, idle)
    if row is None or row[0] != token:
        raise _stale(key, token)


def check_fence(
    wrapper: BaseDatabaseWrapper, key: str, token: int, *, wait: float, idle: float
) -> None:
    """In the transaction that is open, keep the guard row of `key` from being raised until its
    end; StaleToken if it has a higher token than `token`. `wait` and `idle` are seconds."""
    statement = _spelled(wrapper, POSTGRESQL_CHECK, PLAIN_CHECK, MARIADB_CHECK, SQLITE_CHECK)
    if statement is None:
        _check_through_orm(wrapper.alias, key, token)
        return
    row = _ask(wrapper, statement, key, token, wait, idle)
    if open_row := _spelled(wrapper, POSTGRESQL_OPEN, OPEN, MARIADB_OPEN, None):
        # A sweep may delete it in between.
        while row is None or row[0] is None:
            _ask(wrapper, open_row, key, token, wait, idle)
            row = _ask(wrapper, statement, key, token, wait, idle)
    if row is None or row[0] > token or not row[1]:
        raise _stale(key, token)


def _spelled(
    wrapper: BaseDatabaseWrapper,
    postgresql: str,
    in_testcase: str,
    mariadb: str,
    sqlite: str | None,
) -> str | None:
    """The statement for the connection; None where there is none."""
    if wrapper.vendor == "postgresql":
        # No time-outs may be set in the transaction around a test.
        return in_testcase if any(map(is_testcases, wrapper.atomic_blocks)) else postgresql
    if wrapper.vendor == "sqlite":
        return sqlite
    if wrapper.vendor == "mysql" and getattr(wrapper, "mysql_is_mariadb", False):
        return mariadb
    return None


def _ask(
    wrapper: BaseDatabaseWrapper, statement: str, key: str, token: int, wait: float, idle: float
) -> Any:
    """The row that the statement returns, or None."""
    if wrapper.vendor == "postgresql":
        from .backends.database.postgresql import US as us
    elif wrapper.vendor == "sqlite":
        from .backends.database.sqlite import US as us
    else:
        from .backends.database.mariadb import US as us
    sql = statement.format(
        table=wrapper.ops.quote_name(TABLE), us=us, retention=RETENTION_US
    ).format(wait=max(int(wait), 1))
    params: dict[str, Any] = {
        "key": key,
        "token": token,
        "wait": f"{max(int(wait * 1000), 1)}ms",
        "idle": f"{int(idle * 1000)}ms",
    }
    params = {name: value for name, value in params.items() if f"%({name})s" in sql}
    with wrapper.cursor() as cursor:
        cursor.execute(sql, params)
        return cursor.fetchone() if cursor.description else None


def _raise_through_orm(alias: str, key: str, token: int) -> None:
    """For databases without a statement of their own: update, insert on no row, update again."""
    guards = LockGuard.objects.using(alias).filter(key=key)
    if guards.filter(token__lte=token).update(token=token):
        return
    if guards.exists() or token <= current().wall_us() - RETENTION_US:
        raise _stale(key, token)
    try:
        with transaction.atomic(using=alias):
            LockGuard.objects.using(alias).create(key=key, token=token)
    except IntegrityError:
        if not guards.filter(token__lte=token).update(token=token):
            raise _stale(key, token) from None


def _check_through_orm(alias: str, key: str, token: int) -> None:
    """For databases without a statement of their own, which may know no shared row locks."""
    guards = LockGuard.objects.using(alias).filter(key=key)
    if not guards.exists():
        with suppress(IntegrityError), transaction.atomic(using=alias):
            LockGuard.objects.using(alias).create(key=key, token=0)
    if (
        token <= current().wall_us() - RETENTION_US
        or guards.select_for_update().get().token > token
    ):
        raise _stale(key, token)


def _stale(key: str, token: int) -> StaleToken:
    return StaleToken(
        f"A later holder of {key_of(key)!r} has entered a guarded transaction, or the fencing "
        f"token {token} is more than 30 days old: nothing was done.",
        keys=(key_of(key),),
    )


def sweep_guards(alias: str, *, batch_size: int, dry_run: bool) -> int:
    """Delete guard rows so old that their tokens would be refused anyway; how many."""
    old = LockGuard.objects.using(alias).filter(token__lt=StoreClock() - Value(RETENTION_US))
    if dry_run:
        return old.count()
    deleted = 0
    while keys := list(old.order_by("key").values_list("key", flat=True)[:batch_size]):
        # Checked again in the statement: a row raised meanwhile stays.
        count = _delete_guards(alias, keys, old)
        deleted += count
        if not count:
            break
    return deleted


def _delete_guards(alias: str, keys: list[str], old: QuerySet[LockGuard]) -> int:
    from .backends.database.mariadb import DELETE, US, as_json, is_supported

    wrapper = connections[alias]
    with transaction.atomic(using=alias):
        if wrapper.features.has_select_for_update_skip_locked:
            # A reader's open transaction keeps its row, and nobody waits for it.
            free = old.filter(key__in=keys).select_for_update(skip_locked=True)
            keys = list(free.values_list("key", flat=True))
        if not is_supported(wrapper):
            count, _ = old.filter(key__in=keys).delete()
            return count
        # The ORM's statement may read a small table from end to end, and wait for every row of it
        # that an open guarded transaction has in its hands.
        sql = DELETE.format(t=wrapper.ops.quote_name(TABLE))
        with wrapper.cursor() as cursor:
            cursor.execute(f"{sql} WHERE l.token < {US} - {RETENTION_US}", {"keys": as_json(keys)})
            return int(cursor.rowcount)
