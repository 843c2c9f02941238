"""What is asked of a store, and what it answers: values without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

from .keys import SEPARATOR, Key, ancestors

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = 1_000_000


def from_us(microseconds: int) -> datetime:
    """The moment that lies `microseconds` after the epoch, in UTC."""
    return EPOCH + timedelta(microseconds=microseconds)


def to_us(seconds: float) -> int:
    """Whole microseconds in `seconds`."""
    return round(seconds * MICROSECOND)


# How a key is claimed. Plain text: stores keep it, and compare it on every acquire.
EXCLUSIVE = "exclusive"
SHARED = "shared"
PERMIT = "permit"
# On the keys above a tree key: somebody below has something.
INTENTION = "intention"


class Claim(NamedTuple):
    """What is asked for on one key, which carries the alias' KEY_PREFIX."""

    key: str
    mode: str = EXCLUSIVE
    # Of a permit: how many may be had at once, counted against the asker's own limit.
    limit: int = 0


def claims_on(names: Sequence[str], mode: str = EXCLUSIVE, limit: int = 0) -> tuple[Claim, ...]:
    """The claims for keys of these names, with intentions above them, in the order in which every
    process takes them.

    Where a key is asked for, and so is one below it, its claim covers the intention if it is
    exclusive, and becomes exclusive if it is not: nobody else goes with both.
    """
    if len(names) == 1 and SEPARATOR not in names[0]:
        # What is asked for nearly always.
        return (Claim(names[0], mode, limit),)
    wanted = {name: Claim(name, mode, limit) for name in names}
    for name in list(wanted):
        for above in ancestors(name):
            claim = wanted.setdefault(above, Claim(above, INTENTION))
            if claim.mode not in (INTENTION, EXCLUSIVE):
                wanted[above] = Claim(above)
    return tuple(wanted[name] for name in sorted(wanted))


class Present(NamedTuple):
    """What a claim finds on its key, by one reading of the store's clock; microseconds."""

    now: int
    # Until when it is held exclusively, or cools down after it.
    exclusive_until: int = 0
    # How many have another claim on it. They are all of one mode.
    others: int = 0
    mode: str = ""
    # When the first and the last of those claims end.
    soonest: int = 0
    latest: int = 0
    # Until when somebody else waits whom those who come now must let pass.
    reserved_until: int = 0


class Refusal(NamedTuple):
    """Why a claim is not granted."""

    # Microseconds until it may be, if nobody extends.
    remaining: int
    # Those who have the key go with those who may come yet, and not with the asker: it would
    # wait for ever if it did not reserve its turn.
    starves: bool


def refusal(claim: Claim, present: Present) -> Refusal | None:
    """Why the claim cannot be granted beside what is there; None if it can.

    Intentions go with intentions, shared claims with shared ones, and permits with permits while
    they are fewer than the asker's own limit; nothing else goes together.
    """
    if present.exclusive_until > present.now:
        return Refusal(present.exclusive_until - present.now, False)
    if present.others and (present.mode != claim.mode or claim.mode == EXCLUSIVE):
        return Refusal(present.latest - present.now, True)
    if claim.mode == EXCLUSIVE:
        return None
    if claim.mode == PERMIT and present.others >= claim.limit:
        return Refusal(present.soonest - present.now, False)
    if present.reserved_until > present.now:
        return Refusal(present.reserved_until - present.now, False)
    return None


def next_token(last: int, now: int) -> int:
    """The fencing token of a grant at `now` after one with the token `last`."""
    return max(last + 1, now)


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Claims on one or more keys, to be granted whole or not at all.

    Claims are in the order in which every process takes them (by key), one for each key. Durations
    are in microseconds.
    """

    claims: tuple[Claim, ...]
    # Random, one per acquire: the same owner id sent again must get the same grant.
    owner_id: str
    ttl_us: int
    min_hold_us: int = 0
    host: str = ""
    pid: int = 0
    # The thread's or the task's name.
    thread: str = ""
    label: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # Will the asker wait if it is denied? A store with a queue gives it a place at once, and
    # takes the place away from who is not going to wait any more.
    waits: bool = False
    # When it began to ask, on the lease clock.
    asked_at: float = 0.0
    # Is it to be released only after a transaction that is under way? Then it may live in that.
    until_commit: bool = True
    # For a database that has the authority over its keys only at times: the name of the authority
    # and the epoch in which alone it may grant.
    authority: tuple[str, int] | None = None

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The key of each claim."""
        return tuple([claim.key for claim in self.claims])

    @property
    def hold_us(self) -> int:
        """How long the store keeps the keys taken if nothing more is heard of the asker."""
        return max(self.ttl_us, self.min_hold_us)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False)
