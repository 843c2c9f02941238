"""The guard: a transaction that a holder with an old fencing token cannot enter."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from django.db import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    ProgrammingError,
    connections,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet, Value

from .backends.database.channels import error_code, is_broken, unavailable
from .claims import EXCLUSIVE, PERMIT, Claim
from .clock import current, lease_now
from .exceptions import LeaseLost, LockTimeout, NotSupported, StaleToken
from .keys import key_of
from .models import LockGuard, StoreClock
from .transactions import is_testcases, testcase_depth

if TYPE_CHECKING:
    from .lease import Lease

# Guard rows younger than this stay, and older tokens are refused: so it is also the longest hold
# that may still enter a guarded transaction. Microseconds.
RETENTION_US = 30 * 86400 * 1_000_000

# Errors of the guard statement after which the transaction, begun anew, finds its way: it waited
# for an earlier holder's commit under a snapshot from before it (PostgreSQL; MariaDB), or a
# deadlock.
BEGIN_AGAIN = ("40001", "40P01", 1213, 1020)
# The wait for an earlier holder's transaction took longer than it may (PostgreSQL; MariaDB).
WAITED_TOO_LONG = ("55P03", 1205)
# PostgreSQL's idle_in_transaction_session_timeout has ended the session.
CUT_OFF = "25P03"

TABLE = LockGuard._meta.db_table

# Invariant, of each statement: it raises the row to our token, or gives nothing back, in which
# case a higher token has been here. It writes the row even if our token stands there already, so
# the transactions of one key take turns, and whatever ours reads after it is newer than every
# commit of an earlier token.
#
# PostgreSQL: the wait for an earlier holder is bounded, and the bound is put back within the
# statement, or it would govern the user's whole transaction. A holder that is paused in its
# transaction is cut off after one ttl.
POSTGRESQL = """
WITH before AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS lock_timeout,
         current_setting('idle_in_transaction_session_timeout') AS idle),
bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', %(wait)s::text, true),
         set_config('idle_in_transaction_session_timeout',
                    CASE WHEN idle::interval BETWEEN '1ms' AND %(idle)s::text::interval THEN idle
                         ELSE %(idle)s::text END, true)
  FROM before),
raised AS (
  INSERT INTO {table} AS g (key, token) SELECT %(key)s, %(token)s::bigint FROM bound
  WHERE %(token)s::bigint > {us} - {retention}
  ON CONFLICT (key) DO UPDATE SET token = excluded.token WHERE g.token <= excluded.token
  RETURNING token)
SELECT token, set_config('lock_timeout', lock_timeout, true) FROM before JOIN raised ON true
"""
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
POSTGRESQL_CHECK = """
WITH before AS MATERIALIZED (
  SELECT current_setting('lock_timeout') AS lock_timeout,
         current_setting('idle_in_transaction_session_timeout') AS idle),
bound AS MATERIALIZED (
  SELECT set_config('lock_timeout', %(wait)s::text, true),
         set_config('idle_in_transaction_session_timeout',
                    CASE WHEN idle::interval BETWEEN '1ms' AND %(idle)s::text::interval THEN idle
                         ELSE %(idle)s::text END, true)
  FROM before),
found AS MATERIALIZED (
  SELECT g.token FROM {table} AS g, bound WHERE g.key = %(key)s FOR SHARE OF g)
