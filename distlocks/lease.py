"""The lease and its verbs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import DEFAULT_DB_ALIAS

from . import facts
from .backends.base import BaseBackend
from .claims import INTENTION, Extended, Extension, from_us, to_us
from .clock import lease_now
from .conf import MIN_TTL, seconds
from .eventloop import blocking
from .exceptions import BackendUnavailable, DistlocksError, LeaseLost
from .held import HeldLease
from .history.waits import waits
from .identity import pid
from .keys import Key
from .renewal import renewer
from .transactions import at_end
from .waiting import lease_deadline

logger = logging.getLogger("distlocks")

if TYPE_CHECKING:
    from .guard import GuardedTransaction

OnLost = Callable[["Lease"], object]


class Lease(HeldLease):
    """A grant in its holder's hands. It lasts until its deadline unless it is extended.

    A lease may be handed to another thread or task of the same process, which may use every verb.
    In a process forked from the holder's it is lost: the holder keeps it.

    What it does not promise: a process that is paused goes on believing in its lease until it
    looks at the clock, and may then still have a write under way. Check late, and let the data
    itself refuse an old fencing token where that matters.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        state = "released" if self.over else f"{max(self.remaining, 0.0):.1f} s left"
        return f"<Lease of {', '.join(map(repr, self.keys))}: {state}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "A lease cannot be pickled: it belongs to the process that acquired it. Acquire in the "
            "process that does the work, or pass the fencing token on."
        )

    # What it is

    @property
    def fencing_tokens(self) -> dict[Key, int]:
        """The fencing token of each key: higher than that of every grant before, on every store."""
        return dict(zip(self.keys, self._tokens, strict=True))

    @property
    def mode(self) -> str:
        """How the keys are held: "exclusive", "shared" or "permit"."""
        return next(claim.mode for claim in self._grant.claims if claim.mode != INTENTION)

    @property
    def fencing_token(self) -> int:
        """The fencing token of the only key; ValueError if there are several."""
        if len(self.keys) > 1:
            raise ValueError(
                f"This lease has {len(self.keys)} keys, each with a token: use fencing_tokens."
            )
        return self._tokens[0]

    @property
    def acquired_at(self) -> datetime:
        """When it was granted, by the store's clock, in UTC."""
        return from_us(self._grant.acquired_us)

    @property
    def ending(self) -> str:
        """Why the lease cannot be extended any more and ends at its deadline; '' if it can.

        Known early: it is held until then.
        """
        return self._ending

    def check(self) -> None:
        """Raise LeaseLost if the lease is lost or has been released. Costs no round trip."""
        why = self._why_lost()
        if not why and (self._releasing or self._given_back):
            why = "it has been released"
        if why:
            raise LeaseLost(self._message(why), keys=self.keys)

    # Verbs

    def atomic(self, using: str | None = None, *, durable: bool = True) -> GuardedTransaction:
        """A transaction on the database `using` that a stale holder cannot enter.

            with lease.atomic():
                account = Account.objects.get(pk=pk)     # read inside, not before
                account.balance -= amount
                account.save()

        Its first statement raises the guard row of each key to this lease's fencing token, in the
        database of the data. Transactions of one key so take turns in the order of their tokens,
        each sees what all before it have committed, and a holder that lost its lease without
        noticing gets StaleToken before anything has run. A lease of any backend will do.

        If it commits, the data is right even if the lease was lost meanwhile. What is read or
        written outside of it, or under a lock of another key, is not guarded.

        A shared lease checks the guards instead of raising them: its transactions run beside each
        other, none after a later exclusive holder's, and exclusive ones wait for them. So does a
        tree key's lease with the guards of the keys above it.

        Raises LeaseLost if the lease is lost already, or if the database cut the transaction off
        because it was idle for longer than the lease's ttl (PostgreSQL, MariaDB; SQLite's rivals
        wait); StaleToken; LockTimeout if an earlier holder's transaction outlasts this lease; and
        NotSupported for a permit and inside an open transaction. `durable=False` allows the latter
        on PostgreSQL at READ COMMITTED: what was read before the call does not count then.
        """
        from .guard import GuardedTransaction

        tokens = dict(zip(self._grant.claims, self._grant.fencing_tokens, strict=True))
        return GuardedTransaction(self, tokens, using=using or DEFAULT_DB_ALIAS, durable=durable)

    def committed(self) -> None:
        """Note that guarded work has been committed: it stands, whatever became of the lease."""
        self._guarded = True

    @blocking("Use 'await lease.aextend()' on an event loop.")
    def extend(self, ttl: float | timedelta | None = None) -> None:
        """Make the lease last `ttl` seconds from now on (default: its ttl), in place of what is
        left.

        Raises LeaseLost if the store has it no more or the answer came after the old deadline,
        BackendUnavailable if the store does not answer or extends no lease from before a change
        of the authority (then the lease is what it was, or shorter if that was asked for), and
        ValueError for a ttl below 1 s or above the alias' MAX_TTL.
        """
        extension, asked = self._asked_extension(ttl)
        first_send = self._about_to_extend(asked)
        with self._naming_keys():
            answer = self.backend.extend([extension])
        self._after_extension(answer, first_send, asked, lasting=ttl is not None)

    async def aextend(self, ttl: float | timedelta | None = None) -> None:
        """See extend()."""
        extension, asked = self._asked_extension(ttl)
        first_send = self._about_to_extend(asked)
        with self._naming_keys():
            answer = await self.backend.aextend([extension])
        self._after_extension(answer, first_send, asked, lasting=ttl is not None)

    def _about_to_extend(self, ttl: float) -> float:
        """The moment of the request. If it makes the lease shorter, and the answer is lost, the
        store may have done it."""
        first_send = lease_now()
        if not self._grant.ends_with_transaction:
            with self._mutex:
                self.deadline = min(self.deadline, lease_deadline(first_send, ttl))
        return first_send

    @contextmanager
    def _naming_keys(self) -> Iterator[None]:
        """Tell what a store's error is about: the store knows keys by another name."""
        try:
            yield
        except DistlocksError as error:
            error.keys = self.keys
            raise

    def _asked_extension(self, ttl: float | timedelta | None) -> tuple[Extension, float]:
        self.check()
        asked = self.ttl if ttl is None else check_ttl(ttl, self.backend)
        if self._hold_until is not None:
            asked = min(asked, self._hold_until - lease_now())
        return Extension(grant=self._grant, ttl_us=to_us(max(asked, 0.0))), asked

    def _after_extension(
        self,
        answer: Extended,
        first_send: float,
        ttl: float,
        *,
        lasting: bool,
    ) -> None:
        if self.owner_id in answer.extended:
            if self.extended(first_send, ttl):
                if lasting:
                    self.ttl = ttl
                if not self._grant.in_transaction:
                    renewer.add(self)
                return
            self.lose("the answer to its extension came after its deadline")
        elif self.owner_id in answer.lost:
            self.lose("the store has it no more: it expired, was taken over or force-released")
        elif why := answer.ending.get(self.owner_id):
            self.run_out(why)
            raise BackendUnavailable(
                f"The lease of {', '.join(map(repr, self.keys))} cannot be extended: {why}. It "
                f"lasts for another {self.remaining:.1f} s.",
                keys=self.keys,
            )
        else:
            raise BackendUnavailable(
                f"The lease of {', '.join(map(repr, self.keys))} could not be extended: its store "
                f"is busy with the key, or too few of its servers have answered. Try again; "
                f"{self.remaining:.1f} s are left.",
                keys=self.keys,
            )
        raise LeaseLost(self._message(self._lost), keys=self.keys)

    @blocking("Use 'await lease.arelease()' on an event loop.")
    def release(self) -> bool:
        """Give the lease back; whether it was still ours. Idempotent.

        With until_commit, inside a transaction, the release takes place when the outermost one
        has ended; the answer is then what is known now. Raises BackendUnavailable if the store
        does not answer; a second call tries again, and otherwise the lease ends at its deadline.
        """
        self._release()
        return not self.lost

    def _release(self) -> None:
        if not self._begin_release():
            return
        if self._until_commit and at_end(self._at_transactions_end):
            return
        try:
            self.give_back()
        except BaseException as error:
            self._after_failed_release(error)
            raise

    async def arelease(self) -> bool:
        """See release(). An event loop has no transaction whose end could be awaited."""
        if not self._begin_release():
            return not self.lost
        try:
            self._released(await self.backend.arelease(self._grant))
        except BaseException as error:
            self._after_failed_release(error)
            raise
        return not self.lost

    def _after_failed_release(self, error: BaseException) -> None:
        if isinstance(error, DistlocksError):
            # The store knows keys by another name.
            error.keys = self.keys
        if not (isinstance(error, BackendUnavailable) or self._given_back):
            # Interrupted or cancelled: nobody knows whether it got through, or may ever ask.
            self._release_later()
        # Whoever is told may try again.
        self._releasing = False

    def _begin_release(self) -> bool:
        """Whether there is anything to release."""
        if self._pid != pid():
            return False
        with self._mutex:
            if self._releasing or self._given_back:
                return False
            self._releasing = True
        if lease_now() >= self.deadline and not self._grant.in_transaction:
            self.lose("its deadline has passed")
        if self._lost:
            self._note(facts.RELEASED_LATE, reason=self._lost)
        return True

    # What a `with` block and a decorator call at their end

    def finish(self, error: BaseException | None) -> None:
        """End of the block: release, then LeaseLost if it was lost while the body went well."""
        try:
            self._release()
        except DistlocksError as failure:
            self._make_up_for(failure)
        self._raise_if_lost(error)

    async def afinish(self, error: BaseException | None) -> None:
        """See finish()."""
        try:
            await self.arelease()
        except DistlocksError as failure:
            self._make_up_for(failure)
        self._raise_if_lost(error)

    def _make_up_for(self, failure: DistlocksError) -> None:
        """The work is done and its block over: an error would only invite doing it again."""
        if self._grant.in_transaction:
            # The transaction that broke will take the lock's row along when it rolls back.
            logger.info("The lock of %s goes with its transaction: %s", self.keys, failure)
            self._given_back = True
            return
        self._note(facts.ERROR, str(failure))
        self._log(
            "release_failed",
            "The lock of %s could not be released at the end of its block; it is tried again "
            "until its lease ends in %.1f s: %s",
            ", ".join(map(repr, self.keys)),
            max(self.remaining, 0.0),
            failure,
            error=str(failure),
        )
        self._release_later(told=True)

    def _raise_if_lost(self, error: BaseException | None) -> None:
        # Inside the caller's transaction the store's answer counts, not the clock: until the
        # transaction ends nobody can have taken the key.
        why = self._lost if self._grant.in_transaction else self._why_lost()
        # Guarded work that was committed stands: an error would invite doing it again.
        if error is None and why and not self._guarded:
            raise LeaseLost(self._message(why), keys=self.keys)


def check_ttl(ttl: float | timedelta, backend: BaseBackend) -> float:
    """`ttl` in seconds; TypeError or ValueError if it is none that the alias allows."""
    value = seconds(ttl, "ttl")
    longest = backend.params.max_ttl
    if not MIN_TTL <= value <= longest:
        raise ValueError(
            f"ttl={value:g} s is not allowed: leases of {backend.alias!r} last from {MIN_TTL:g} to "
            f"{longest:g} s (MAX_TTL). Longer work needs no longer lease: leases are renewed."
        )
    return value


waits.sources.append(lambda: [lease for lease in renewer.leases() if isinstance(lease, Lease)])
