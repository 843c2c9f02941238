"""A lease as its process keeps it: what the renewer, the clock and a transaction's end do to it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import facts, logs, signals
from .backends.base import BaseBackend
from .claims import INTENTION, Extension, Grant, Request, to_us
from .clock import lease_now
from .facts import Who
from .history.journal import journal
from .history.waits import waits
from .identity import pid
from .keys import Key
from .recording import recorder
from .renewal import renewer
from .waiting import DRIFT, GRANULARITY, lease_deadline

if TYPE_CHECKING:
    from django.dispatch import Signal


OnLost = Callable[[Any], object]


class HeldLease:
    """What becomes of a grant until it is given back or lost. Its holder's verbs are in Lease."""

    __slots__ = (
        "__weakref__",
        "_began",
        "_ending",
        "_given_back",
        "_grant",
        "_guarded",
        "_hold_until",
        "_lost",
        "_mutex",
        "_on_lost",
        "_patterns",
        "_pid",
        "_releasing",
        "_renew",
        "_request",
        "_until_commit",
        "backend",
        "deadline",
        "keys",
        "label",
        "owner_id",
        "ttl",
        "unit",
        "waited",
    )

    def __init__(
        self,
        backend: BaseBackend,
        grant: Grant,
        *,
        first_send: float,
        ttl: float,
        waited: float = 0.0,
        renew: bool = True,
        max_hold: float | None = None,
        until_commit: bool = True,
        on_lost: OnLost | None = None,
        request: Request,
        patterns: tuple[str, ...] | None = None,
        unit: int = 0,
    ) -> None:
        self.backend = backend
        # As they were asked for.
        self.keys: tuple[Key, ...] = tuple(
            [backend.public_key(key) for key, mode, _ in grant.claims if mode != INTENTION]
        )
        # Seconds; as last granted or extended.
        self.ttl = ttl
        # On the lease clock (see distlocks.clock). After it the lease is lost, whatever the
        # store says.
        self.deadline = lease_deadline(first_send, ttl)
        if grant.ends_with_transaction:
            # No clock ends it.
            self.deadline = math.inf if max_hold is None else first_send + max_hold
        # Seconds from the call to the grant.
        self.waited = waited
        self.label = request.label
        # Random, one per acquire: what the store knows the holder by.
        self.owner_id = grant.owner_id
        # The thread or task that has acquired it: see identity.unit().
        self.unit = unit
        self._request = request
        self._patterns = patterns
        self._grant = grant
        self._began = first_send
        self._hold_until = None if max_hold is None else first_send + max_hold
        self._renew = renew and not grant.in_transaction
        self._until_commit = until_commit and (grant.in_testcase or not grant.in_transaction)
        self._on_lost = on_lost
        self._pid = pid()
        self._mutex = threading.Lock()
        # The reason, once it is known to be lost.
        self._lost = ""
        # Why it is going to end at its deadline, once that is known.
        self._ending = ""
        self._releasing = False
        self._given_back = False
        # A guarded transaction has been committed.
        self._guarded = False

    @property
    def _tokens(self) -> tuple[int, ...]:
        """The fencing tokens in the order of `keys`."""
        grant = self._grant
        if len(grant.claims) == 1:
            return grant.fencing_tokens
        claims = zip(grant.claims, grant.fencing_tokens, strict=True)
        return tuple([token for claim, token in claims if claim.mode != INTENTION])

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - lease_now()

    # Whether it is lost

    @property
    def lost(self) -> bool:
        """Whether another holder may have begun. Known by the clock, without asking the store."""
        return bool(self._why_lost())

    def _why_lost(self) -> str:
        if self._lost:
            return self._lost
        if self._pid != pid():
            return f"it belongs to process {self._pid}, from which this one was forked"
        if self._given_back:
            return ""
        if lease_now() >= self.deadline:
            return self._too_late("its deadline has passed")
        if self._grant.in_transaction:
            return self.backend.why_over(self._grant)
        return ""

    def _too_late(self, why: str) -> str:
        return f"{why} ({self._ending})" if self._ending else why

    def _message(self, why: str) -> str:
        keys = ", ".join(map(repr, self.keys))
        return f"The lease of {keys} is lost: {why}."

    def lose(self, reason: str) -> None:
        """Note that the lease is lost, and tell whoever asked to be told."""
        reason = self._too_late(reason)
        with self._mutex:
            if self._lost or self._given_back:
                return
            self._lost = reason
        renewer.discard(self)
        self._note(facts.LOST, reason)
        self._log(facts.LOST, "%s", self._message(reason), reason=reason)
        if self._on_lost is not None:
            on_lost = self._on_lost
            recorder.call(lambda: on_lost(self))
        self._tell(signals.lease_lost, reason=reason)

    # What the renewer calls

    @property
    def over(self) -> bool:
        """Whether it has been released or lost."""
        return self._given_back or bool(self._lost)

    @property
    def renewing(self) -> bool:
        """Whether it is extended in the background."""
        if not self._renew or self.over or self._ending:
            return False
        if self._hold_until is None:
            return True
        # The last extension was cut to end there, less the drift.
        return self._hold_until - self.deadline > self.ttl * DRIFT + 5 * GRANULARITY

    def next_extension(self) -> tuple[Extension, float]:
        """What to ask of the store, and the ttl in seconds."""
        ttl = self.ttl
        if self._hold_until is not None:
            ttl = min(ttl, max(self._hold_until - lease_now(), 0.0))
        return Extension(grant=self._grant, ttl_us=to_us(ttl)), ttl

    def extended(self, first_send: float, ttl: float) -> bool:
        """Note an extension; False if its answer came after the old deadline."""
        with self._mutex:
            if self._lost or lease_now() >= self.deadline:
                return False
            if self._grant.ends_with_transaction:
                return True
            self.deadline = lease_deadline(first_send, ttl)
            return True

    def run_out(self, reason: str) -> None:
        """Note that the lease cannot be extended any more, and tell whoever listens."""
        with self._mutex:
            if self._ending or self._lost or self._given_back:
                return
            self._ending = reason
        keys, remaining = ", ".join(map(repr, self.keys)), self.remaining
        self._log(
            "ending",
            "The lease of %s ends in %.1f s: %s.",
            keys,
            max(remaining, 0.0),
            reason,
            reason=reason,
            remaining=remaining,
        )
        self._tell(signals.lease_ending, remaining=remaining, reason=reason)

    # How it ends

    def _at_transactions_end(self) -> None:
        # From a commit hook or a finaliser: neither may touch a database.
        if self._grant.in_testcase:
            self.backend.release_when_next_used(self._grant)
            self._released(ours=True)
        else:
            renewer.releases.put(self)

    def give_back(self) -> None:
        """Release at the store now."""
        if not self._given_back:
            self._released(self.backend.release(self._grant))

    def _released(self, ours: bool) -> None:
        """Note that the store has it no more, and whether it was ours until then."""
        if not ours:
            self.lose("the store had it no more when it was released")
        self._forget()
        if self.backend.recorded or journal.observers:
            held = lease_now() - self._began
            journal.put((self.backend, self.keys, self._patterns, held, True))
        if signals.lock_released.receivers:
            self._tell(signals.lock_released, ours=not self._lost)

    def _release_later(self, *, told: bool = False) -> None:
        # Whatever becomes of the release, the lease is not to outlive this.
        self._renew = False
        self._releasing = True
        renewer.releases.put(self, told=told)

    def drop(self) -> None:
        """Forget a lease that its caller will never see."""
        self._forget()

    def _forget(self) -> None:
        self._given_back = True
        if self._grant.in_transaction:
            waits.in_transactions.pop(self.owner_id, None)
        renewer.discard(self)

    # Who is told

    def _tell(self, signal: Signal, **more: Any) -> None:
        recorder.send(
            signal,
            type(self.backend),
            alias=self.backend.alias,
            keys=self.keys,
            owner_id=self.owner_id,
            fencing_tokens=self._tokens,
            label=self.label,
            **more,
        )

    def _log(self, kind: str, message: str, *args: object, **fields: Any) -> None:
        logs.event(
            logging.WARNING,
            kind,
            self.backend.alias,
            self.keys,
            message,
            *args,
            owner_id=self.owner_id,
            fencing_token=max(self._tokens),
            label=self.label,
            held=lease_now() - self._began,
            **fields,
        )

    def _note(self, kind: str, reason: str) -> None:
        """Have it kept for operators."""
        journal.note(
            kind,
            self.backend,
            self.keys,
            self._patterns,
            who=Who.of(self._request),
            fencing_token=max(self._tokens),
            held=lease_now() - self._began,
            reason=reason,
        )