SELECT token, %(token)s::bigint > {us} - {retention}, set_config('lock_timeout', lock_timeout, true)
FROM before JOIN found ON true
"""
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
OPEN = "INSERT INTO {table} (key, token) VALUES (%(key)s, 0) ON CONFLICT DO NOTHING"
MARIADB_OPEN = """
SET STATEMENT innodb_lock_wait_timeout = {{wait}} FOR
INSERT IGNORE INTO {table} (`key`, token) VALUES (%(key)s, 0)
"""

# MariaDB can cut off a paused holder only by a setting of the session. It is set outside the
# transaction, and put back after it.
MARIADB_IDLE = "SET SESSION idle_transaction_timeout = %s"
MARIADB_IDLE_DEFAULT = "SELECT @@SESSION.idle_transaction_timeout"
_idle_defaults: WeakKeyDictionary[BaseDatabaseWrapper, int] = WeakKeyDictionary()


class GuardedTransaction:
    """What lease.atomic() returns: raise the fence, then the block, in one transaction."""

    def __init__(
        self,
        lease: Lease,
        tokens: Mapping[Claim, int],
        *,
        using: str,
        durable: bool,
    ) -> None:
        self._lease = lease
        # In the order in which everybody goes through them.
        self._tokens = tokens
        self._using = using
        self._durable = durable
        self._block: Any = None
        self._entered_at = 0.0
        self._idle_set = False

    def __enter__(self) -> None:
        self._lease.check()
        wrapper = connections[self._using]
        nested = self._refuse_unsound(wrapper)
        while True:
            entered = False
            try:
                self._limit_idleness(wrapper, nested)
                self._block = transaction.atomic(using=self._using, durable=not nested)
                # SQLite waits for other writers here if its transactions are IMMEDIATE.
                self._block.__enter__()
                entered = True
                for claim, token in self._tokens.items():
                    pass_fence = raise_fence if claim.mode == EXCLUSIVE else check_fence
                    pass_fence(
                        wrapper,
                        claim.key,
                        token,
                        wait=self._lease.remaining,
                        idle=self._lease.ttl,
                    )
                # The wait may have outlasted the lease.
                self._lease.check()
            except BaseException as error:
                if entered:
                    self._block.__exit__(*sys.exc_info())
                self._stop_limiting_idleness(wrapper)
                if not nested and error_code(error) in BEGIN_AGAIN and not self._lease.lost:
                    continue
                translated = self._translated(error)
                if translated is error:
                    raise
                raise translated from error
            self._entered_at = lease_now()
            return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        wrapper = connections[self._using]
        try:
            self._block.__exit__(kind, error, traceback)
        except (DatabaseError, InterfaceError) as failure:
            self._raise_if_cut_off(wrapper, failure, committing=error is None)
            raise
        finally:
            self._stop_limiting_idleness(wrapper)
        if error is None:
            self._lease.committed()
        elif isinstance(error, DatabaseError | InterfaceError):
            self._raise_if_cut_off(wrapper, error, committing=False)

    def _refuse_unsound(self, wrapper: BaseDatabaseWrapper) -> bool:
        """Whether the transaction is to be nested in the caller's; NotSupported if it must not."""
        if any(claim.mode == PERMIT for claim in self._tokens):
            raise NotSupported(
                "lease.atomic() is not for permits: several hold them at once, so none is stale "
                "because of another. Take an exclusive lock on what the transaction changes.",
                keys=self._lease.keys,
            )
        if not wrapper.in_atomic_block and not wrapper.get_autocommit():
            raise NotSupported(
                f"Autocommit is off on {self._using!r}, so lease.atomic() could not commit. Turn "
                f"it on.",
                keys=self._lease.keys,
            )
        if len(wrapper.atomic_blocks) == testcase_depth(wrapper):
            return False
        if self._durable:
            raise NotSupported(
                f"lease.atomic() must open the transaction itself, and one is open on "
                f"{self._using!r}: what has been read in it may be older than the lease. Call it "
                f"outside atomic(); under ATOMIC_REQUESTS, decorate the view with "
                f"@transaction.non_atomic_requests.",
                keys=self._lease.keys,
            )
        if wrapper.vendor != "postgresql" or not _reads_committed(wrapper):
            raise NotSupported(
                "lease.atomic(durable=False) is sound only on PostgreSQL at READ COMMITTED: "
                "elsewhere, reads after the guard may be served from a snapshot before it.",
                keys=self._lease.keys,
            )
        return True

    def _limit_idleness(self, wrapper: BaseDatabaseWrapper, nested: bool) -> None:
        if wrapper.vendor != "mysql" or nested or wrapper.in_atomic_block:
            return
        if getattr(wrapper, "mysql_is_mariadb", False):
            with wrapper.cursor() as cursor:
                if wrapper not in _idle_defaults:
                    cursor.execute(MARIADB_IDLE_DEFAULT)
                    _idle_defaults[wrapper] = cursor.fetchone()[0]
                limit = math.ceil(self._lease.ttl)
                # The user's own may be stricter; 0 is none.
                if 0 < _idle_defaults[wrapper] <= limit:
                    return
                cursor.execute(MARIADB_IDLE, [limit])
            self._idle_set = True

    def _stop_limiting_idleness(self, wrapper: BaseDatabaseWrapper) -> None:
        if self._idle_set and wrapper.connection is not None and wrapper.is_usable():
            # A session that dies now takes the setting along, and not the commit before it.
            with suppress(DatabaseError, InterfaceError), wrapper.cursor() as cursor:
                cursor.execute(MARIADB_IDLE, [_idle_defaults[wrapper]])
        self._idle_set = False

    def _translated(self, error: BaseException) -> BaseException:
        """An error of the guard statement, as ours where it is our business."""
        if not isinstance(error, DatabaseError | InterfaceError):
            return error
        keys = ", ".join(map(repr, self._lease.keys))
        if error_code(error) in WAITED_TOO_LONG or "database is locked" in str(error):
            return LockTimeout(
                f"The guarded transaction of {keys} on {self._using!r} could not begin: another "
                f"one is open there, of an earlier holder that has not ended it, or of any writer "
                f"if it is SQLite.",
                keys=self._lease.keys,
            )
        # SQLite says of a missing table that it is an operational matter.
        if isinstance(error, ProgrammingError) or "no such table" in str(error):
            return unavailable(self._using, error)
        return error

    def _raise_if_cut_off(
        self, wrapper: BaseDatabaseWrapper, error: Exception, *, committing: bool
    ) -> None:
        """LeaseLost if the database ended the transaction because it was idle for too long."""
        said_so = error_code(error) == CUT_OFF or "idle-in-transaction" in str(error)
        idle = lease_now() - self._entered_at >= self._lease.ttl * 0.9
        broken = is_broken(wrapper, error)
        if not (said_so or (idle and broken)):
            return
        wrapper.close()
        if said_so or not committing:
            outcome = "did not commit"
            reason = (
                f"the database {self._using!r} ended its guarded transaction, which had been idle "
                f"for longer than its ttl, and rolled it back"
            )
        else:
            # The answer to a COMMIT that got through may have been lost as well.
            outcome = "has probably not been committed, look at the data before doing it again"
            reason = (
                f"the session on {self._using!r} was gone when it was to commit, longer than its "
                f"ttl after it began"
            )
        if self._lease.lost:
            self._lease.lose(reason)
        raise LeaseLost(
            f"The guarded transaction of {', '.join(map(repr, self._lease.keys))} {outcome}: "
            f"{reason}.",
            keys=self._lease.keys,
        ) from error


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
    if row is None and (open_row := _spelled(wrapper, OPEN, OPEN, MARIADB_OPEN, None)):
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


def _reads_committed(wrapper: Any) -> bool:
    return getattr(wrapper.isolation_level, "name", "") == "READ_COMMITTED"


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
    if not is_supported(wrapper):
        count, _ = old.filter(key__in=keys).delete()
        return count
    # The ORM's statement may read a small table from end to end, and wait for every row of it that
    # an open guarded transaction has in its hands.
    sql = DELETE.format(t=wrapper.ops.quote_name(TABLE)) + f"WHERE l.token < {US} - {RETENTION_US}"
    with wrapper.cursor() as cursor:
        cursor.execute(sql, {"keys": as_json(keys)})
        return int(cursor.rowcount)
