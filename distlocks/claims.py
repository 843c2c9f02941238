"""What is asked of a store, and what it answers: values without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = 1_000_000


def from_us(microseconds: int) -> datetime:
    """The moment that lies `microseconds` after the epoch, in UTC."""
    return EPOCH + timedelta(microseconds=microseconds)


def to_us(seconds: float) -> int:
    """Whole microseconds in `seconds`."""
    return round(seconds * MICROSECOND)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """Exclusive claims on one or more keys, to be granted whole or not at all.

    Keys are in the order in which every process takes them (sorted), without duplicates, and
    carry the alias' KEY_PREFIX. Durations are in microseconds.
    """

    keys: tuple[str, ...]
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

    @property
    def hold_us(self) -> int:
        """How long the store keeps the keys taken if nothing more is heard of the asker."""
        return max(self.ttl_us, self.min_hold_us)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False)
class Grant:
    """The answer to a request that was granted."""

    keys: tuple[str, ...]
    owner_id: str
    # One per key, in the order of `keys`.
    fencing_tokens: tuple[int, ...]
    # When the first key was taken, by the store's clock.
    acquired_us: int
    min_hold_us: int = 0
    # Granted over the caller's own connection: no other thread can extend it, and if there is a
    # transaction, its end decides what becomes of it.
    in_transaction: bool = False
    # That transaction is the one that a TestCase wraps around a test.
    in_testcase: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extension:
    """The wish to make a grant last `ttl_us` from now on."""

    grant: Grant
    ttl_us: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extended:
    """What became of a batch of extensions, by owner id.

    An owner id in neither set was busy: still held, not extended, to be tried again.
    """

    extended: frozenset[str]
    lost: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has a key, as the store knows it."""

    key: str
    owner_id: str
    fencing_token: int
    # When it was taken, by the store's clock.
    since: datetime
    # Seconds until the key is free if nobody extends it.
    remaining: float
    host: str = ""
    pid: int = 0
    thread: str = ""
    label: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

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
        return f"{self.key!r} is held by {who}{label} since {since}, {rest} unless extended"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Denial:
    """The answer to a request that was not granted: which key is taken, and by whom."""

    # As the store knows it, with the alias' KEY_PREFIX.
    key: str
    # Seconds until the key is free if nobody extends it; 0 when the store could not tell.
    remaining: float = 0.0
    holder: Holder | None = None
    # Why it was denied, when that is not the holder's doing; and the way out.
    reason: str = ""
    # Whether waiting can help at all.
    can_wait: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Swept:
    """One batch of a sweep."""

    # Rows looked at.
    examined: int
    # Leases found past their expiry, now cleared.
    expired: tuple[Holder, ...]
    # Free rows deleted.
    deleted: int
