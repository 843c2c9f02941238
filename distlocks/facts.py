"""What can happen to a lock, as values without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .claims import Holder
from .keys import SEPARATOR, Key

if TYPE_CHECKING:

    class Named(Protocol):
        """What tells of a process: a request, a holder, or who waits."""

        @property
        def owner_id(self) -> str: ...
        @property
        def host(self) -> str: ...
        @property
        def pid(self) -> int: ...
        @property
        def thread(self) -> str: ...
        @property
        def label(self) -> str: ...
        @property
        def metadata(self) -> Mapping[str, Any]: ...


# A request found its key taken. Of one that does not wait, this is all there is.
CONTENDED = "contended"
# It was granted after it had waited.
ACQUIRED = "acquired"
# It was not granted in the time that it had.
TIMED_OUT = "timed_out"
# A sweep found a lease past its expiry, never released.
EXPIRED = "expired"
# The same, found by who took the key over.
TAKEN_OVER = "taken_over"
# A lease ended before its holder was done.
LOST = "lost"
# It was released, but not before it was lost.
RELEASED_LATE = "released_late"
# An operator freed the key from its holder.
FORCED = "forced"
# Another store grants from now on, or none.
AUTHORITY = "authority"
# Processes wait for each other in a circle.
CYCLE = "cycle"
# A store did not answer.
ERROR = "error"

KINDS = (
    CONTENDED,
    ACQUIRED,
    TIMED_OUT,
    EXPIRED,
    TAKEN_OVER,
    LOST,
    RELEASED_LATE,
    FORCED,
    AUTHORITY,
    CYCLE,
    ERROR,
)
# So many of them that, when there is no room, the others go first.
ORDINARY = frozenset({CONTENDED, ACQUIRED, TIMED_OUT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """A process, and what in it asked for a lock."""

    owner_id: str = ""
    host: str = ""
    pid: int = 0
    # The thread's or the task's name.
    thread: str = ""
    label: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, one: Named) -> Who:
        """Who has sent a request, has a key, or waits for one."""
        return cls(
            owner_id=one.owner_id,
            host=one.host,
            pid=one.pid,
            thread=one.thread,
            label=one.label,
            metadata=one.metadata,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that is worth a row of its own."""

    kind: str
    # The alias of the backend.
    alias: str
    # Seconds since the epoch, by this process's clock.
    at: float
    # The key's name, without the alias' KEY_PREFIX; empty if it is about the backend as a whole.
    name: str = ""
    # What the key has in common with others; empty: to be made from its name.
    pattern: str = ""
    who: Who = Who()
    # The other side: who was in the way, or whose lease was taken over.
    other: Who | None = None
    fencing_token: int | None = None
    # Seconds.
    waited: float | None = None
    held: float | None = None
    reason: str = ""
    # Of what has happened to several keys at once, the first is counted in the totals.
    is_first: bool = True


def shown_text(text: str) -> str:
    """A reason as every table can keep it."""
    if text.isprintable():
        return text
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def first_of(holders: Iterable[Holder]) -> Who | None:
    """The first of those that are in the way, if the store could tell."""
    return next((Who.of(holder) for holder in holders), None)


def shown(key: Key | str) -> str:
    """A key, or its name, as operators read it: the parts of a tree key with arrows between."""
    parts = key if isinstance(key, tuple) else key.split(SEPARATOR)
    return " → ".join(parts)
