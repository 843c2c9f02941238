"""How the authority moves from one store to the other, step by step.

Each step is taken by whichever process comes first, on what it has read of the row; the row refuses
what another has been faster with. That the steps are safe together, tests/model proves.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ... import clock
from ...claims import MICROSECOND, to_us
from ...exceptions import BackendUnavailable
from ...threads import JobThreads
from ..phases import CLOSING, DATABASE, DRAIN, REDIS
from .row import AuthorityRow, Row
from .servers import Servers

# Seconds between two looks at the row while the authority is changing.
OFTEN = 0.25
# Seconds that opening a bucket of Redis takes, on a network that is not slow.
TAKES = 0.005
# Seconds for which the end of an attempt to open Redis is waited for before anything else is done.
OPENED_WITHIN = 1.0
# The authority returns to Redis after a longer time of health, up to so many seconds, when it has
# left it again soon: within so many times the time of health.
LONGEST_PATIENCE = 600.0
SOON = 10


class Mode(NamedTuple):
    """What a process knows of the authority. Moments are on the lease clock."""

    row: Row
    # From before the row was read.
    read_at: float
    # When this epoch and phase were first known, from after the row was read.
    seen_at: float

    @property
    def epoch(self) -> int:
        return self.row.epoch

    @property
    def phase(self) -> str:
        return self.row.phase


class Finding(NamedTuple):
    """How Redis was found when it was looked at."""

    # On the lease clock, before the look.
    at: float
    # What was wrong; or ''.
    ailment: str
    # How far its clock is ahead of the lease clock, in seconds.
    ahead: float = 0.0


class Terms(NamedTuple):
    """What was agreed on, in seconds; drift is a share."""

    mode_lease: float
    max_ttl: float
    drift: float
    skew: float
    return_after: float

    def drained_after(self, row: Row) -> float:
        """Seconds after which whoever has seen that Redis lost the authority knows that no lease
        from there is left: the mode lease of a process that has read the row just before, and the
        lease that it took at its end, on clocks that drift apart."""
        longest = (row.mode_lease_us + row.max_ttl_us) / MICROSECOND
        return longest * (1 + 2 * self.drift) + self.skew


class Changes:
    """What this process does to change the authority, and what it has found on the way.

    What has to be asked of Redis, a thread of its own asks: while Redis hangs, the database grants.
    """

    def __init__(
        self,
        row: AuthorityRow,
        servers: Servers,
        terms: Terms,
        *,
        alias: str,
        answered: Callable[[bool], None],
    ) -> None:
        self._row = row
        self._servers = servers
        self._terms = terms
        # Called when Redis has been asked, with whether there is something new to be done.
        self._answered = answered
        self._jobs = JobThreads(f"distlocks-authority-{alias}-redis")
        self.is_asking = False
        # The epoch in which Redis is to lose the authority, and why.
        self.accusation: tuple[int, str] | None = None
        # How Redis was found last, and since when it has been healthy each time; what keeps the
        # authority from returning there.
        self._finding: Finding | None = None
        self._healthy_since: float | None = None
        self.ailment = ""
        # The epoch for which Redis is being opened; and, once it is known, the later epoch that it
        # has seen (0 if none), or what has gone wrong.
        self._opening = 0
        self._opened: int | BackendUnavailable | None = None
        # In which epoch to go on with another's attempt, and when.
        self._turn = 0, 0.0
        # The last change that was made here: epoch and phase.
        self.made: tuple[int, str] | None = None

    def close(self, patience: float) -> None:
        """End the thread; it may hang with Redis."""
        self._jobs.join(patience)
        self._jobs.close(wait=False)

    # By hand

    def drain(self, row: Row, why: str) -> bool:
        """Take the authority from Redis, and keep it from returning; False if it has changed."""
        if row.phase == REDIS:
            return self._change(row, DRAIN, why, pinned=True)
        if row.phase == CLOSING:
            return self._change(row, DATABASE, why, pinned=True)
        return self._row.pin(row, True, row.patience_us, why)

    def resume(self, row: Row, why: str, *, end_leases: bool) -> bool:
        """Let the authority return to Redis; False if it has changed. BackendUnavailable if leases
        would be ended for a return that cannot be."""
        if end_leases and row.phase in (DATABASE, CLOSING):
            if ailment := self._find().ailment:
                raise BackendUnavailable(f"Redis is not well, and no lease is ended: {ailment}")
            return self._change(row, CLOSING, why, pinned=False, ends_leases=True)
        return self._row.pin(row, False, 0, why)

    # By itself

    def begin(self) -> None:
        """Write the first row."""
        phase, why, latest = CLOSING, "The fast path is used for the first time.", 0
        try:
            _, latest = self._servers.look()
            if latest:
                # The row is lost: leases that Redis has granted under it may be alive.
                phase, why = DRAIN, "The authority's row was lost from the database."
        except BackendUnavailable as error:
            phase, why = DRAIN, f"The fast path began without Redis: {error}"
        terms = self._terms
        row = Row(
            epoch=latest + 1,
            phase=phase,
            why=why,
            mode_lease_us=to_us(terms.mode_lease),
            max_ttl_us=to_us(terms.max_ttl),
            patience_us=to_us(terms.return_after),
        )
        if self._row.create(row):
            self.made = row.epoch, phase

    def start_over(self, row: Row, latest: int) -> None:
        """The row has been put back to what it was: what was granted since may be alive."""
        why = f"Epoch {latest} has been here already: the database has lost changes."
        self._change(row, DRAIN, why, epoch=latest + 1)

    def step(self, mode: Mode) -> bool:
        """Do what is to be done now; whether something may have changed."""
        row = mode.row
        if row.phase == REDIS:
            return self._leave_redis(row)
        if row.phase == DRAIN:
            return self._drained(mode)
        if row.phase == DATABASE:
            return self._leave_database(mode)
        return self._closed(mode)

    def next_step(self, mode: Mode) -> float:
        """When there is something to be done at the latest, on the lease clock."""
        if mode.phase == DRAIN:
            return min(mode.seen_at + self._terms.drained_after(mode.row), mode.read_at + OFTEN)
        often = OFTEN if mode.phase == CLOSING else self._terms.mode_lease / 2
        return mode.read_at + often

    def forget_health(self) -> None:
        """Another phase has begun: Redis is to be healthy from now on."""
        self._healthy_since = None
        self.ailment = ""

    def _leave_redis(self, row: Row) -> bool:
        accusation, self.accusation = self.accusation, None
        if accusation is None or accusation[0] != row.epoch:
            return False
        patience_us = to_us(self._terms.return_after)
        # Who leaves soon after a return has returned too early.
        if row.now_us - row.since_us < SOON * row.patience_us:
            patience_us = self._more_patience(row)
        self._change(row, DRAIN, accusation[1], patience_us=patience_us)
        return True

    def _drained(self, mode: Mode) -> bool:
        row, last = mode.row, self._terms.drained_after(mode.row)
        # A process that lives for less than that goes by the database's clock, with time to spare.
        long_ago = row.now_us - row.since_us > 2 * to_us(last)
        if clock.lease_now() < mode.seen_at + last and not long_ago:
            return False
        self._change(
            row, DATABASE, f"All leases from Redis have ended. Before: {row.why}", epoch=row.epoch
        )
        return True

    def _leave_database(self, mode: Mode) -> bool:
        row = mode.row
        if row.pinned or not self._is_healthy(mode):
            return False
        quiet_us = row.now_us - max(row.since_us, row.unhealthy_us)
        now = clock.lease_now()
        # After a long time of which nobody has complained, two looks of one process are enough: it
        # may live for no longer.
        long_enough = row.patience_us / MICROSECOND
        if quiet_us > 4 * row.patience_us:
            long_enough = min(long_enough, self._terms.mode_lease / 2)
        if quiet_us < row.patience_us or now - self._since(now) < long_enough:
            return False
        if taken := self._row.oldest(row, row.max_ttl_us):
            # Who extends its lease would keep everybody waiting, and the return would fail.
            self.ailment = (
                f"{taken.key!r} has been held for {taken.age_us / MICROSECOND:.0f} s: the "
                f"authority returns to Redis once no lease is older than MAX_TTL."
            )
            return False
        if self._row.highest_token() > row.now_us + to_us(self._terms.skew):
            self.ailment = (
                "Fencing tokens in the table are ahead of the database's clock, which has been "
                "set back: Redis would go on from them, and the database could not later."
            )
            return False
        why = f"Redis has been healthy for {quiet_us / MICROSECOND:.0f} s."
        # Without patience it is an operator's wish.
        self._change(row, CLOSING, why if row.patience_us else row.why)
        return True

    def _since(self, now: float) -> float:
        if self._healthy_since is None:
            self._healthy_since = now
        return self._healthy_since

    def _is_healthy(self, mode: Mode) -> bool:
        """Whether Redis was healthy when it was looked at last, which was not long ago."""
        finding, now = self._finding, clock.lease_now()
        if not self.is_asking and (
            finding is None or now - finding.at >= self._terms.mode_lease / 2
        ):
            self._ask_redis(self._look_at_redis, is_news=True)
        if finding is None or (now - finding.at >= self._terms.mode_lease and not finding.ailment):
            return False
        self.ailment = finding.ailment
        apart = finding.ahead - (mode.row.now_us / MICROSECOND - mode.read_at)
        if not self.ailment and abs(apart) > self._terms.skew:
            self.ailment = (
                f"The clocks of Redis and the database are {abs(apart):.1f} s apart, more than "
                f"'skew' allows."
            )
        if not self.ailment:
            return True
        self._healthy_since = None
        self._row.note_unhealthy(mode.row)
        return False

    def _ask_redis(self, act: Callable[[], object], *, is_news: bool) -> threading.Event:
        """Have it done beside us; what is set once it is over."""
        over = threading.Event()
        self.is_asking = True

        def job() -> None:
            try:
                act()
            finally:
                self.is_asking = False
                over.set()
                self._answered(is_news)

        self._jobs.put(job)
        return over

    def _look_at_redis(self) -> None:
        self._finding = self._find()

    def _find(self) -> Finding:
        """How Redis is now."""
        at = clock.lease_now()
        try:
            ahead, _ = self._servers.look()
        except Exception as error:
            # Whatever it is, it has not been found healthy.
            return Finding(at, str(error) or type(error).__name__)
        return Finding(at, "", ahead)

    def _closed(self, mode: Mode) -> bool:
        row = mode.row
        if not self._row.is_taken(to_us(self._terms.skew)):
            # Whoever has begun this is likely to be about to do it.
            is_ours = self.made == (row.epoch, row.phase)
            return (is_ours or clock.lease_now() > self._our_turn(mode)) and self._open(row)
        longest = row.max_ttl_us / MICROSECOND
        if clock.lease_now() - mode.seen_at < 2 * longest + self._terms.skew:
            return False
        self._change(
            row,
            DATABASE,
            f"Locks of the database were still held {2 * longest:g} s after the return to Redis "
            f"had begun.",
            patience_us=self._more_patience(row),
        )
        return True

    def _our_turn(self, mode: Mode) -> float:
        """When to go on with what another process has begun and not done."""
        if self._turn[0] != mode.epoch:
            takes = OFTEN + TAKES * self._servers.buckets
            self._turn = mode.epoch, mode.seen_at + takes * random.uniform(1, 4)
        return self._turn[1]

    def _more_patience(self, row: Row) -> int:
        return min(
            max(2 * row.patience_us, to_us(self._terms.return_after)), to_us(LONGEST_PATIENCE)
        )

    def _open(self, row: Row) -> bool:
        if self._opening == row.epoch and self._opened is not None:
            return self._commit(row, self._opened)
        if self.is_asking:
            return False
        # Each attempt has an epoch of its own: what is left of another cannot open this one.
        epoch = row.epoch + 1
        highest = max(self._row.highest_token(), row.now_us)
        if not self._change(row, CLOSING, row.why, ends_leases=row.ends_leases):
            return True
        self._opening, self._opened = epoch, None

        def act() -> None:
            try:
                self._opened = self._servers.open(epoch, highest)
            except BackendUnavailable as error:
                self._opened = error
            except Exception as error:
                self._opened = BackendUnavailable(f"{type(error).__name__}: {error}")
                raise

        # It takes a moment as a rule, and nobody is granted anything meanwhile.
        self._ask_redis(act, is_news=False).wait(OPENED_WITHIN)
        return True

    def _commit(self, row: Row, opened: int | BackendUnavailable) -> bool:
        """The attempt to open Redis for this epoch is over."""
        if isinstance(opened, BackendUnavailable):
            self._change(
                row,
                DATABASE,
                f"Redis could not be opened: {opened}",
                patience_us=self._more_patience(row),
            )
            self._row.note_unhealthy(row._replace(epoch=row.epoch + 1))
        elif opened:
            # The row has been put back to what it was: leases under the later epochs may be alive.
            why = f"Redis has seen epoch {opened} already: the database has lost changes."
            self._change(row, DRAIN, why, epoch=opened + 1)
        else:
            # Nobody has a lease: who needs longer ones than we do says so before its first.
            terms = self._terms.mode_lease, self._terms.max_ttl
            self._change(row, REDIS, row.why, epoch=row.epoch, terms=terms)
        return True

    def _change(
        self, row: Row, phase: str, why: str, *, epoch: int | None = None, **more: Any
    ) -> bool:
        """See AuthorityRow.change()."""
        epoch = row.epoch + 1 if epoch is None else epoch
        changed = self._row.change(row, phase, why, epoch=epoch, **more)
        if changed:
            self.made = epoch, phase
        return changed
