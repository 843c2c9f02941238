"""Which session has whose lease, and which are free: at most so many in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ... import clock
from ...claims import Claim, Grant
from .proxies import refuse_pooled
from .session import Session
from .sql import Raw
from .watch import Watch

# Seconds after which a free session is closed, when another one is given back.
IDLE_AFTER = 60.0


@dataclass(eq=False)
class Hold:
    """What a session is used for: a lease, or a place in the server's queue."""

    session: Session
    owner_id: str
    # What it has been granted; None while it waits.
    grant: Grant | None = None
    # What it waits for in the server's queue, until that has been seen to be over.
    waits_for: Claim | None = None
    # Has the lock of this claim by a wait, and is about to say so.
    had: Claim | None = None
    # Has its session any lock, for all we know?
    locked: bool = False
    # One verb at a time.
    mutex: threading.RLock = field(default_factory=threading.RLock)

    def has(self, grant: Grant) -> bool:
        """Whether it is this very grant's: an owner id may have had others."""
        return self.grant is not None and self.grant.fencing_tokens == grant.fencing_tokens


class Pool:
    """The sessions of this process on one database.

    A session is free, or has one hold. One whose state is in doubt is closed, never used again.
    """

    def __init__(
        self,
        using: str,
        connect: Callable[[], BaseDatabaseWrapper],
        size: int,
        *,
        prepared: Sequence[Raw],
        lost: Callable[[Hold], bool],
        turn: Callable[[Hold], None],
    ) -> None:
        self._using = using
        self._connect = connect
        self._prepared = prepared
        self._size = size
        self._lost = lost
        self._turn = turn
        self._mutex = threading.Lock()
        self._free: list[Session] = []
        self._holds: dict[str, Hold] = {}
        # Sessions in nobody's hands yet, or on their way back.
        self._between = 0
        self._closing = False
        self._watch = Watch(self._has_ended, self._has_answered)

    def hold_of(self, owner_id: str) -> Hold | None:
        return self._holds.get(owner_id)

    def holds(self) -> list[Hold]:
        with self._mutex:
            return list(self._holds.values())

    @property
    def waiting(self) -> int:
        """How many stand in the server's queue."""
        return sum(hold.grant is None for hold in self.holds())

    def take(self) -> Session | None:
        """A session that has no locks; None if as many as are allowed are in use."""
        name = connections.databases[self._using]["NAME"]
        while True:
            with self._mutex:
                session = self._free.pop() if self._free else None
                if session is None and len(self._holds) + self._between >= self._size:
                    return None
                self._between += 1
            if session is None:
                try:
                    return self._open()
                except BaseException:
                    self._between_less()
                    raise
            if session.database == name and not session.closed:
                return session
            self.discard(session)

    def _open(self) -> Session:
        session = Session(self._connect)
        try:
            refuse_pooled(session, lambda: Session(self._connect), self._using)
            session.set_up(self._prepared)
        except BaseException:
            session.close()
            raise
        self._watch.add(session)
        return session

    def assign(self, session: Session, owner_id: str) -> Hold:
        """A hold on a session that was taken."""
        hold = Hold(session, owner_id)
        with self._mutex:
            self._between -= 1
            self._holds[owner_id] = hold
        return hold

    def end(self, hold: Hold, *, clean: bool) -> None:
        """The hold is over; `clean` if its session is known to have no locks."""
        with self._mutex:
            if self._holds.get(hold.owner_id) is not hold:
                return
            del self._holds[hold.owner_id]
            self._between += 1
        if clean and not hold.session.closed:
            self.give(hold.session)
        else:
            self.discard(hold.session)

    def give(self, session: Session) -> None:
        """Take back a session that has no locks."""
        session.idle_since = now = clock.lease_now()
        old: list[Session] = []
        with self._mutex:
            self._between -= 1
            if self._closing:
                old.append(session)
            else:
                self._free.append(session)
                while now - self._free[0].idle_since > IDLE_AFTER:
                    old.append(self._free.pop(0))
        for one in old:
            self._close(one)

    def discard(self, session: Session) -> None:
        """Close a session that was taken."""
        self._between_less()
        self._close(session)

    def _between_less(self) -> None:
        with self._mutex:
            self._between -= 1

    def _close(self, session: Session) -> None:
        self._watch.remove(session)
        session.close()

    def expect(self, hold: Hold) -> None:
        """Tell when the hold has had its turn in the server's queue."""
        self._watch.expect(hold.session)

    def close(self) -> None:
        """Close the free sessions, and the others when their leases have been released."""
        self._closing = True
        self.close_free()

    @property
    def in_use(self) -> bool:
        """Whether any session is used for anything."""
        return bool(self._holds or self._between)

    @property
    def has_room(self) -> bool:
        """Whether take() would find a session."""
        return bool(self._free) or len(self._holds) + self._between < self._size

    def close_free(self) -> None:
        """Close the sessions that nobody uses."""
        with self._mutex:
            free, self._free = self._free, []
        for session in free:
            self._close(session)

    # In the thread that watches

    def _has_ended(self, session: Session) -> bool:
        with self._mutex:
            is_free = session in self._free
            if is_free:
                self._free.remove(session)
            found = (one for one in self._holds.values() if one.session is session)
            hold = next(found, None)
        if is_free:
            session.close()
        if hold is None:
            # Of one that is between hands, its user finds out.
            return True
        if hold.grant is None:
            # Its waiter has to begin again.
            self._turn(hold)
            return True
        return self._lost(hold)

    def _has_answered(self, session: Session) -> None:
        for hold in self.holds():
            if hold.session is session:
                self._turn(hold)
