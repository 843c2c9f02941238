"""The row on which all processes of a fast path agree: which store may grant, and its changes.

Statements run in autocommit, over a connection that is not the caller's. Each change compares epoch
and phase, so of several processes that want to change what they have read, one does.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import IntegrityError

from ...claims import to_us
from ...exceptions import BackendUnavailable
from ...models import LockAuthority, StoreClock
from ..database.channels import Session

if TYPE_CHECKING:
    from ..database import DatabaseBackend

COLUMNS = (
    "epoch, phase, why, mode_lease, max_ttl, patience, since, unhealthy_at, pinned, ends_leases"
)
READ = "SELECT {columns}, {clock} FROM {t} WHERE name = %(name)s"
INSERT = """
INSERT INTO {t} (name, {columns})
VALUES (%(name)s, %(epoch)s, %(phase)s, %(why)s, %(mode_lease)s, %(max_ttl)s, %(patience)s,
        {clock}, 0, %(no)s, %(no)s)
"""
# Invariant: an epoch and a phase follow only those that the changing process has read, and what an
# operator has said meanwhile stands.
CHANGE = """
UPDATE {t} SET epoch = %(new_epoch)s, phase = %(new_phase)s, since = {clock}, why = %(why)s,
               patience = %(patience)s, pinned = %(pinned)s, ends_leases = %(ends_leases)s{terms}
WHERE name = %(name)s AND epoch = %(epoch)s AND phase = %(phase)s AND pinned = %(was_pinned)s
"""
# Only when nobody has a lease: who needs longer ones says so before its first.
NEW_TERMS = ", mode_lease = %(mode_lease)s, max_ttl = %(max_ttl)s"
# Invariant: whoever waits for leases to end waits for the longest that any process may have got.
LENGTHEN = """
UPDATE {t} SET mode_lease = %(mode_lease)s, max_ttl = %(max_ttl)s
WHERE name = %(name)s AND epoch = %(epoch)s AND phase = %(phase)s
  AND mode_lease = %(old_mode_lease)s AND max_ttl = %(old_max_ttl)s
"""
UNHEALTHY = """
UPDATE {t} SET unhealthy_at = {clock} WHERE name = %(name)s AND epoch = %(epoch)s
"""
PIN = """
UPDATE {t} SET pinned = %(pinned)s, patience = %(patience)s, why = %(why)s
WHERE name = %(name)s AND epoch = %(epoch)s AND phase = %(phase)s
"""
# A key that cools down is taken too: its minimum hold is a promise.
TAKEN = """
SELECT COUNT(*) FROM {locks}
WHERE {key} >= %(prefix)s AND {key} < %(after)s AND expires_at > {clock} - %(skew)s
"""
# Where several have claims on a key, each has a row of its own: the key's says how long it has been
# taken by one after the other.
LONG = """
SELECT {key}, acquired_at FROM {locks}
WHERE {key} >= %(prefix)s AND {key} < %(after)s AND expires_at > {clock}
  AND mode = 'exclusive' AND acquired_at < {clock} - %(age)s
UNION ALL
SELECT {key}, acquired_at FROM {holders}
WHERE {key} >= %(prefix)s AND {key} < %(after)s AND expires_at > {clock}
  AND acquired_at < {clock} - %(age)s
"""
HIGHEST = """
SELECT MAX(fencing_token) FROM {locks} WHERE {key} >= %(prefix)s AND {key} < %(after)s
"""
# Greater than every character that a key may have.
LAST = chr(0x10FFFF)


class Row(NamedTuple):
    """What the row says. Moments are microseconds by the database server's clock."""

    epoch: int
    phase: str
    why: str
    mode_lease_us: int
    max_ttl_us: int
    patience_us: int
    since_us: int = 0
    unhealthy_us: int = 0
    pinned: bool = False
    ends_leases: bool = False
    # What time it was.
    now_us: int = 0


class Taken(NamedTuple):
    """The lease that has been held for longest."""

    key: str
    # For how long, in microseconds.
    age_us: int