class Grant:
    """The answer to a request that was granted."""

    claims: tuple[Claim, ...]
    owner_id: str
    # One per claim, in their order.
    fencing_tokens: tuple[int, ...]
    # When the first key was taken, by the store's clock.
    acquired_us: int
    min_hold_us: int = 0
    # Granted over the caller's own connection: no other thread can extend it, and if there is a
    # transaction, its end decides what becomes of it.
    in_transaction: bool = False
    # That transaction is the one that a TestCase wraps around a test.
    in_testcase: bool = False
    # Its locks are the transaction's own: they end with it, and with nothing else.
    ends_with_transaction: bool = False
    # Whose leases were found past their expiry on the way, never released.
    expired: tuple[Holder, ...] = ()
    # Which of a backend's stores has granted it; empty for the only or the first one.
    store: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The key of each claim."""
        return tuple([claim.key for claim in self.claims])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extension:
    """The wish to make a grant last `ttl_us` from now on."""

    grant: Grant
    ttl_us: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extended:
    """What became of a batch of extensions, by owner id.

    An owner id in none of them was busy: still held, not extended, to be tried again.
    """

    extended: frozenset[str]
    lost: frozenset[str]
    # Still held to their deadlines, and never to be extended again: why.
    ending: Mapping[str, str] = field(default_factory=dict)


HOW = {
    EXCLUSIVE: "held",
    SHARED: "shared",
    PERMIT: "held in part",
    INTENTION: "held further down",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has a key, as the store knows it."""

    # As its user wrote it; as its store knows it inside of a backend.
    key: Key
    owner_id: str
    fencing_token: int
    # When it was taken, by the store's clock.
    since: datetime
    # Seconds until the claim ends if nobody extends it.
    remaining: float
    # EXCLUSIVE, SHARED, PERMIT, or INTENTION on a key above the one that is held.
    mode: str = EXCLUSIVE
    host: str = ""
    pid: int = 0
    thread: str = ""
    label: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # Where the store keeps sessions: what its holder's is doing, as the server says.
    activity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cooling_down(self) -> bool:
        """Whether the work is over and only the minimum hold keeps the key taken."""
        return not self.owner_id

    def __str__(self) -> str:
        who = f"{self.host or 'unknown host'} pid {self.pid} thread {self.thread or 'unknown'}"
        label = f" ({self.label})" if self.label else ""
        since = f"{self.since:%Y-%m-%d %H:%M:%S} UTC"
        rest = f"for another {max(self.remaining, 0.0):.1f} s"
        if self.cooling_down:
            return f"{self.key!r} is cooling down {rest}, last held by {who}{label} since {since}"
        how = HOW[self.mode]
        return f"{self.key!r} is {how} by {who}{label} since {since}, {rest} unless extended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """Who waits for a key, as the store knows it."""

    # As its user wrote it; as its store knows it inside of a backend.
    key: Key
    owner_id: str
    # When it began to wait, by the store's clock.
    since: datetime
    # How it wants the key.
    mode: str = EXCLUSIVE
    host: str = ""
    pid: int = 0
    thread: str = ""
    label: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Denial:
    """The answer to a request that was not granted: which key is taken, and by whom."""

    # As the store knows it, with the alias' KEY_PREFIX.
    key: str
    # Seconds until trying again may help if nobody extends; 0 when the store could not tell.
    remaining: float = 0.0
    # Those that are in the way; of many, some.
    holders: tuple[Holder, ...] = ()
    # Whose request it was, if it would starve without a reservation: see Refusal.
    starves: str = ""
    # As whom the asker stands in the store's queue: its owner id.
    queued: str = ""
    # What the store's record of the key was at; None if the claim was exclusive, and only the
    # key's becoming free can help.
    version: int | None = None
    # Why it was denied, when that is not the holder's doing; and the way out.
    reason: str = ""
    # Whether waiting can help at all.
    can_wait: bool = True
    # Which of a backend's stores has denied it; empty for the only or the first one.
    store: str = ""
    # It has not answered, and another may soon do so in its place: only who gives up is told.
    unanswered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Swept:
    """One batch of a sweep."""

    # Rows looked at.
    examined: int
    # Leases found past their expiry, now cleared.
    expired: tuple[Holder, ...]
    # Free rows deleted.
    deleted: int
