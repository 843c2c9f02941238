"""Which store may grant now, as far as this process knows.

A mode lease, after Gray and Cheriton, "Leases: an efficient fault-tolerant mechanism for
distributed file cache consistency" (1989): each process may trust what it has read of the row for
so long, counted from before it read. Who takes the authority from Redis therefore knows when the
last process has noticed, and when the last lease from before has ended, without hearing of any.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from ... import clock, logs
from ...claims import to_us
from ...exceptions import BackendUnavailable
from ...identity import host, pid
from ...threads import JobThreads
from ..phases import DATABASE, REDIS, SAID
from .changes import OFTEN, Changes, Mode, Terms
from .row import AuthorityRow, Row
from .servers import Servers, epoch_word

# Seconds for which an acquire waits for the row to be read.
PATIENCE = 2.0
# How many failed requests in a row, of one process, take the authority from Redis.
FAILURES = 2
# Seconds after which one is forgotten.
FORGIVEN_AFTER = 30.0


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
        self.terms = terms
        self._alias = alias
        # Tells the Redis half in which epoch it asks from now on.
        self._open_redis = open_redis
        # Called with what is new, and whether this process has brought it about.
        self._changed = changed
        self._jobs = JobThreads(f"distlocks-authority-{alias}")
        self._condition = threading.Condition()
        self._mode: Mode | None = None
        self._due = 0.0
        # Looks that were asked for, and the last of them that is over.
        self._asked = self._done = 0
        self._failure: BackendUnavailable | None = None
        # Requests to Redis that have failed since the last that has not.
        self._failures, self._failed_at = 0, 0.0
        self._one_server = servers.buckets == 1
        self._changes = Changes(row, servers, terms, alias=alias, answered=self._redis_answered)

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
        """Redis has answered. Of a Cluster, that one server has says nothing about the others."""
        if self._failures and self._one_server:
            self._failures = 0

    def failed(self, mode: Mode, error: BackendUnavailable) -> None:
        """Redis has not answered, or refused."""
        now = clock.lease_now()
        if now - self._failed_at > FORGIVEN_AFTER:
            self._failures = 0
        self._failures, self._failed_at = self._failures + 1, now
        if self._failures >= FAILURES:
            self.accuse(mode, f"Redis has failed {self._failures} times in a row: {error}")

    def doubt(self) -> None:
        """What is known may be out of date."""
        self._due = 0.0
        self.look_soon()

    def accuse(self, mode: Mode, why: str) -> None:
        """Redis is to lose the authority."""
        with self._condition:
            self._changes.accusation = mode.epoch, f"{why} (found by {host()}, process {pid()})"
            self._look_soon()

    # What operators ask

    def drain(self, why: str) -> Mode:
        """Take the authority from Redis, and keep it from returning until resume()."""
        return self._now(lambda row: self._changes.drain(row, why))

    def resume(self, why: str, *, end_leases: bool) -> Mode:
        """Let the authority return to Redis as soon as that is healthy; with `end_leases`, without
        waiting for long leases of the database to be released: they are no longer extended."""
        return self._now(lambda row: self._changes.resume(row, why, end_leases=end_leases))

    @property
    def last(self) -> Mode | None:
        """What was read last, however long ago."""
        return self._mode

    def peek(self) -> Row | None:
        """What the row says; changes nothing, and carries nothing on. None if there is none yet."""
        return self._row.read()

    def look(self) -> Mode:
        """Read the row now, and carry on what is under way. Raises BackendUnavailable."""
        with self._condition:
            number = self._look_soon()
            self._condition.wait_for(lambda: self._done >= number, PATIENCE)
            # What is asked of Redis on the way is a part of it.
            self._condition.wait_for(
                lambda: not self._changes.is_asking and self._done == self._asked, PATIENCE
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
        return self._changes.ailment

    def close(self) -> None:
        """End the thread; a later look begins another."""
        self._changes.close(PATIENCE)
        # It may hang with the database.
        self._jobs.join(PATIENCE)
        self._jobs.close(wait=False)

    # Looking at the row

    def _redis_answered(self, is_news: bool) -> None:
        """Redis has been asked; with news, there is something to be done about the row."""
        with self._condition:
            if is_news:
                self._look_soon()
            self._condition.notify_all()

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
            while self._changes.step(self._read()):
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
                self._changes.begin()
            elif self._mode is not None and row.epoch < self._mode.epoch:
                self._changes.start_over(row, self._mode.epoch)
            elif self._is_long_enough(row):
                return self._note(row, read_at)

    def _is_long_enough(self, row: Row) -> bool:
        """Whether whoever drains Redis will wait for our leases too; if not, see to it."""
        mode_lease_us, max_ttl_us = to_us(self.terms.mode_lease), to_us(self.terms.max_ttl)
        if mode_lease_us <= row.mode_lease_us and max_ttl_us <= row.max_ttl_us:
            return True
        self._row.lengthen(row, mode_lease_us, max_ttl_us)
        return False

    def _note(self, row: Row, read_at: float) -> Mode:
        before = self._mode
        is_new = True
        seen_at = clock.lease_now()
        if before is not None and (before.epoch, before.phase) == (row.epoch, row.phase):
            is_new, seen_at = False, before.seen_at
        mode = Mode(row, read_at, seen_at)
        if is_new and row.phase == REDIS:
            # Before anybody can be told that Redis may grant.
            self._open_redis(epoch_word(row.epoch))
            self._failures = 0
        with self._condition:
            self._mode = mode
            self._due = self._changes.next_step(mode)
            if is_new:
                self._condition.notify_all()
        if is_new:
            self._changes.forget_health()
            # Each attempt to open Redis has an epoch, and is no change of who grants.
            if before is None or before.phase != row.phase or row.phase == REDIS:
                self._tell(before, row)
        return mode

    def _tell(self, before: Mode | None, row: Row) -> None:
        made_here = self._changes.made == (row.epoch, row.phase)
        if before is None and not made_here:
            # As it was before this process came.
            return
        logs.event(
            logging.WARNING if made_here else logging.INFO,
            "authority",
            self._alias,
            (),
            "The locks of %r: %s (epoch %d). %s",
            self._alias,
            SAID[row.phase],
            row.epoch,
            row.why,
            authority=row.phase,
            epoch=row.epoch,
            reason=row.why,
            made_here=made_here,
        )
        self._changed(row, made_here)
