"""What the table and the server's list of locks say: who has what, and what is to be cleared."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from django.db import DatabaseError, InterfaceError, connections

from ... import clock
from ...claims import EXCLUSIVE, MICROSECOND, SHARED, Claim, Grant, Holder, Request, Swept, from_us
from ...exceptions import BackendUnavailable
from ...waiting import busy_delays
from ..database import channels
from ..database.postgresql import BEGIN, _adapt
from .session import Param, array
from .sql import OF, Texts, lock_id

T = TypeVar("T")

# Seconds within which the server ends sessions.
ENDED_WITHIN = 5.0


class Missed(NamedTuple):
    """A claim that could not be had: somebody has it, or it cools down, free and kept from all.

    Known from the try itself: what is listed a moment later may be neither any more.
    """

    claim: Claim
    cools: bool


def claim_params(claim: Claim, request: Request) -> dict[str, Param]:
    """The parameters of a statement that takes a claim, but for the session."""
    return {
        "name": claim.key,
        "id": lock_id(claim.key),
        "owner": request.owner_id,
        "ttl": request.ttl_us,
        "min_hold": request.min_hold_us,
        "host": request.host,
        "pid": request.pid,
        "thread": request.thread,
        "label": request.label,
        "metadata": json.dumps(request.metadata) if request.metadata else "{}",
    }


def row_names(claims: Sequence[Claim], owner_id: str) -> list[str]:
    """The names of the rows that say that the owner has the claims."""
    return [f"{claim.key}{OF}{owner_id}" if claim.mode == SHARED else claim.key for claim in claims]


class Rows:
    """Statements that need no session of their own: they go through one connection in autocommit,
    as those of the database backend do, whatever proxy there is."""

    def __init__(self, using: str, *, waits_out: bool) -> None:
        self.using = using
        self._waits_out = waits_out

    @cached_property
    def texts(self) -> Texts:
        table = connections[self.using].ops.quote_name("distlocks_advisorylock")
        return Texts(table, waits_out=self._waits_out)

    @cached_property
    def channel(self) -> channels.OwnConnection:
        return channels.OwnConnection(self.using, begin=BEGIN, adapt=_adapt)

    def close(self) -> None:
        if "channel" in self.__dict__:
            self.channel.close()

    def run(self, work: Callable[[channels.Session], T]) -> T:
        try:
            return self.channel.run(work)
        except (DatabaseError, InterfaceError) as error:
            raise channels.unavailable(self.using, error) from error

    def ask(self, sql: str, params: dict[str, Any]) -> list[channels.Row]:
        return self.run(lambda session: session.execute(sql, params))

    def note(self, claim: Claim, request: Request, session: int) -> tuple[int, int] | None:
        """Write down a claim that a caller's session has: its token, and when it was taken. None
        if the key cools down."""
        sql = self.texts.note_shared if claim.mode == SHARED else self.texts.note_exclusive
        # No lease is left behind by a transaction: it cannot commit what it did after its lock.
        params = {**claim_params(claim, request), "session": session, "ttl": 0}
        ((_, token, acquired_us),) = self.ask(sql, params)
        return None if token is None else (token, acquired_us)

    def holders(self, prefix: str, limit: int | None) -> list[Holder]:
        rows = self.ask(self.texts.holders, {"from": prefix, "limit": limit})
        return [_holder(row) for row in rows]

    def on_key(self, name: str, limit: int) -> list[Holder]:
        rows = self.ask(self.texts.on_key, {"from": name, "limit": limit})
        return [_holder(row) for row in rows]

    def locked_by(self, name: str) -> list[channels.Row]:
        """Which sessions have the key's lock, whoever took it: process id, application, state."""
        return self.ask(self.texts.locked_by, {"id": lock_id(name)})

    def is_taken(self, name: str) -> bool:
        """Whether somebody has the key's lock, or it cools down."""
        return bool(self.ask(self.texts.is_taken, {"name": name, "id": lock_id(name)}))

    def force_release(self, name: str) -> list[Holder]:
        """Free the key: the rows first, so that nobody takes an old grant for good, and then by
        the end of the sessions that have the lock."""

        def free(session: channels.Session) -> list[Holder]:
            execute, texts = session.execute, self.texts
            found = execute(texts.on_key, {"from": name, "limit": None})
            held = [_holder(one) for one in found]
            for (row, *_), holder in zip(found, held, strict=True):
                owner, token = holder.owner_id, holder.fencing_token
                # Of a key that cools down, the owner is not told.
                cools = holder.cooling_down
                execute(texts.clear, {"name": row, "owner": owner, "token": token, "any": cools})
            if any(holder.mode == SHARED for holder in held):
                # The token of all sharers is in the key's own row.
                execute(texts.clear, {"name": name, "owner": "", "token": 0, "any": True})
            pids = [holder.activity["pid"] for holder in held if "pid" in holder.activity]
            if pids:
                owners = array([holder.owner_id for holder in held])
                execute(texts.clear_sessions, {"sessions": array(pids), "owners": owners})
                self._end_sessions(session, lock_id(name), pids)
            return held

        return self.run(free)

    def _end_sessions(self, session: channels.Session, number: int, pids: Sequence[int]) -> None:
        """End those of the sessions that have the lock with this number, and wait for that."""
        params = {"id": number, "sessions": array(pids)}
        if not pids or not session.execute(self.texts.end_sessions, params):
            return
        give_up = clock.Clock().now() + ENDED_WITHIN
        for delay in busy_delays():
            if not session.execute(self.texts.have_lock, params):
                return
            if clock.Clock().now() > give_up:
                raise BackendUnavailable(
                    f"The server has not ended the sessions {pids} within {ENDED_WITHIN:g} s."
                )
            time.sleep(delay)

    def abandon(self, request: Request, *, ending_sessions: bool = True) -> None:
        """End the minimum hold of the owner id, and the sessions that have something for it."""
        params = {"names": array(row_names(request.claims, request.owner_id))}
        keys = {"names": array([claim.key for claim in request.claims])}
        shared = any(claim.mode == SHARED for claim in request.claims)
        owner = {"owner": request.owner_id}

        def free(session: channels.Session) -> None:
            execute, texts = session.execute, self.texts
            found = execute(texts.sessions_of, {**params, **owner}) if ending_sessions else []
            for number, pid in found:
                self._end_sessions(session, number, [pid])
            execute(texts.forget, {**params, **owner})
            if request.min_hold_us and shared:
                execute(texts.forget_shared, keys)

        self.run(free)

    def is_last(self, grant: Grant) -> bool:
        """Whether nobody has been granted any of the keys since this grant, nor freed them."""
        params = {
            "names": array(row_names(grant.claims, grant.owner_id)),
            "tokens": array(grant.fencing_tokens),
            "owner": grant.owner_id,
        }
        ((count,),) = self.ask(self.texts.is_last, params)
        return bool(count == len(grant.claims))

    def sweep(self, older_than_us: int, batch_size: int, *, dry_run: bool) -> Iterator[Swept]:
        sql = self.texts.sweep_dry if dry_run else self.texts.sweep
        after = ""
        while True:
            params = {"after": after, "size": batch_size, "older": older_than_us}
            ((examined, last, deleted),) = self.ask(sql, params)
            if not examined:
                return
            yield Swept(examined=examined, expired=(), deleted=deleted)
            after = last


def _holder(row: channels.Row) -> Holder:
    name, owner, token, acquired_us, remaining_us, host, pid, thread, label, metadata, activity = (
        row
    )
    key, of, _ = name.partition(OF)
    activity = {name: value for name, value in _loaded(activity).items() if value}
    return Holder(
        key=key,
        owner_id=owner,
        fencing_token=token,
        since=from_us(acquired_us),
        remaining=remaining_us / MICROSECOND,
        mode=SHARED if of else EXCLUSIVE,
        host=host,
        pid=pid,
        thread=thread,
        label=label,
        metadata=_loaded(metadata),
        activity=activity,
    )


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value
