"""The contract of a backend: a store that grants leases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..claims import (
    EXCLUSIVE,
    PERMIT,
    SHARED,
    Claim,
    Denial,
    Extended,
    Extension,
    Grant,
    Holder,
    Request,
    Swept,
    Waiter,
)
from ..exceptions import NotSupported
from ..keys import SEPARATOR, Key, check_key, key_of
from .offload import offload

if TYPE_CHECKING:
    from django.core.checks import CheckMessage
    from django.dispatch import Signal
    from django.utils.functional import _StrPromise

    from ..conf import Params


# Called with each signal about a backend, the sender and the arguments: neither blocks nor raises.
listeners: list[Callable[..., object]] = []
# Called with the owner id of a lease that its store has ended all of a sudden, and how: neither
# blocks nor raises.
losses: list[Callable[[str, str], object]] = []
# Seconds by which a reservation outlasts the sleep of who made it: time for its next try.
RESERVED_LONGER = 0.25


class BaseBackend(ABC):
    """One store of locks.

    Which claims go with which on one key is the same for all stores: see claims.refusal(). Every
    verb is one round trip and never waits for a lock (claims that are not exclusive may take a
    short transaction); only wait() blocks. Verbs may be called from any thread. A store that
    cannot be reached makes them raise BackendUnavailable. Keys in requests, grants and denials
    are names with the alias' KEY_PREFIX; keys in holders are as their users wrote them.
    """

    # Does wait() end as soon as the key is released by any process, or only by polling?
    supports_wakeups: ClassVar[bool] = False
    # Which claims can it grant, beside exclusive ones?
    supports_shared: ClassVar[bool] = False
    supports_permits: ClassVar[bool] = False
    supports_tree_keys: ClassVar[bool] = False
    # Does it know who waits, and let those who came first go first?
    supports_waiters: ClassVar[bool] = False
    # Does it refuse to grant for a while after it has lost its memory? Then it has quarantine().
    supports_quarantine: ClassVar[bool] = False
    # Does the right to grant move between two stores? Then it has an authority to ask and to move.
    supports_authority: ClassVar[bool] = False
    # Does sweep() have anything to do, or does the store forget dead leases by itself?
    supports_sweep: ClassVar[bool] = False
    # What operators are told that it promises, and what not: see the README's tables.
    promise: ClassVar[str | _StrPromise] = ""
    # Names allowed in OPTIONS.
    option_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, alias: str, params: Params) -> None:
        from ..conf import InvalidSetting

        self.alias = alias
        self.params = params
        self.prefix = params.key_prefix
        # Is it kept what happens to its locks?
        self.recorded = params.history_days > 0
        self.options: Mapping[str, Any] = params.options
        for name in self.options:
            if name not in self.option_names:
                known = ", ".join(self.option_names) or "none"
                raise InvalidSetting(
                    10,
                    f"DISTLOCKS[{alias!r}]['OPTIONS'] has an unknown option {name!r}.",
                    f"{type(self).__name__} knows: {known}.",
                )

    # The verbs

    @abstractmethod
    def try_acquire(self, request: Request) -> Grant | Denial:
        """Grant all keys of the request, or none.

        Idempotent per owner id: a request sent again, because its answer was lost, gets the grant
        that it already has.
        """

    @abstractmethod
    def abandon(self, request: Request) -> None:
        """Free whatever the owner id of the request has: its asker will never know of a grant."""

    @abstractmethod
    def release(self, grant: Grant) -> bool:
        """Free the keys that are still this grant's; whether all of them were, now or when an
        earlier release of it freed them.

        A key whose minimum hold has not passed stays taken until then. What another owner has
        meanwhile is not touched.
        """

    @abstractmethod
    def extend(self, extensions: Sequence[Extension]) -> Extended:
        """Make each grant last its own ttl from now on; tell which are no longer held."""

    @abstractmethod
    def holders(self, prefix: str = "", *, limit: int | None = None) -> list[Holder]:
        """Who has the keys whose name begins with `prefix`, in the order of the names.

        The name of a tree key is its parts with keys.SEPARATOR between them.
        """

    def holders_of(self, key: str, *, limit: int | None = None) -> list[Holder]:
        """Who has the key of this name."""
        # In the order of the names, the key itself comes before all others that begin with it.
        found = self.holders(key, limit=limit)
        return [holder for holder in found if check_key(holder.key) == key]

    def scan(self) -> Iterator[Holder]:
        """Who has which key, in no order, as the store tells it: of many, without all of them in
        memory."""
        yield from self.holders()

    def waiters(self, key: str) -> list[Waiter]:
        """Who waits for the key of this name, first come first."""
        raise NotSupported(f"{type(self).__name__} does not know who waits.")

    @abstractmethod
    def force_release(self, key: str) -> list[Holder]:
        """Free the key of this name from all who have it; who had it."""

    def sweep(
        self, *, older_than: float, batch_size: int, dry_run: bool = False
    ) -> Iterator[Swept]:
        """Clear leases past their expiry and delete free rows older than `older_than` seconds.

        Works through the store in batches and yields after each. Never touches, nor waits for, a
        live lease.
        """
        raise NotSupported(
            f"{type(self).__name__} has nothing to sweep: its store forgets by itself."
        )

    @abstractmethod
    def wait(self, denial: Denial, until: float, attempt: int) -> None:
        """Block until trying again makes sense, at the latest until `until` on the lease clock.

        `attempt` says how many times this acquire has been denied. May return early. Reserves the
        asker's turn where it would starve otherwise.
        """

    @property
    def sweep_scope(self) -> object:
        """What sweep() works through: the same for aliases of which sweeping one is enough."""
        return self.alias

    def quarantine(self, *, end: bool = False) -> float:
        """Seconds until the store grants again, 0 in ordinary times; with `end`, make it so.

        Ending it is safe only if no process holds a lease from before.
        """
        raise NotSupported(f"{type(self).__name__} knows no quarantine.")

    def check(self) -> list[CheckMessage]:
        """What is wrong or unwise about this backend's settings, without talking to its store."""
        return []

    def check_store(self) -> list[CheckMessage]:
        """What is wrong or unwise about its store. Talks to it."""
        return []

    def close(self) -> None:
        """Close every connection of this process to the store."""

    def tell(self, signal: Signal, **arguments: Any) -> None:
        """Tell what has happened to the backend as a whole, to whoever listens."""
        for listener in listeners:
            listener(signal, type(self), alias=self.alias, **arguments)

    def release_when_next_used(self, grant: Grant) -> None:
        """Release a grant made in a test case's transaction, before the next verb of this thread.

        For a moment at which the connection that alone can see the grant must not be used.
        """
        raise NotSupported(
            f"{type(self).__name__} grants nothing inside a test case's transaction."
        )

    def why_over(self, grant: Grant) -> str:
        """Why a grant in the caller's transaction is over; '' while it is not. No round trip."""
        return ""

    # Async twins

    async def atry_acquire(self, request: Request) -> Grant | Denial:
        """See try_acquire()."""
        return await offload(lambda: self.try_acquire(request), undo=self.abandoning(request))

    async def aabandon(self, request: Request) -> None:
        """See abandon()."""
        await offload(lambda: self.abandon(request))

    async def arelease(self, grant: Grant) -> bool:
        """See release()."""
        return await offload(lambda: self.release(grant))

    async def aextend(self, extensions: Sequence[Extension]) -> Extended:
        """See extend()."""
        return await offload(lambda: self.extend(extensions))

    @abstractmethod
    async def await_(self, denial: Denial, until: float, attempt: int) -> None:
        """See wait(): blocks no thread."""

    # For subclasses

    def abandoning(self, request: Request) -> Callable[[Grant | Denial], None]:
        """What undoes a try of `request` whose answer nobody waits for any more."""

        def undo(answer: Grant | Denial) -> None:
            if isinstance(answer, Grant):
                self.abandon(request)

        return undo

    def public_key(self, name: str) -> Key:
        """The key of this name as its user wrote it, without the alias' KEY_PREFIX."""
        return key_of(name.removeprefix(self.prefix) if self.prefix else name)

    def public_holder(self, holder: Holder) -> Holder:
        """A holder, as the store knows it, with its key as its user wrote it."""
        assert isinstance(holder.key, str)
        return replace(holder, key=self.public_key(holder.key))

    def checked(self, claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
        """The claims, if this store can grant such; else NotSupported."""
        if len(claims) > 1 or claims[0].mode != EXCLUSIVE:
            for claim in claims:
                if claim.mode == SHARED and not self.supports_shared:
                    self._refuse(claim, "shared locks (shared=True)")
                if claim.mode == PERMIT and not self.supports_permits:
                    self._refuse(claim, "permits (limit=…)")
                if SEPARATOR in claim.key and not self.supports_tree_keys:
                    self._refuse(claim, "tree keys (a tuple)")
        return claims

    def _refuse(self, claim: Claim, what: str) -> NoReturn:
        raise NotSupported(
            f"{type(self).__name__} ({self.alias!r}) has no {what}. The database and the memory "
            f"backend have.",
            keys=(self.public_key(claim.key),),
        )
