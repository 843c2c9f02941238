"""What a list of locks says of each, and what may be asked of it: values without I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..claims import EXCLUSIVE, INTENTION, PERMIT, SHARED, Holder
from ..keys import SEPARATOR

# The work is over, and only the minimum hold keeps the key taken.
COOLING = "cooling"
MODES = (EXCLUSIVE, SHARED, PERMIT, INTENTION, COOLING)

# Of a key that several have, so many are named.
NAMED = 3
# Locks beyond that are not counted, and not paged to: who looks for one narrows the list down.
MAX_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key that is taken now. Durations are seconds, as of when it was read."""

    alias: str
    # The key's, without the alias' KEY_PREFIX.
    name: str
    # One of MODES.
    mode: str
    # The first of those who have it, and how many they are.
    holders: tuple[Holder, ...]
    count: int = 1
    # Since the first of them got it; and until the last of them loses it unless it is extended.
    age: float
    left: float
    # How many have been waiting for longer than a moment; None if that is not known.
    waiters: int | None = None


def mode_of(holder: Holder) -> str:
    """One of MODES."""
    return COOLING if holder.mode == EXCLUSIVE and holder.cooling_down else holder.mode


# By what the list may be sorted. Where two are alike, the key's name decides.
SORTS: dict[str, Callable[[Entry], str | float]] = {
    "key": lambda entry: entry.name,
    "age": lambda entry: entry.age,
    "left": lambda entry: entry.left,
    "waiters": lambda entry: entry.waiters or 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which locks are asked for, in which order, and which page of them."""

    # An alias; empty: of all.
    backend: str = ""
    # One of MODES; empty: all.
    mode: str = ""
    # Taken for longer than so many seconds.
    longer_than: float = 0.0
    # Only those that somebody waits for.
    waited_for: bool = False
    # Words, all of which are part of the key, a holder's label, host, thread or owner id.
    search: str = ""
    # Only keys below the one of this name.
    below: str = ""
    # One of SORTS.
    sort: str = "key"
    descending: bool = False
    # From 1.
    page: int = 1
    size: int = 50

    @property
    def words(self) -> list[str]:
        """What is searched for; a tree key may be written as it is shown."""
        return self.search.replace(" → ", SEPARATOR).split(" ") if self.search.strip() else []

    @property
    def until(self) -> int:
        """How many of the first there must be to show the page, and that there is another."""
        return min(self.page * self.size, MAX_LISTED) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one backend has of what is wanted: the first, in order."""

    entries: Sequence[Entry]
    # Of all; at least so many if `more`.
    count: int
    more: bool = False
    # Seconds since they were read.
    as_of: float = 0.0
    # There are more in the store than are looked at.
    cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    """How it stands with one backend."""

    alias: str
    # Its class.
    kind: str
    # Why its locks are not listed; empty if they are.
    error: str = ""
    # It is being read for the first time.
    reading: bool = False
    found: Found | None = None
    # Aliases of the same locks, which are not listed again.
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One page of what is wanted."""

    wanted: Wanted
    entries: list[Entry]
    # Of all pages; at least so many if `more`.
    count: int
    more: bool
    pages: int
    stores: list[StoreState]
    # Why it is not known who waits; empty if it is.
    waiters_unknown: str = ""
