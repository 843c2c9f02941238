"""One try of a request by a session: the grant, or the denial and a place in the queue."""

from __future__ import annotations

from dataclasses import replace

from django.db import DatabaseError, InterfaceError

from ...claims import Denial, Extension, Grant, Request
from ..database.channels import unavailable
from .denials import Denials
from .pool import Hold, Pool
from .rows import Missed, Rows
from .session import ANSWER_WITHIN, Broken, NoAnswer, Refused
from .wire import Wire

# How often a try whose session breaks is made again, beside those whose sessions were old.
RESENDS = 1
# How many of those there may be, one after the other, before the server is taken for broken.
MOST_OLD = 50


class Tries:
    """Takes the sessions from the pool, and gives back those that are not needed."""

    def __init__(
        self, pool: Pool, wire: Wire, rows: Rows, denials: Denials, max_waiting: int
    ) -> None:
        self._pool = pool
        self._wire = wire
        self._rows = rows
        self._denials = denials
        self._max_waiting = max_waiting

    def acquire(self, request: Request) -> Grant | Denial:
        """Take all claims in a session, or none."""
        resends, old = RESENDS, 0
        while True:
            hold = self._hold_for(request)
            if hold is None:
                return self._denials.without_session(request)
            with hold.mutex:
                if self._pool.hold_of(request.owner_id) is not hold:
                    # It has ended meanwhile.
                    continue
                try:
                    answer = self._acquire_by(hold, request)
                except Broken as broken:
                    # A session that was kept from before may have ended meanwhile; so may all.
                    self._pool.end(hold, clean=False)
                    if broken.in_doubt:
                        self._pool.close_free()
                        resends -= 1
                    else:
                        old += 1
                    if resends < 0 or old > MOST_OLD:
                        raise unavailable(self._rows.using, broken) from broken
                    continue
                except (NoAnswer, Refused) as error:
                    self._pool.end(hold, clean=False)
                    raise unavailable(self._rows.using, error) from error
                except BaseException:
                    # Interrupted in the middle: what the session has, nobody knows.
                    self._pool.end(hold, clean=False)
                    raise
            if resends > 0 and isinstance(answer, Denial) and _is_in_own_way(answer, request):
                # The session of an earlier try, of whose answer nobody has heard.
                resends -= 1
                self._rows.abandon(replace(request, min_hold_us=0))
                continue
            return answer

    def _hold_for(self, request: Request) -> Hold | None:
        hold = self._pool.hold_of(request.owner_id)
        if hold is not None:
            return hold
        try:
            session = self._pool.take()
        except (DatabaseError, InterfaceError, Broken, NoAnswer, Refused) as error:
            failure = unavailable(self._rows.using, error)
            # There was nobody to ask.
            failure.in_doubt = False
            raise failure from error
        return None if session is None else self._pool.assign(session, request.owner_id)

    def _acquire_by(self, hold: Hold, request: Request) -> Grant | Denial:
        if hold.grant is not None:
            # Sent again: it lasts from now on, if it does yet.
            again = Extension(grant=hold.grant, ttl_us=request.ttl_us)
            self._wire.begin_extension(hold, again)
            if self._wire.end_extension(hold, again, ANSWER_WITHIN):
                return hold.grant
            raise Broken("it was freed by force", in_doubt=False)
        if (waits_for := hold.waits_for) is not None:
            if request.waits and not self._wire.look(hold):
                return self._denials.of(waits_for, request, queued=True)
            if hold.waits_for is not None:
                try:
                    self._wire.leave(hold)
                except NoAnswer:
                    # Closed, its session leaves the queue as soon as the server looks.
                    self._pool.end(hold, clean=False)
                    return self._denials.of(waits_for, request)
        taken: list[tuple[int, int]] = []
        for claim in request.claims:
            one = self._wire.take(hold, claim, request)
            if isinstance(one, Missed):
                return self._denied(hold, one, request)
            taken.append(one)
        hold.had = None
        hold.grant = grant_of(request, taken)
        return hold.grant

    def _denied(self, hold: Hold, missed: Missed, request: Request) -> Denial:
        """Give back what was got, and take a place in the server's queue if the asker is going to
        wait."""
        claim = missed.claim
        if hold.locked:
            got = request.claims[: request.claims.index(claim)]
            self._wire.free(hold, got)
            if got and request.min_hold_us:
                # Work that never began keeps nothing.
                self._rows.abandon(replace(request, claims=got), ending_sessions=False)
        denial = self._denials.of(claim, request)
        if (
            not request.waits
            # What comes out of the queue could not be had.
            or missed.cools
            or self._pool.waiting > self._max_waiting
        ):
            self._pool.end(hold, clean=True)
            return denial
        self._wire.queue(hold, claim)
        return replace(denial, queued=request.owner_id)


def grant_of(request: Request, taken: list[tuple[int, int]], *, inside: bool = False) -> Grant:
    """The grant of a request whose claims have these tokens, and were taken at these moments."""
    return Grant(
        claims=request.claims,
        owner_id=request.owner_id,
        fencing_tokens=tuple([token for token, _ in taken]),
        acquired_us=taken[0][1],
        min_hold_us=request.min_hold_us,
        in_transaction=inside,
        ends_with_transaction=inside,
    )


def _is_in_own_way(denial: Denial, request: Request) -> bool:
    return any(holder.owner_id == request.owner_id for holder in denial.holders)
