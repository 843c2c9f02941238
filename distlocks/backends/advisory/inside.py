"""Locks in the caller's transaction, on the caller's connection: they end with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ...claims import SHARED, Claim, Grant, Request
from ..database.channels import error_code
from ..database.connected import in_testcase
from .rows import Missed
from .sql import lock_id

# What is rolled back when a try fails: a lock taken after a savepoint ends with the way back to it.
SAVEPOINT = "distlocks_try"
TRY = {
    SHARED: "SELECT pg_try_advisory_xact_lock_shared(%s), pg_backend_pid()",
    "": "SELECT pg_try_advisory_xact_lock(%s), pg_backend_pid()",
}
# The bound on the wait counts from here, since the lock is called for by what reads from it; what
# it was before comes back, for it would govern the caller's whole transaction.
WAIT = """
WITH old AS MATERIALIZED (SELECT current_setting('lock_timeout') AS value),
bound AS MATERIALIZED (SELECT set_config('lock_timeout', %s, true) FROM old)
SELECT value, {lock}(%s) FROM old, bound
"""
WAITS = {
    SHARED: WAIT.format(lock="pg_advisory_xact_lock_shared"),
    "": WAIT.format(lock="pg_advisory_xact_lock"),
}
RESTORE = "SELECT set_config('lock_timeout', %s, true)"
# Isolation levels at which each statement has a snapshot of its own.
READS_ANEW = ("", "READ_COMMITTED", "READ_UNCOMMITTED")
# A wait that was not successful: too long for its bound or the caller's, or in a circle.
NOT_HAD = ("55P03", "57014", "40P01")


@dataclass(eq=False)
class Taken:
    """A grant in a transaction that is under way."""

    wrapper: BaseDatabaseWrapper
    grant: Grant
    # By its holder; the lock itself stays until the transaction ends.
    released: bool = False
    # Committed, rolled back, or back at an earlier savepoint.
    over: bool = False


@dataclass(eq=False)
class _Waiting:
    """Who was denied a claim and is going to wait for it."""

    wrapper: BaseDatabaseWrapper
    claim: Claim
    # The lock is had, behind a savepoint that is open yet.
    had: bool = False


@dataclass(eq=False)
class Inside:
    """What this process has taken inside its callers' transactions on one database."""

    using: str
    _taken: dict[str, Taken] = field(default_factory=dict)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    # Owner ids whose tries have not come to their end.
    _asking: set[str] = field(default_factory=set)

    def wrapper(self) -> BaseDatabaseWrapper | None:
        """The caller's connection, if it is in a transaction that a lock can live in: one that
        ends with its atomic() block, is in order, and is the only one of this thread. The end of
        a lock must not come before the commit of what it guards elsewhere; and the statement that
        asks for it must not fix, before the lock is had, what the transaction is going to read.
        """
        wrapper: Any = connections[self.using]
        if (
            not wrapper.in_atomic_block
            or wrapper.needs_rollback
            or not wrapper.commit_on_exit
            or in_testcase(wrapper)
            or getattr(wrapper.isolation_level, "name", "") not in READS_ANEW
            or wrapper.connection is None
            or getattr(wrapper.connection.info.transaction_status, "name", "") == "INERROR"
        ):
            return None
        for other in connections.all(initialized_only=True):
            if other is not wrapper and other.in_atomic_block and not in_testcase(other):
                return None
        found: BaseDatabaseWrapper = wrapper
        return found

    def grant_of(self, owner_id: str) -> Grant | None:
        """What the owner id has been granted, if it has it yet."""
        taken = self._taken.get(owner_id)
        return None if taken is None or taken.released or self.why_over(owner_id) else taken.grant

    def own(self, wrapper: BaseDatabaseWrapper, request: Request) -> Claim | None:
        """What of the request this very transaction has already, in a way that is in the way. The
        server would grant it again."""
        for taken in list(self._taken.values()):
            if taken.wrapper is not wrapper or taken.over or taken.released:
                continue
            mine = {claim.key: claim.mode for claim in taken.grant.claims}
            for claim in request.claims:
                if claim.key in mine and {claim.mode, mine[claim.key]} != {SHARED}:
                    return claim
        return None

    def take(
        self,
        wrapper: BaseDatabaseWrapper,
        request: Request,
        note: Callable[[Claim, int], tuple[int, int] | None],
    ) -> Missed | list[tuple[int, int]]:
        """Take all claims, or none and tell which could not be had.

        `note` writes down a claim that was taken by the session with this process id; what it
        returns, the token and the moment, is what is returned for all. None: the key cools down.
        """
        self._asking.add(request.owner_id)
        waiting = self._waiting.pop(request.owner_id, None)
        noted: list[tuple[int, int]] = []
        with wrapper.cursor() as cursor:
            if waiting is None or not waiting.had:
                cursor.execute(f"SAVEPOINT {SAVEPOINT}")
            try:
                for claim in request.claims:
                    sql = TRY.get(claim.mode) or TRY[""]
                    cursor.execute(sql, [lock_id(claim.key)])
                    had, session = cursor.fetchone()
                    one = note(claim, session) if had else None
                    if one is None:
                        self._back(cursor)
                        return Missed(claim, cools=had)
                    noted.append(one)
                cursor.execute(f"RELEASE SAVEPOINT {SAVEPOINT}")
            except BaseException:
                with suppress(Exception):
                    self._back(cursor)
                raise
        return noted

    def keep(self, wrapper: BaseDatabaseWrapper, grant: Grant) -> None:
        """Note a grant until its lock ends."""
        taken = Taken(wrapper, grant)
        self._taken[grant.owner_id] = taken
        self._asking.discard(grant.owner_id)
        end = _End(lambda: self._is_over(grant.owner_id, taken))
        # First in line, and dropped with the savepoints in which the lock is: called after the
        # COMMIT, finalised at a rollback to a savepoint before it, or of everything.
        savepoints = _Before(wrapper.savepoint_ids)
        savepoints.state = wrapper.savepoint_state
        wrapper.run_on_commit.insert(0, (savepoints, end, True))  # type: ignore[arg-type]

    def _is_over(self, owner_id: str, taken: Taken) -> None:
        # From a commit hook or a finaliser.
        taken.over = True
        self._taken.pop(owner_id, None)

    def is_denied(
        self, wrapper: BaseDatabaseWrapper, request: Request, claim: Claim | None
    ) -> None:
        """Note what a request was denied that its asker can wait for, if it is going to."""
        self._asking.discard(request.owner_id)
        if request.waits and claim is not None:
            self._waiting[request.owner_id] = _Waiting(wrapper, claim)

    def waits_for(self, owner_id: str) -> Claim | None:
        """What the owner id is going to wait for in its transaction."""
        waiting = self._waiting.get(owner_id)
        return None if waiting is None else waiting.claim

    def wait(self, owner_id: str, claim: Claim, seconds: float) -> None:
        """Stand in the server's queue for a lock, at most so long.

        The caller's transaction is as usable afterwards as before: what fails, fails behind a
        savepoint.
        """
        waiting = self._waiting[owner_id]
        wrapper = waiting.wrapper
        bound = f"{max(int(seconds * 1000), 1)}ms"
        sql = WAITS.get(claim.mode) or WAITS[""]
        with wrapper.cursor() as cursor:
            cursor.execute(f"SAVEPOINT {SAVEPOINT}")
            try:
                cursor.execute(sql, [bound, lock_id(claim.key)])
                before = cursor.fetchone()[0]
                cursor.execute(RESTORE, [before])
            except BaseException as error:
                with suppress(Exception):
                    self._back(cursor)
                if isinstance(error, DatabaseError) and error_code(error) in NOT_HAD:
                    return
                raise
        waiting.had = True

    @staticmethod
    def _back(cursor: Any) -> None:
        cursor.execute(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
        cursor.execute(f"RELEASE SAVEPOINT {SAVEPOINT}")

    def release(self, grant: Grant) -> bool:
        """Let the transaction ask for the keys again; whether it had them until now."""
        taken = self._taken.get(grant.owner_id)
        if taken is None or taken.over or is_gone(taken.wrapper):
            return False
        taken.released = True
        return True

    def abandon(self, owner_id: str) -> bool:
        """Nobody will know of what the owner id has. It ends with the transaction. Whether it has
        asked inside of one."""
        waiting = self._waiting.pop(owner_id, None)
        taken = self._taken.get(owner_id)
        if taken is not None:
            taken.released = True
        inside = owner_id in self._asking or bool(waiting or taken)
        self._asking.discard(owner_id)
        return inside

    def why_over(self, owner_id: str) -> str:
        """Why the lock is had no more; '' while it is."""
        taken = self._taken.get(owner_id)
        if taken is None or taken.over:
            return "the transaction in which it was taken has ended, or gone back behind it"
        if is_gone(taken.wrapper):
            return "the connection with the transaction in which it was taken is gone"
        return ""


class _Before(frozenset[str]):
    """The savepoints in which a lock is, also those that were made by hand: Django numbers them,
    and asks for each that is gone back to whether it is among these."""

    state: int

    def __contains__(self, sid: object) -> bool:
        number = str(sid).rpartition("_x")[2]
        return super().__contains__(sid) or (number.isdecimal() and int(number) <= self.state)


class _End:
    """A lock's end: called, or finalised, whichever comes first; in one process only."""

    __slots__ = ("_act", "_pid")

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act
        self._pid = os.getpid()

    def __call__(self) -> None:
        act, self._act = self._act, None
        if act is not None and self._pid == os.getpid():
            act()

    __del__ = __call__


def is_gone(wrapper: BaseDatabaseWrapper) -> bool:
    """Whether the transaction cannot commit any more, because its connection is no more."""
    if wrapper.closed_in_transaction or wrapper.connection is None:
        return True
    return bool(getattr(wrapper.connection, "closed", False))