class AuthorityRow:
    """The row of one name, and the locks that begin with `prefix`."""

    def __init__(self, name: str, prefix: str, database: DatabaseBackend) -> None:
        self.name = name
        self._prefix = prefix
        self._database = database

    def read(self) -> Row | None:
        """The row as it is now; None if there is none."""
        rows = self._execute(READ)
        if not rows:
            return None
        row = Row(*rows[0])
        return row._replace(pinned=bool(row.pinned), ends_leases=bool(row.ends_leases))

    def create(self, row: Row) -> bool:
        """Write the first row, unless another process has; whether it was we who did."""
        try:
            self._execute(
                INSERT,
                epoch=row.epoch,
                phase=row.phase,
                why=_fitting(row.why),
                mode_lease=row.mode_lease_us,
                max_ttl=row.max_ttl_us,
                patience=row.patience_us,
                no=False,
            )
        except BackendUnavailable as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            return False
        return True

    def change(
        self,
        row: Row,
        phase: str,
        why: str,
        *,
        epoch: int,
        patience_us: int | None = None,
        pinned: bool | None = None,
        ends_leases: bool = False,
        terms: tuple[float, float] | None = None,
    ) -> bool:
        """Change from the epoch and phase of `row` to others; whether it was we who did. False also
        if the answer was lost: read again. `terms` are new ones: mode lease and longest lease.
        """
        new = dict(zip(("mode_lease", "max_ttl"), map(to_us, terms or ()), strict=False))
        return self._change(
            CHANGE.replace("{terms}", NEW_TERMS if terms else ""),
            row,
            **new,
            new_epoch=epoch,
            was_pinned=row.pinned,
            new_phase=phase,
            why=_fitting(why),
            patience=row.patience_us if patience_us is None else patience_us,
            pinned=row.pinned if pinned is None else pinned,
            ends_leases=ends_leases,
        )

    def lengthen(self, row: Row, mode_lease_us: int, max_ttl_us: int) -> bool:
        """Have everybody wait for as long as this process may need."""
        return self._change(
            LENGTHEN,
            row,
            mode_lease=max(mode_lease_us, row.mode_lease_us),
            max_ttl=max(max_ttl_us, row.max_ttl_us),
            old_mode_lease=row.mode_lease_us,
            old_max_ttl=row.max_ttl_us,
        )

    def pin(self, row: Row, pinned: bool, patience_us: int, why: str) -> bool:
        """Keep the authority where it is going, or let it return."""
        return self._change(PIN, row, pinned=pinned, patience=patience_us, why=_fitting(why))

    def note_unhealthy(self, row: Row) -> None:
        """Leave word that Redis was not healthy just now, for whoever thinks that it is.

        Tried once: it is said again soon, and nobody is to wait for a writer that is in the way.
        """
        params = {"name": self.name, "epoch": row.epoch}
        with suppress(BackendUnavailable):
            self._database.do(
                lambda session: self._count(session, UNHEALTHY, params), persistently=False
            )

    def is_taken(self, skew_us: int) -> bool:
        """Whether a key is taken in the table, or was until `skew_us` ago."""
        return bool(self._execute(TAKEN, **self._span(), skew=skew_us)[0][0])

    def oldest(self, row: Row, age_us: int) -> Taken | None:
        """The oldest lease in the table, if it has been held for longer than that."""
        found = self._execute(LONG, **self._span(), age=age_us)
        if not found:
            return None
        key, since = min(found, key=lambda one: one[1])
        return Taken(key, row.now_us - since)

    def highest_token(self) -> int:
        """Of the rows in the table; 0 if there are none."""
        return int(self._execute(HIGHEST, **self._span())[0][0] or 0)

    def _span(self) -> dict[str, str]:
        return {"prefix": self._prefix, "after": self._prefix + LAST}

    def _execute(self, sql: str, **params: Any) -> list[tuple[Any, ...]]:
        return self._database.do(
            lambda session: session.execute(self._text(session, sql), {"name": self.name, **params})
        )

    def _change(self, sql: str, row: Row, **params: Any) -> bool:
        params = {"name": self.name, "epoch": row.epoch, "phase": row.phase, **params}
        return self._database.do(lambda session: self._count(session, sql, params)) == 1

    def _count(self, session: Session, sql: str, params: dict[str, Any]) -> int:
        # In a transaction, so that the wait for those who grant at the moment is bounded.
        return self._database.dialect.all_or_none(
            session, lambda: session.count(self._text(session, sql), params)
        )

    @staticmethod
    def _text(session: Session, sql: str) -> str:
        wrapper = session.wrapper
        quoted = wrapper.ops.quote_name
        clock, arguments = StoreClock().as_sql(None, wrapper)
        return sql.format(
            t=quoted("distlocks_lockauthority"),
            locks=quoted("distlocks_lock"),
            holders=quoted("distlocks_lockholder"),
            key=quoted("key"),
            columns=COLUMNS,
            clock=clock % tuple(arguments) if arguments else clock,
        )


def _fitting(why: str) -> str:
    return why[: LockAuthority._meta.get_field("why").max_length]
