"""How claims that several may have on one key are granted, extended and released in tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...claims import EXCLUSIVE, MICROSECOND, Claim, Holder, Present, Request, next_token, refusal
from .channels import Session
from .dialect import Freed, Held, Taken, Wanted

# Rows of claims that have ended stay for so long, so that a release that is sent twice can tell
# its own first one from the loss of the lease.
REMEMBERED_US = 10 * MICROSECOND


@dataclass(frozen=True, slots=True)
class Latched:
    """A key's row, which is in our hands until the transaction ends."""

    mode: str
    fencing_token: int
    expires_us: int
    reserved_by: str
    reserved_until_us: int
    waiting_until_us: int


@dataclass(frozen=True, slots=True)
class Seen:
    """The claims on a latched key, read in one statement after the latch was had."""

    now: int
    others: int
    mode: str
    soonest: int
    latest: int
    # Our own, if the request is sent again; else 0.
    own_token: int
    own_acquired: int


class Several(ABC):
    """Claims that are not exclusive: rows of their own beside the row of their key.

    Invariant: whoever adds, extends, ends or removes a live claim on a key holds the key's row,
    the latch, and decides in a statement that begins after the latch was had. The key's row says
    until when the last of them lasts, so an exclusive acquire looks at that row only. One
    statement that both latches and counts would count what was there before it waited.

    All but those that only read, and reserve(), are called inside a transaction. Subclasses have
    the statements; what they mean for the claims is said here.
    """

    def peek(self, session: Session, claim: Claim, request: Request) -> Held | None:
        """Why the claim would not be granted now; None if it might be. Takes no latch.

        So those who try in vain keep nobody from the row, least of all those who extend.
        """
        found = self.glance(session, claim.key, request.owner_id)
        return self._refused(claim, request, *found) if found else None

    def _refused(self, claim: Claim, request: Request, row: Latched, seen: Seen) -> Held | None:
        if seen.own_token:
            return None
        present = Present(
            now=seen.now,
            exclusive_until=row.expires_us if row.mode == EXCLUSIVE else 0,
            others=seen.others,
            mode=seen.mode,
            soonest=seen.soonest,
            latest=seen.latest,
            reserved_until=0 if row.reserved_by == request.owner_id else row.reserved_until_us,
        )
        refused = refusal(claim, present)
        if refused is None:
            return None
        return Held(
            several=True,
            remaining=refused.remaining / MICROSECOND,
            starves=refused.starves,
            version=row.fencing_token,
        )

    def take(self, session: Session, claim: Claim, request: Request) -> Taken | Held:
        """Grant the claim if it goes with what is on its key."""
        row = self.latch(session, claim.key)
        seen = self.look(session, claim.key, request.owner_id)
        if refused := self._refused(claim, request, row, seen):
            return refused
        token = seen.own_token or next_token(row.fencing_token, seen.now)
        taken = Taken(fencing_token=token, acquired_us=seen.own_acquired or seen.now)
        until = seen.now + request.hold_us
        self.put(session, claim, request, taken, until)
        self.occupy(
            session,
            claim,
            request.owner_id,
            last_token=max(token, row.fencing_token),
            since_us=None if seen.others else taken.acquired_us,
            until_us=max(until, seen.latest),
        )
        self.forget(session, claim.key)
        # Who was kept out by our reservation may go with us, and sleeps.
        used_up = row.reserved_by == request.owner_id and row.reserved_until_us > seen.now
        return replace(taken, awaited=used_up and row.waiting_until_us > seen.now)

    def release(
        self, session: Session, key: str, owner_id: str, token: int | None, min_hold_us: int
    ) -> Freed:
        """End the owner's claim if it is live; with a minimum hold, when that has passed."""
        self.latch(session, key)
        if not self.end(session, key, owner_id, token, min_hold_us):
            return Freed(ours=token is not None and self.has_ended(session, key, owner_id, token))
        return Freed(ours=True, awaited=self.settle(session, key))

    def extend(
        self, session: Session, wanted: Sequence[Wanted], *, waiting: bool
    ) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """Extend each claim that is live; (extended, busy) as (key, owner id).

        Rows in other statements' hands are busy, or are waited for.
        """
        keys = sorted({one.key for one in wanted})
        if waiting:
            for key in keys:
                self.latch(session, key)
            latched = set(keys)
        else:
            latched = self.latch_free(session, keys)
        extended, busy = set(), set()
        terms: dict[tuple[int, int], list[Wanted]] = {}
        for one in wanted:
            if one.key in latched:
                terms.setdefault((one.ttl_us, one.min_hold_us), []).append(one)
        for (ttl_us, min_hold_us), alike in terms.items():
            self.prolong(session, alike, ttl_us, min_hold_us)
            extended |= self.live(session, alike)
        if terms:
            self.cover(session, sorted(latched))
        if skipped := [one for one in wanted if one.key not in latched]:
            busy = self.live(session, skipped)
        return extended, busy

    def force_release(self, session: Session, key: str) -> tuple[list[Holder], bool]:
        """End all claims on the key; who had it, and whether somebody waits for it."""
        self.latch(session, key)
        held = self.on_key(session, key, None)
        self.remove(session, key)
        return held, self.settle(session, key)

    # The statements

    @abstractmethod
    def latch(self, session: Session, key: str) -> Latched:
        """Take the key's row into our hands, making it if there is none."""

    @abstractmethod
    def glance(self, session: Session, key: str, owner_id: str) -> tuple[Latched, Seen] | None:
        """The key's row and what is on the key, in whosever hands the row is; None without one."""

    @abstractmethod
    def look(self, session: Session, key: str, owner_id: str) -> Seen:
        """What is on the key now. A statement of its own, after latch()."""

    @abstractmethod
    def put(
        self, session: Session, claim: Claim, request: Request, taken: Taken, until_us: int
    ) -> None:
        """Write the claim's row, over one of the same owner."""

    @abstractmethod
    def occupy(
        self,
        session: Session,
        claim: Claim,
        owner_id: str,
        *,
        last_token: int,
        since_us: int | None,
        until_us: int,
    ) -> None:
        """Write into the key's row that such claims are on it, since when if this is the first of
        them, and until when the last of them lasts; and end the owner's reservation."""

    @abstractmethod
    def end(
        self, session: Session, key: str, owner_id: str, token: int | None, min_hold_us: int
    ) -> bool:
        """Note in the claim's row that it has been released; False if it was not live."""

    @abstractmethod
    def has_ended(self, session: Session, key: str, owner_id: str, token: int) -> bool:
        """Whether the claim was released by its owner a short while ago."""

    @abstractmethod
    def settle(self, session: Session, key: str) -> bool:
        """After claims have ended: let the key's row expire with the last one that is left, and
        tell that it has changed by raising its token. Whether somebody waits, who must be told.

        A row that is held exclusively stays as it is.
        """

    @abstractmethod
    def latch_free(self, session: Session, keys: Sequence[str]) -> set[str]:
        """Take those of the keys' rows into our hands that nobody has in theirs."""

    @abstractmethod
    def prolong(
        self, session: Session, wanted: Sequence[Wanted], ttl_us: int, min_hold_us: int
    ) -> None:
        """Make the live ones among these claims last so long from now on."""

    @abstractmethod
    def live(self, session: Session, wanted: Sequence[Wanted]) -> set[tuple[str, str]]:
        """Which of these claims are live, as (key, owner id)."""

    @abstractmethod
    def cover(self, session: Session, keys: Sequence[str]) -> None:
        """Let the keys' rows expire with the last claim on each."""

    @abstractmethod
    def remove(self, session: Session, key: str) -> None:
        """Delete the rows of all claims on the key."""

    @abstractmethod
    def forget(self, session: Session, key: str) -> None:
        """Delete the rows of the key's claims that ended more than REMEMBERED_US ago."""

    @abstractmethod
    def version(self, session: Session, key: str) -> int:
        """The token of the key's row, which every grant and every release of a claim that is not
        exclusive changes; 0 if the key is neither taken nor reserved."""

    @abstractmethod
    def on_key(self, session: Session, key: str, limit: int | None) -> list[Holder]:
        """Who has a live claim on exactly this key, the first of them first."""

    @abstractmethod
    def holders(self, session: Session, prefix: str, limit: int | None) -> list[Holder]:
        """Who has live claims on keys that begin with `prefix`, in the order of the keys."""

    @abstractmethod
    def reserve(self, session: Session, key: str, owner_id: str, life_us: int) -> None:
        """Let no new claims on the key but the owner's for so long, unless somebody else has
        reserved it already."""

    @abstractmethod
    def ended(self, session: Session, after: str, last: str) -> tuple[list[Holder], bool]:
        """Whose claims on the keys past `after` up to `last` have ended without a release, and
        whether there is anything to sweep. Writes nothing."""

    @abstractmethod
    def sweep(self, session: Session, after: str, last: str) -> list[Holder]:
        """Delete the rows of claims that have ended on the keys past `after` up to `last`; whose
        were never released. Neither waits for, nor touches, a live one."""
