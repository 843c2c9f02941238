"""A batch of extensions: what is asked of the rows, and what becomes of each grant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from django.db import DatabaseError

from ... import clock
from ...claims import EXCLUSIVE, MICROSECOND, Extended, Extension
from .channels import Session
from .dialect import Dialect, Wanted

# Seconds for which one batch of extensions waits for rows in other statements' hands.
BUSY_WITHIN = 1.0

# Claims, by key and owner id.
Pairs = set[tuple[str, str]]


class Extensions:
    """One batch. `raise_unless_busy` passes over errors of which another statement is the cause,
    that has a row in its hands."""

    def __init__(
        self,
        dialect: Dialect,
        extensions: Sequence[Extension],
        raise_unless_busy: Callable[[Session, DatabaseError], None],
    ) -> None:
        self._dialect = dialect
        self._extensions = extensions
        self._raise_unless_busy = raise_unless_busy
        self._exclusive: list[Wanted] = []
        self._several: list[Wanted] = []
        for extension in extensions:
            grant = extension.grant
            for claim, token in zip(grant.claims, grant.fencing_tokens, strict=True):
                (self._exclusive if claim.mode == EXCLUSIVE else self._several).append(
                    Wanted(claim.key, grant.owner_id, token, extension.ttl_us, grant.min_hold_us)
                )
        self._extended: Pairs = set()
        self._busy: Pairs = set()

    def run(self, session: Session) -> None:
        """Extend them. May be done again, on another session."""
        for wanted, verb in (
            (self._exclusive, self._dialect.extend),
            (self._several, self._extend_several),
        ):
            if wanted:
                extended, busy = verb(session, wanted)
                self._extended |= extended
                self._busy |= busy

    def _extend_several(self, session: Session, wanted: Sequence[Wanted]) -> tuple[Pairs, Pairs]:
        try:
            extended, busy = self._latched(session, wanted, waiting=False)
        except DatabaseError as error:
            self._raise_unless_busy(session, error)
            return set(), {(one.key, one.owner_id) for one in wanted}
        # A row that many latch is never free when looked at: wait for one's turn, but not for so
        # long that the answers for the others come late.
        shortest = min(one.ttl_us for one in wanted) / MICROSECOND
        give_up = clock.lease_now() + min(BUSY_WITHIN, shortest / 10)
        for one in wanted:
            while (one.key, one.owner_id) in busy and clock.lease_now() < give_up:
                try:
                    done, _ = self._latched(session, [one], waiting=True)
                except DatabaseError as error:
                    self._raise_unless_busy(session, error)
                    continue
                extended |= done
                busy -= {(one.key, one.owner_id)}
        return extended, busy

    def _latched(
        self, session: Session, wanted: Sequence[Wanted], *, waiting: bool
    ) -> tuple[Pairs, Pairs]:
        several = self._dialect.several
        return self._dialect.all_or_none(
            session, lambda: several.extend(session, wanted, waiting=waiting)
        )

    def result(self) -> Extended:
        """A grant is extended with all of its claims, and lost with any."""
        done, lost = set(), set()
        for extension in self._extensions:
            grant = extension.grant
            wanted = {(key, grant.owner_id) for key in grant.keys}
            if wanted <= self._extended:
                done.add(grant.owner_id)
            elif not wanted <= self._extended | self._busy:
                lost.add(grant.owner_id)
        return Extended(extended=frozenset(done), lost=frozenset(lost))
