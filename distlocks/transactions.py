"""When the caller's transaction ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from . import logs

_warned: set[str] = set()


def _used() -> list[BaseDatabaseWrapper]:
    """This thread's connections: connections.all(initialized_only=True), with half its look-ups,
    which are the dearest part of an acquire that goes to a fast store."""
    local: Any = connections._connections  # type: ignore[attr-defined]
    found = [getattr(local, alias, None) for alias in connections.settings]
    return [wrapper for wrapper in found if wrapper is not None]


def at_end(act: Callable[[], None]) -> bool:
    """Call `act` once, when the last open transaction of this thread has ended; False if none is.

    Ended means committed (after the COMMIT), rolled back, or closed. The transaction that a
    TestCase wraps around a test does not count, the blocks inside it do. `act` must not raise and
    must not use the database: after a rollback it runs from a finaliser.
    """
    waiting = []
    for wrapper in _used():
        # A connection that was closed inside has had its transaction rolled back already.
        if wrapper.in_atomic_block and not wrapper.closed_in_transaction:
            depth = testcase_depth(wrapper)
            if len(wrapper.atomic_blocks) > depth and _commits_on_exit(wrapper):
                waiting.append((wrapper, depth))
        elif wrapper.connection is not None and not wrapper.autocommit:
            _warn_of_autocommit(wrapper.alias)
    if not waiting:
        return False
    countdown = _Countdown(len(waiting), act)
    for wrapper, depth in waiting:
        end = _End(countdown)
        if depth:
            _watch_savepoints(wrapper, depth, end)
        else:
            # First in line and with no savepoint to be discarded with: called after the COMMIT,
            # whatever other hooks do; dropped, hence finalised, at a rollback.
            wrapper.run_on_commit.insert(0, (frozenset(), end, True))  # type: ignore[arg-type]
    return True


def warn_of_old_snapshots() -> None:
    """Log a warning if this thread's transactions may have read what is stale by now."""
    for wrapper in _used():
        if wrapper.in_atomic_block and wrapper.vendor == "postgresql" and _has_snapshot(wrapper):
            logs.event(
                logging.WARNING,
                "old_snapshot",
                "",
                (),
                "A lock was acquired inside a transaction on %r whose snapshot is older than the "
                "lock (isolation level REPEATABLE READ or above): what it reads may be stale. "
                "Take the lock before the transaction begins.",
                wrapper.alias,
                database=wrapper.alias,
            )


def _has_snapshot(wrapper: Any) -> bool:
    # psycopg: IsolationLevel.REPEATABLE_READ = 3, SERIALIZABLE = 4; psycopg2: 2 and 3, with
    # READ_COMMITTED = 1 there and 2 here. The name is the same everywhere.
    level = getattr(wrapper.isolation_level, "name", str(wrapper.isolation_level))
    if level not in ("REPEATABLE_READ", "SERIALIZABLE") or wrapper.connection is None:
        return False
    status = wrapper.connection.info.transaction_status
    return getattr(status, "name", "") == "INTRANS"


class _Countdown:
    """Acts when the last of several transactions has ended."""

    __slots__ = ("_act", "_left")

    def __init__(self, count: int, act: Callable[[], None]) -> None:
        self._left = [None] * count
        self._act = act

    def one(self) -> None:
        self._left.pop()
        if not self._left:
            self._act()


class _End:
    """One transaction's end: called, or finalised, whichever comes first; in one process only."""

    __slots__ = ("_countdown", "_pid")

    def __init__(self, countdown: _Countdown) -> None:
        self._countdown: _Countdown | None = countdown
        self._pid = os.getpid()

    def __call__(self) -> None:
        countdown, self._countdown = self._countdown, None
        if countdown is not None and self._pid == os.getpid():
            countdown.one()

    __del__ = __call__


class _SavepointIds(list[Any]):
    """A connection's savepoint stack under a test case, which tells when blocks are left.

    There, neither a commit hook runs nor is the hook list dropped, and
    captureOnCommitCallbacks() would take an entry of ours for the user's.
    """

    ends: list[tuple[int, _End]]

    def pop(self, *args: Any) -> Any:
        value = super().pop(*args)
        left, self.ends = (
            [e for e in self.ends if len(self) < e[0]],
            [e for e in self.ends if len(self) >= e[0]],
        )
        for _, end in left:
            end()
        return value


def _watch_savepoints(wrapper: BaseDatabaseWrapper, depth: int, end: _End) -> None:
    stack = wrapper.savepoint_ids
    if not isinstance(stack, _SavepointIds):
        wrapper.savepoint_ids = stack = _SavepointIds(stack)
        stack.ends = []
    # The stack has one entry less than there are blocks: the outermost is no savepoint.
    stack.ends.append((depth, end))


def testcase_depth(wrapper: BaseDatabaseWrapper) -> int:
    """How many of the connection's atomic blocks a TestCase has wrapped around the test."""
    return sum(map(is_testcases, wrapper.atomic_blocks))


def is_testcases(block: object) -> bool:
    """Whether a TestCase has put this atomic block around its test."""
    return getattr(block, "_from_testcase", False)


def _commits_on_exit(wrapper: BaseDatabaseWrapper) -> bool:
    """False with autocommit off: then nobody can tell when the user will commit."""
    if wrapper.commit_on_exit:
        return True
    _warn_of_autocommit(wrapper.alias)
    return False


def _warn_of_autocommit(alias: str) -> None:
    # Once per alias and process.
    if alias not in _warned:
        _warned.add(alias)
        logs.event(
            logging.WARNING,
            "autocommit_off",
            "",
            (),
            "Autocommit is off on the database %r: locks are released at the end of their block, "
            "which may be before the commit. Use transaction.atomic() with autocommit on.",
            alias,
            database=alias,
        )
