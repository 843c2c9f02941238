"""One acquire: the tries, the waits between them, and the lease or the error at the end."""

from __future__ import annotations

import time
from dataclasses import replace

from . import context, facts, signals
from .backends.base import BaseBackend
from .backends.offload import offload
from .claims import Denial, Grant, Request, claims_on, to_us
from .clock import lease_now
from .exceptions import BackendUnavailable, LockTimeout
from .facts import Who, first_of
from .handler import locks
from .history.journal import journal
from .history.waits import Waiting, waits
from .identity import host, new_owner_id, pid, unit
from .keys import Key, key_of
from .lease import Lease, check_ttl
from .options import FromSettings, Options
from .recording import recorder
from .renewal import renewer
from .transactions import warn_of_old_snapshots
from .waiting import wake_at

# As many are named in the message of LockTimeout; its `holders` may be more.
SHOWN_HOLDERS = 3
# Seconds for which a store takes a waiter for alive that is not heard of any more.
PLACE_LASTS = 11.0


class Acquisition:
    """One acquire of some keys, by run() or arun()."""

    def __init__(
        self, keys: tuple[str, ...], options: Options, patterns: tuple[str, ...] | None = None
    ) -> None:
        self.options = options
        # Of keys that a template has made: what it makes them from.
        self.patterns = patterns
        self.backend: BaseBackend = locks[options.alias]
        params = self.backend.params
        timeout = options.timeout
        self.timeout = params.timeout if isinstance(timeout, FromSettings) else timeout
        ttl = params.ttl if options.ttl is None else check_ttl(options.ttl, self.backend)
        self.ttl = ttl if options.max_hold is None else min(ttl, options.max_hold)
        prefix = self.backend.prefix
        self.names = keys
        self.started = lease_now()
        thread, self.unit = unit()
        self.request = Request(
            claims=self.backend.checked(
                claims_on(
                    [prefix + key for key in keys] if prefix else keys, options.mode, options.limit
                )
            ),
            owner_id=new_owner_id(),
            ttl_us=to_us(self.ttl),
            min_hold_us=to_us(options.min_hold),
            host=host(),
            pid=pid(),
            thread=thread,
            label=options.label,
            metadata=context.merged(options.metadata),
            waits=self.timeout != 0,
            asked_at=self.started,
            until_commit=options.until_commit,
        )
        self.give_up = float("inf") if self.timeout is None else self.started + self.timeout
        self.sent = self.started
        self.attempt = 0
        # Who was in the way at first, and, while it waits, what others are to know of that.
        self.rival: Who | None = None
        self.waiting: Waiting | None = None

    @property
    def keys(self) -> tuple[Key, ...]:
        """As they were asked for, in one order."""
        return tuple(map(key_of, sorted(self.names)))

    def run(self) -> Lease:
        if renewer.releases.pending:
            renewer.releases.settle()
        try:
            while True:
                answer = self.backend.try_acquire(self._asked())
                if isinstance(answer, Grant):
                    return self._lease(answer)
                self.backend.wait(answer, self._until(answer), self.attempt)
        except LockTimeout:
            raise
        except BaseException as error:
            self._leave_nothing_behind(error)
            raise
        finally:
            if self.waiting is not None:
                waits.end(self.waiting)

    async def arun(self) -> Lease:
        if renewer.releases.pending:
            await offload(renewer.releases.settle)
        try:
            while True:
                answer = await self.backend.atry_acquire(self._asked())
                if isinstance(answer, Grant):
                    return self._lease(answer)
                await self.backend.await_(answer, self._until(answer), self.attempt)
        except LockTimeout:
            raise
        except BaseException as error:
            self._leave_nothing_behind(error)
            raise
        finally:
            if self.waiting is not None:
                waits.end(self.waiting)

    def _asked(self) -> Request:
        """The request, about to be sent."""
        self.sent = lease_now()
        if self.attempt and self.sent >= self.give_up:
            # The last try: the place in the queue is for the next.
            self.request = replace(self.request, waits=False)
        return self.request

    def _until(self, denial: Denial) -> float:
        """Until when to wait before the next try; LockTimeout if there is to be none, or
        BackendUnavailable if nobody has answered."""
        now = lease_now()
        if not self.attempt and not denial.unanswered and journal.wants(self.backend):
            self._note_contention(denial)
        # Who stands in a queue leaves it with a last try.
        if (now >= self.give_up and not denial.queued) or not denial.can_wait:
            raise self._timed_out(denial, now)
        self.attempt += 1
        self._tell_what_it_waits_for(denial)
        if denial.unanswered:
            # What is still under way of that try, or of undoing it, must not touch what the next
            # one gets.
            renewer.releases.abandon(self.backend, self.request, self.sent + self.ttl)
            self.request = replace(self.request, owner_id=new_owner_id())
        return wake_at(now, self.give_up, denial.remaining)

    def _note_contention(self, denial: Denial) -> None:
        self.rival = first_of(denial.holders)
        self._note(facts.CONTENDED, denial, reason=denial.reason)

    def _note(self, kind: str, denial: Denial | None = None, **about: object) -> None:
        keys = self.keys if denial is None else (self.backend.public_key(denial.key),)
        journal.note(
            kind,
            self.backend,
            keys,
            self.patterns,
            who=Who.of(self.request),
            other=self.rival,
            **about,
        )

    def _tell_what_it_waits_for(self, denial: Denial) -> None:
        if self.waiting is None:
            if not self.backend.recorded:
                return
            since = time.time() - (lease_now() - self.started)
            self.waiting = Waiting(
                backend=self.backend,
                mode=self.options.mode,
                unit=self.unit,
                started=self.started,
                since=since,
                gives_up=None if self.timeout is None else since + self.timeout,
            )
            waits.begin(self.waiting)
        # In this order: another thread reads it.
        self.waiting.denial = denial
        self.waiting.request = self.request

    def _lease(self, grant: Grant) -> Lease:
        options = self.options
        lease = Lease(
            self.backend,
            grant,
            first_send=self.sent,
            ttl=self.ttl,
            waited=lease_now() - self.started,
            renew=options.renew,
            max_hold=options.max_hold,
            until_commit=options.until_commit,
            on_lost=options.on_lost,
            request=self.request,
            patterns=self.patterns,
            unit=self.unit,
        )
        try:
            if grant.in_transaction:
                waits.in_transactions[grant.owner_id] = lease
            else:
                renewer.add(lease)
                warn_of_old_snapshots()
            if self.backend.recorded or journal.observers:
                journal.put((self.backend, lease.keys, self.patterns, lease.waited, False))
                if self.attempt:
                    self._note(
                        facts.ACQUIRED,
                        waited=lease.waited,
                        fencing_token=max(grant.fencing_tokens),
                    )
            if signals.lock_acquired.receivers:
                recorder.send(
                    signals.lock_acquired,
                    type(self.backend),
                    alias=self.backend.alias,
                    keys=lease.keys,
                    owner_id=grant.owner_id,
                    fencing_tokens=tuple(lease.fencing_tokens.values()),
                    waited=lease.waited,
                    label=options.label,
                )
            if grant.expired:
                journal.note_expired(
                    facts.TAKEN_OVER, self.backend, grant.expired, Who.of(self.request)
                )
                recorder.send(
                    signals.locks_expired,
                    type(self.backend),
                    alias=self.backend.alias,
                    keys=tuple(holder.key for holder in grant.expired),
                    holders=grant.expired,
                )
        except BaseException:
            lease.drop()
            raise
        return lease

    def _timed_out(self, denial: Denial, now: float) -> LockTimeout | BackendUnavailable:
        if denial.unanswered:
            return BackendUnavailable(denial.reason, keys=self.keys)
        holders = denial.holders
        if self.timeout:
            self.rival = first_of(holders) or self.rival
            self._note(facts.TIMED_OUT, denial, waited=now - self.started, reason=denial.reason)
        recorder.send(
            signals.lock_denied,
            type(self.backend),
            alias=self.backend.alias,
            keys=self.keys,
            holders=holders,
            waited=now - self.started,
            label=self.options.label,
        )
        key = self.backend.public_key(denial.key)
        when = f"within {self.timeout:g} s" if self.timeout else "at once"
        why = "; ".join(map(str, holders[:SHOWN_HOLDERS]))
        if len(holders) > SHOWN_HOLDERS:
            why += "; and others"
        explanation = " ".join(filter(None, (f"{why}." if why else "", denial.reason)))
        return LockTimeout(
            f"The lock {key!r} could not be had {when}: "
            f"{explanation or 'the store could not tell who has it.'}",
            keys=self.keys,
            holders=holders,
        )

    def _leave_nothing_behind(self, error: BaseException) -> None:
        """The try was interrupted, or its answer lost: it may have been granted."""
        until = self.sent + self.ttl
        if isinstance(error, BackendUnavailable):
            error.keys = self.keys
            journal.note(
                facts.ERROR,
                self.backend,
                self.keys[:1],
                self.patterns,
                who=Who.of(self.request),
                reason=str(error),
                waited=lease_now() - self.started,
            )
            if self.attempt:
                # The store may still have its place in a queue, and keep others waiting for it.
                until = max(until, self.sent + PLACE_LASTS)
            elif not error.in_doubt:
                return
        renewer.releases.abandon(self.backend, self.request, until)
