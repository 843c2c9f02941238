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
    InterfaceError,
    ProgrammingError,
    connections,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper

from .backends.database.channels import error_code, is_broken, unavailable
from .claims import EXCLUSIVE, PERMIT, Claim
from .clock import lease_now
from .exceptions import LeaseLost, LockTimeout, NotSupported
from .fences import check_fence, raise_fence
from .transactions import testcase_depth

if TYPE_CHECKING:
    from .lease import Lease

# Errors of the guard statement after which the transaction, begun anew, finds its way: it waited
# for an earlier holder's commit under a snapshot from before it (PostgreSQL; MariaDB), or a
# deadlock.
BEGIN_AGAIN = ("40001", "40P01", 1213, 1020)
# The wait for an earlier holder's transaction took longer than it may (PostgreSQL; MariaDB).
WAITED_TOO_LONG = ("55P03", 1205)
# PostgreSQL's idle_in_transaction_session_timeout has ended the session.
CUT_OFF = "25P03"

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
                        # One that ends with a transaction has no deadline.
                        wait=min(self._lease.remaining, self._lease.ttl),
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


def _reads_committed(wrapper: Any) -> bool:
    return getattr(wrapper.isolation_level, "name", "") == "READ_COMMITTED"
