"""Which store may grant now, as far as this process knows, and what it does to change that.

A mode lease, after Gray and Cheriton, "Leases: an efficient fault-tolerant mechanism for
distributed file cache consistency" (1989): each process may trust what it has read of the row for
so long, counted from before it read. Who takes the authority from Redis therefore knows when the
last process has noticed, and when the last lease from before has ended, without hearing of any.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from typing import NamedTuple

from ... import clock
from ...claims import MICROSECOND, to_us
from ...exceptions import BackendUnavailable
from ...identity import host, pid
from ...threads import JobThreads
from .row import CLOSING, DATABASE, DRAIN, REDIS, AuthorityRow, Row
from .servers import Servers, epoch_word

logger = logging.getLogger("distlocks")

# Seconds for which an acquire waits for the row to be read.
PATIENCE = 2.0
# Seconds between two looks at the row while the authority is changing.
OFTEN = 0.25
# Seconds for which the end of an attempt to open Redis is waited for before anything else is done.
OPENED_WITHIN = 1.0
# The authority returns to Redis after a longer time of health, up to so many seconds, when it has
# left it again soon: within so many times the time of health.
LONGEST_PATIENCE = 600.0
SOON = 10
# How many failed requests in a row, of one process, take the authority from Redis.
FAILURES = 2


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


class Authority:
    """The authority over the locks of one fast path, in this process.

    The row is read, and changed, by a thread of its own, when somebody asks and half of the mode
    lease is over; so a database that hangs stalls nobody before the mode lease has ended. What has
    to be asked of Redis meanwhile, another thread asks: while it hangs, the database grants.
    """

    def __init__(
        self,
        row: AuthorityRow,
        servers: Servers,
        terms: Terms,
        *,
        alias: str,
        open_redis: Callable[[bytes], None],
        changed: Callable[[Row, bool], None],
    ) -> None:
        self._row = row
        self._servers = servers
        self.terms = terms
        self._alias = alias
        # Tells the Redis half in which epoch it asks from now on.
        self._open_redis = open_redis
        # Called with what is new, and whether this process has brought it about.
        self._changed = changed
        self._jobs = JobThreads(f"distlocks-authority-{alias}")
        self._redis_jobs = JobThreads(f"distlocks-authority-{alias}-redis")
        self._condition = threading.Condition()
        self._mode: Mode | None = None
        self._due = 0.0
        # Looks that were asked for, and the last of them that is over.
        self._asked = self._done = 0
        self._failure: BackendUnavailable | None = None
        # Requests to Redis that have failed since the last that has not; and the epoch in which
        # Redis is to lose the authority, and why.
        self._failures = 0
        self._accusation: tuple[int, str] | None = None
        # How Redis was found last, whether it is being asked now, and since when it has been
        # healthy each time; what keeps the authority from returning there.
        self._finding: Finding | None = None
        self._is_asked = False
        self._healthy_since: float | None = None
        self._ailment = ""
        # The epoch for which Redis is being opened; and, once it is known, the later epoch that it
        # has seen (0 if none), or what has gone wrong.
        self._opening = 0
        self._opened: int | BackendUnavailable | None = None
        # The last change that was made here.
        self._made: tuple[int, str] | None = None

    # What every request asks

    def known(self) -> Mode | None:
        """What was read less than a mode lease ago; else None. Never blocks."""
        mode = self._mode
        now = clock.lease_now()
        if now >= self._due:
            self.look_soon()
        if mode is None or now - mode.read_at >= self.terms.mode_lease:
            return None
        return mode

    def awaited(self) -> Mode:
        """The same, read first if need be; BackendUnavailable if it cannot be in time."""
        mode = self.known()
        if mode is not None:
            return mode
        give_up = clock.Clock().now() + PATIENCE
        with self._condition:
            number = self._asked if self._asked > self._done else self._look_soon()
            while True:
                if self._done >= number and self._failure is not None:
                    raise BackendUnavailable(
                        f"Nobody knows which store may grant the locks of {self._alias!r}: "
                        f"{self._failure}"
                    ) from self._failure
                mode = self._mode
                if (
                    mode is not None
                    and clock.lease_now() - mode.read_at < self.terms.mode_lease
                    # What is about to be over is not worth telling.
                    and (self._done >= number or mode.phase in (REDIS, DATABASE))
                ):
                    return mode
                left = give_up - clock.Clock().now()
                if left <= 0:
                    raise BackendUnavailable(
                        f"Which store may grant the locks of {self._alias!r} could not be read "
                        f"from the database within {PATIENCE:g} s."
                    )
                if self._done >= number:
                    number = self._look_soon()
                self._condition.wait(left)

    def wait_for_change(self, mode: Mode, until: float) -> None:
        """Block until the authority is no longer what `mode` says; at the latest until `until` on
        the lease clock."""
        give_up = clock.Clock().now() + max(until - clock.lease_now(), 0.0)
        with self._condition:
            while not self.has_changed(mode):
                left = give_up - clock.Clock().now()
                if left <= 0:
                    return
                self._look_if_due()
                self._condition.wait(min(left, OFTEN))

    async def await_change(self, mode: Mode, until: float) -> None:
        """See wait_for_change(): blocks no thread."""
        give_up = clock.Clock().now() + max(until - clock.lease_now(), 0.0)
        while not self.has_changed(mode) and (left := give_up - clock.Clock().now()) > 0:
            self.look_soon()
            await asyncio.sleep(min(left, OFTEN))

    def has_changed(self, mode: Mode) -> bool:
        """Whether something else is known by now."""
        known = self._mode
        return known is not None and (known.epoch, known.phase) != (mode.epoch, mode.phase)

    # What requests to Redis find

    def succeeded(self) -> None:
        """Redis has answered."""
        if self._failures:
            self._failures = 0

    def failed(self, mode: Mode, error: BackendUnavailable) -> None:
        """Redis has not answered, or refused."""
        self._failures += 1
        if self._failures >= FAILURES:
            self.accuse(mode, f"Redis has failed {self._failures} times in a row: {error}")

    def doubt(self) -> None:
        """What is known may be out of date."""
        self._due = 0.0
        self.look_soon()

    def accuse(self, mode: Mode, why: str) -> None:
        """Redis is to lose the authority."""
        with self._condition:
            self._accusation = mode.epoch, f"{why} (found by {host()}, process {pid()})"
            self._look_soon()

    # What operators ask

    def drain(self, why: str) -> Mode:
        """Take the authority from Redis, and keep it from returning until resume()."""

        def pin(row: Row) -> bool:
            if row.phase == REDIS:
                return self._change(row, DRAIN, why, pinned=True)
            if row.phase == CLOSING:
                return self._change(row, DATABASE, why, pinned=True)
            return self._row.pin(row, True, row.patience_us, why)

        return self._now(pin)

    def resume(self, why: str, *, end_leases: bool) -> Mode:
        """Let the authority return to Redis as soon as that is healthy; with `end_leases`, without
        waiting for long leases of the database to be released: they are no longer extended."""

        def unpin(row: Row) -> bool:
            if end_leases and row.phase in (DATABASE, CLOSING) and not self._find().ailment:
                return self._change(row, CLOSING, why, pinned=False, ends_leases=True)
            return self._row.pin(row, False, 0, why)

        return self._now(unpin)

    def look(self) -> Mode:
        """Read the row now, and carry on what is under way. Raises BackendUnavailable."""
        with self._condition:
            number = self._look_soon()
            self._condition.wait_for(lambda: self._done >= number, PATIENCE)
            # What is asked of Redis on the way is a part of it.
            self._condition.wait_for(
                lambda: not self._is_asked and self._done == self._asked, PATIENCE
            )
            if self._done >= number and self._failure is not None:
                raise self._failure
        return self.awaited()

    def _now(self, act: Callable[[Row], bool]) -> Mode:
        # Another process may change the row in between.
        while not act(self.look().row):
            pass
        return self.look()

    @property
    def ailment(self) -> str:
        """What is wrong with Redis, as far as this process has seen; or ''."""
        return self._ailment

    def close(self) -> None:
        """End the thread; a later look begins another."""
        # They may hang with their stores.
        for jobs in (self._redis_jobs, self._jobs):
            jobs.join(PATIENCE)
            jobs.close(wait=False)

    # Looking at the row

    def look_soon(self) -> None:
        """Have the row read; returns at once."""
        with self._condition:
            self._look_if_due()

    def _look_if_due(self) -> None:
        if self._asked == self._done and clock.lease_now() >= self._due:
            self._look_soon()

    def _look_soon(self) -> int:
        """Under the condition; the number of the look."""
        self._asked += 1
        self._jobs.put(self._look)
        return self._asked

    def _look(self) -> None:
        with self._condition:
            number = self._asked
            if self._done >= number:
                return
        failure = None
        try:
            while self._step(self._read()):
                pass
        except BackendUnavailable as error:
            failure = error
            self._due = clock.lease_now() + OFTEN
        except BaseException as error:
            failure = BackendUnavailable(f"{type(error).__name__}: {error}")
            self._due = clock.lease_now() + OFTEN
            raise
        finally:
            with self._condition:
                self._failure = failure
                self._done = number
                self._condition.notify_all()

    def _read(self) -> Mode:
        while True:
            read_at = clock.lease_now()
            row = self._row.read()
            if row is None:
                self._begin()
            elif self._is_long_enough(row):
                return self._note(row, read_at)

    def _begin(self) -> None:
        """Write the first row."""
        phase, why, latest = CLOSING, "The fast path is used for the first time.", 0
        try:
            _, latest = self._servers.look()
            if latest:
                # The row is lost: leases that Redis has granted under it may be alive.
                phase, why = DRAIN, "The authority's row was lost from the database."
        except BackendUnavailable as error:
            phase, why = DRAIN, f"The fast path began without Redis: {error}"
        terms = self.terms
        row = Row(
            epoch=latest + 1,
            phase=phase,
            why=why,
            mode_lease_us=to_us(terms.mode_lease),
            max_ttl_us=to_us(terms.max_ttl),
            patience_us=to_us(terms.return_after),
        )
        if self._row.create(row):
            self._made = row.epoch, phase

    def _is_long_enough(self, row: Row) -> bool:
        """Whether whoever drains Redis will wait for our leases too; if not, see to it."""
        mode_lease_us, max_ttl_us = to_us(self.terms.mode_lease), to_us(self.terms.max_ttl)
        if mode_lease_us <= row.mode_lease_us and max_ttl_us <= row.max_ttl_us:
            return True
        self._row.lengthen(row, mode_lease_us, max_ttl_us)
        return False

    def _note(self, row: Row, read_at: float) -> Mode:
        before = self._mode
        is_new = before is None or (before.epoch, before.phase) != (row.epoch, row.phase)
        seen_at = clock.lease_now() if is_new or before is None else before.seen_at
        mode = Mode(row, read_at, seen_at)
        if is_new and row.phase == REDIS:
            # Before anybody can be told that Redis may grant.
            self._open_redis(epoch_word(row.epoch))
            self._failures = 0
        with self._condition:
            self._mode = mode
            self._due = read_at + self.terms.mode_lease / 2
            if row.phase in (DRAIN, CLOSING):
                self._due = min(self._due, read_at + OFTEN)
            if is_new:
                self._condition.notify_all()
        if is_new:
            self._healthy_since = None
            # Each attempt to open Redis has an epoch, and is no change of who grants.
            if before is None or before.phase != row.phase or row.phase == REDIS:
                self._tell(before, row)
        return mode

    def _tell(self, before: Mode | None, row: Row) -> None:
        made_here = self._made == (row.epoch, row.phase)
        if before is None and not made_here:
            # As it was before this process came.
            return
        logger.log(
            logging.WARNING if made_here else logging.INFO,
            "The locks of %r: %s (epoch %d). %s",
            self._alias,
            SAID[row.phase],
            row.epoch,
            row.why,
        )
        self._changed(row, made_here)

    def _change(
        self,
        row: Row,
        phase: str,
        why: str,
        *,
        epoch: int | None = None,
        patience_us: int | None = None,
        pinned: bool | None = None,
        ends_leases: bool = False,
        terms: tuple[float, float] | None = None,
    ) -> bool:
        epoch = row.epoch + 1 if epoch is None else epoch
        changed = self._row.change(
            row,
            phase,
            why,
            epoch=epoch,
            patience_us=patience_us,
            pinned=pinned,
            ends_leases=ends_leases,
            terms=terms,
        )
        if changed:
            self._made = epoch, phase
        return changed

    # Carrying on the change that is under way

    def _step(self, mode: Mode) -> bool:
        """Do what is to be done now; whether something may have changed."""
        row = mode.row
        if row.phase == REDIS:
            return self._leave_redis(row)
        if row.phase == DRAIN:
            return self._drained(mode)
        if row.phase == DATABASE:
            return self._leave_database(mode)
        return self._closed(mode)

    def _leave_redis(self, row: Row) -> bool:
        accusation, self._accusation = self._accusation, None
        if accusation is None or accusation[0] != row.epoch:
            return False
        # Who leaves soon after a return has returned too early.
        patience_us = to_us(self.terms.return_after)
        if row.now_us - row.since_us < SOON * row.patience_us:
            patience_us = min(max(2 * row.patience_us, patience_us), to_us(LONGEST_PATIENCE))
        self._change(row, DRAIN, accusation[1], patience_us=patience_us)
        return True

    def _drained(self, mode: Mode) -> bool:
        end = mode.seen_at + self.terms.drained_after(mode.row)
        if clock.lease_now() < end:
            self._due = min(self._due, end)
            return False
        self._change(
            mode.row,
            DATABASE,
            f"All leases from Redis have ended. Before: {mode.row.why}",
            epoch=mode.epoch,
        )
        return True

    def _leave_database(self, mode: Mode) -> bool:
        row = mode.row
        if row.pinned or not self._is_healthy(mode):
            return False
        quiet_us = row.now_us - max(row.since_us, row.unhealthy_us)
        now = clock.lease_now()
        if quiet_us < row.patience_us or now - self._since(now) < row.patience_us / MICROSECOND:
            return False
        taken = self._row.taken(row, 0)
        if taken.age_us > row.max_ttl_us:
            # Who extends its lease would keep everybody waiting, and the return would fail.
            self._ailment = (
                f"{taken.key!r} has been held for {taken.age_us / MICROSECOND:.0f} s: the "
                f"authority returns to Redis once no lease is older than MAX_TTL."
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
        if not self._is_asked and (
            finding is None or now - finding.at >= self.terms.mode_lease / 2
        ):
            self._ask_redis(self._look_at_redis)
        if finding is None or (now - finding.at >= self.terms.mode_lease and not finding.ailment):
            return False
        self._ailment = finding.ailment
        apart = finding.ahead - (mode.row.now_us / MICROSECOND - mode.read_at)
        if not self._ailment and abs(apart) > self.terms.skew:
            self._ailment = (
                f"The clocks of Redis and the database are {abs(apart):.1f} s apart, more than "
                f"'skew' allows."
            )
        if not self._ailment:
            return True
        self._healthy_since = None
        self._row.note_unhealthy(mode.row)
        return False

    def _ask_redis(self, act: Callable[[], object]) -> threading.Event:
        """Have it done beside us; what is set once it is over."""
        over = threading.Event()
        self._is_asked = True

        def job() -> None:
            try:
                act()
            finally:
                self._is_asked = False
                over.set()
                with self._condition:
                    self._condition.notify_all()

        self._redis_jobs.put(job)
        return over

    def _look_at_redis(self) -> None:
        self._finding = self._find()
        with self._condition:
            self._look_soon()

    def _find(self) -> Finding:
        """How Redis is now."""
        at = clock.lease_now()
        try:
            ahead, _ = self._servers.look()
        except BackendUnavailable as error:
            return Finding(at, str(error))
        return Finding(at, "", ahead)

    def _closed(self, mode: Mode) -> bool:
        row = mode.row
        taken = self._row.taken(row, to_us(self.terms.skew))
        if not taken.keys:
            # Whoever has begun this is likely to be about to do it.
            is_ours = self._made == (row.epoch, row.phase)
            others_turn = mode.seen_at + random.uniform(OFTEN, 4 * OFTEN)
            return (is_ours or clock.lease_now() > others_turn) and self._open(row)
        longest = row.max_ttl_us / MICROSECOND
        if clock.lease_now() - mode.seen_at < 2 * longest + self.terms.skew:
            return False
        self._change(
            row,
            DATABASE,
            f"{taken.key!r} was still held {2 * longest:g} s after the return to Redis began.",
            patience_us=self._more_patience(row),
        )
        return True

    def _more_patience(self, row: Row) -> int:
        return min(
            max(2 * row.patience_us, to_us(self.terms.return_after)), to_us(LONGEST_PATIENCE)
        )

    def _open(self, row: Row) -> bool:
        if self._opening == row.epoch:
            return self._opened is not None and self._commit(row, self._opened)
        if self._is_asked:
            return False
        # Each attempt has an epoch of its own: what is left of another cannot open this one.
        epoch = row.epoch + 1
        if not self._change(row, CLOSING, row.why, ends_leases=row.ends_leases):
            return True
        self._opening, self._opened = epoch, None
        highest = max(self._row.highest_token(), row.now_us)

        def act() -> None:
            try:
                self._opened = self._servers.open(epoch, highest)
            except BackendUnavailable as error:
                self._opened = error

        # It takes a moment as a rule, and nobody is granted anything meanwhile.
        self._ask_redis(act).wait(OPENED_WITHIN)
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
            terms = self.terms.mode_lease, self.terms.max_ttl
            self._change(row, REDIS, row.why, epoch=row.epoch, terms=terms)
        return True


SAID = {
    REDIS: "Redis grants",
    DRAIN: "nobody grants until the leases from Redis have ended, then the database",
    DATABASE: "the database grants",
    CLOSING: "nobody grants until the leases from the database have ended, then Redis",
}
