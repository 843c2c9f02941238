"""What is said to the session of a hold: take, wait, extend, free."""

from __future__ import annotations

from collections.abc import Sequence

from ...claims import SHARED, Claim, Extension, Request
from ...exceptions import NotSupported
from .pool import Hold
from .proxies import explain
from .rows import Missed, Rows, claim_params, row_names
from .session import Param, Refused, array
from .sql import lock_id

# Milliseconds for which the server keeps a lock for who waited for it and has not said yet that it
# lives: time for the try that follows a wait.
TURN_LASTS = 2000
# Seconds within which the server answers that it has given up a wait.
CANCEL_WITHIN = 2.0


class Wire:
    """Statements to sessions; each raises Broken, NoAnswer and Refused as Session.ask() does. To be
    used under the hold's mutex."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def take(self, hold: Hold, claim: Claim, request: Request) -> tuple[int, int] | Missed:
        """Take a claim: its token, and when it was taken."""
        texts = self._rows.texts
        if claim == hold.had:
            raw = texts.shared_had if claim.mode == SHARED else texts.exclusive_had
        else:
            raw = texts.shared if claim.mode == SHARED else texts.exclusive
        params = claim_params(claim, request)
        params["session"] = hold.session.pid
        params["idle"] = idle_ms(request.ttl_us)
        ((got, token, acquired_us, _),) = hold.session.ask(raw, params)
        if got is None:
            # It has come to another session than ours.
            raise NotSupported(explain(self._rows.using))
        hold.locked = hold.locked or got == b"t"
        if token is None:
            return Missed(claim, cools=got == b"t")
        return int(token), int(acquired_us or 0)

    def free(self, hold: Hold, claims: Sequence[Claim] = ()) -> bool:
        """Have the session give up all its locks, and the rows of these claims, where they have
        their own; False if it is not the one that has them."""
        hold.had = None
        texts = self._rows.texts
        raw = texts.free
        params: dict[str, Param] = {"session": hold.session.pid, "owner": hold.owner_id}
        if any(claim.mode == SHARED for claim in claims):
            raw = texts.release_shared
            params["names"] = array(row_names(claims, hold.owner_id))
        elif claims:
            raw = texts.release
            params["names"] = array([claim.key for claim in claims])
        ((freed, _),) = hold.session.ask(raw, params)
        hold.locked = False
        return freed is not None

    def queue(self, hold: Hold, claim: Claim) -> None:
        """Take a place in the server's queue."""
        texts = self._rows.texts
        raw = texts.wait_shared if claim.mode == SHARED else texts.wait_exclusive
        hold.session.send(
            raw,
            {"id": lock_id(claim.key), "session": hold.session.pid, "idle": f"{TURN_LASTS}"},
        )
        hold.waits_for = claim

    def look(self, hold: Hold) -> bool:
        """Whether the wait is over; then `had` says whether by the lock's being had."""
        if not hold.session.has_answer():
            return False
        self._settle(hold)
        return True

    def leave(self, hold: Hold) -> None:
        """Leave the server's queue. Its turn may have come meanwhile: see `had`."""
        if not hold.session.has_answer():
            hold.session.cancel()
        self._settle(hold)

    def _settle(self, hold: Hold) -> None:
        try:
            rows = hold.session.collect(CANCEL_WITHIN)
        except Refused:
            # Given up, on our wish or an operator's.
            hold.waits_for = None
            return
        had = bool(rows) and rows[0][0] is not None
        hold.had, hold.waits_for = hold.waits_for if had else None, None
        hold.locked = had

    def begin_extension(self, hold: Hold, extension: Extension) -> None:
        """Ask for it, and for no answer yet. Where an answer is due from before, it has to be there
        by now: what it says is too old to count."""
        grant = extension.grant
        params: dict[str, Param] = {
            "names": array(row_names(grant.claims, grant.owner_id)),
            "owner": grant.owner_id,
            "session": hold.session.pid,
            "ttl": extension.ttl_us,
            "idle": idle_ms(extension.ttl_us),
        }
        hold.session.send(self._rows.texts.extend, params, 0.0, prepare=False)

    def end_extension(self, hold: Hold, extension: Extension, within: float) -> bool:
        """Whether the lease is extended; it is lost otherwise."""
        ((ours, count, _),) = hold.session.collect(within)
        return ours == b"t" and int(count or 0) == len(extension.grant.claims)


def idle_ms(ttl_us: int) -> str:
    """A ttl as the server's bound on idleness: never less."""
    return f"{max(-(-ttl_us // 1000), 1)}"
