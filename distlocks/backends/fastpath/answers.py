"""What is answered while no store may: to those who ask for keys, and about leases that run out."""

from __future__ import annotations

from collections.abc import Sequence

from ... import clock
from ...claims import MICROSECOND, Denial, Extended, Extension, Request
from ...exceptions import BackendUnavailable
from ..phases import DRAIN
from .changes import OFTEN, Mode, Terms


def nobody_grants(request: Request, mode: Mode, terms: Terms) -> Denial:
    """The denial while the authority is on its way from one store to the other."""
    row = mode.row
    if mode.phase == DRAIN:
        left = mode.seen_at + terms.drained_after(row) - clock.lease_now()
        reason = (
            f"The database takes over from Redis in {max(left, 0.0):.1f} s at the latest, when all "
            f"leases from there have ended ({_as_part(row.why)})."
        )
    else:
        left = mode.seen_at + row.max_ttl_us / MICROSECOND - clock.lease_now()
        reason = "Redis takes over from the database as soon as all leases there have ended."
    return Denial(
        key=request.claims[0].key, remaining=max(left, OFTEN), reason=reason, store=mode.phase
    )


def running_out(extensions: Sequence[Extension], change: str, why: str) -> Extended:
    """None of these is extended any more: they last until their deadlines."""
    reason = f"{change}: {_as_part(why)}"
    return Extended(
        extended=frozenset(),
        lost=frozenset(),
        ending={extension.grant.owner_id: reason for extension in extensions},
    )


def _as_part(why: str) -> str:
    """A reason, as part of another sentence."""
    return why.rstrip(".")


class ByStore:
    """What became of a batch of extensions, some in each store."""

    def __init__(self) -> None:
        self._answers: list[Extended] = []
        self.failure: BackendUnavailable | None = None

    def add(self, answer: Extended) -> None:
        self._answers.append(answer)

    def result(self) -> Extended:
        """Of all; raises what went wrong if nothing can be said of any."""
        if self.failure is not None and not self._answers:
            raise self.failure
        if len(self._answers) == 1:
            return self._answers[0]
        return Extended(
            extended=frozenset().union(*(one.extended for one in self._answers)),
            lost=frozenset().union(*(one.lost for one in self._answers)),
            ending={owner: why for one in self._answers for owner, why in one.ending.items()},
        )
