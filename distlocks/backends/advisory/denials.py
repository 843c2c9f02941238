"""What who is denied is told: by whom, for how long, and why."""

from __future__ import annotations

from collections.abc import Callable

from ...claims import Claim, Denial, Holder, Request
from ...waiting import MAX_SLEEP
from .rows import Rows
from .waiters import POLL_CAP

# So many of a key's holders are told of.
TOLD_HOLDERS = 100


class Denials:
    """Looks up what it tells; `public` makes of a holder what its user may see."""

    def __init__(self, rows: Rows, public: Callable[[Holder], Holder], max_sessions: int) -> None:
        self._rows = rows
        self._public = public
        self._max_sessions = max_sessions

    def of(self, claim: Claim, request: Request, *, queued: bool = False) -> Denial:
        """Of a claim that could not be had; `queued` if the asker, should it be going to wait, has
        its place in the server's queue."""
        holders = self._told(claim.key)
        reason = ""
        if not holders and (found := self._rows.locked_by(claim.key)):
            pid, application, state = found[0]
            reason = (
                f"The server's process {pid} (application {application!r}, {state}) has the "
                f"advisory lock with its number: it has just been granted, or is none of ours."
            )
        if any(holder.activity.get("unreleased") for holder in holders):
            reason = (
                "The session that had it has ended without a release: its holder may not know "
                "that, until the lease ends."
            )
        remaining = max((holder.remaining for holder in holders), default=0.0)
        if remaining <= 0 and (holders or reason):
            # It lasts until a transaction ends, or nobody knows how long.
            remaining = MAX_SLEEP
        return Denial(
            key=claim.key,
            remaining=remaining,
            holders=holders,
            reason=reason,
            queued=request.owner_id if queued and request.waits else "",
        )

    def of_itself(self, claim: Claim) -> Denial:
        """Of what the asker's own transaction has."""
        return Denial(
            key=claim.key,
            holders=self._told(claim.key),
            reason="This very transaction has it: a lock is not reentrant.",
            can_wait=False,
        )

    def without_session(self, request: Request) -> Denial:
        """Of what could not even be asked for."""
        return Denial(
            key=request.claims[0].key,
            remaining=POLL_CAP,
            reason=(
                f"All {self._max_sessions} sessions of this process are in use: raise "
                f"OPTIONS['max_sessions'], and the server's max_connections with it."
            ),
        )

    def _told(self, name: str) -> tuple[Holder, ...]:
        return tuple(map(self._public, self._rows.on_key(name, TOLD_HOLDERS)))
