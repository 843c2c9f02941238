"""What one kind of SQL database makes different: the statements behind the verbs."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ...claims import EXCLUSIVE, MICROSECOND, Holder, Request, from_us
from .channels import Channel, Row, Session

if TYPE_CHECKING:
    from .several import Several

T = TypeVar("T")

# What a holder is read from, in this order, by every dialect.
HOLDER_COLUMNS = (
    "{key}, {owner}, fencing_token, acquired_at, {remaining}, host, pid, thread, label, metadata, "
    "mode"
)
# A waiter's mark outlives the longest sleep, and is renewed at half of its life.
MARK_US = 10 * MICROSECOND


class Tables(NamedTuple):
    """The names of our tables, quoted."""

    locks: str
    holders: str
    authorities: str


@dataclass(frozen=True, slots=True)
class Taken:
    """The key is ours."""

    fencing_token: int
    acquired_us: int
    # Others sleep beside the key who might go with us, and have to be told.
    awaited: bool = False
    # Whose lease on it had expired without having been released, if the statement could tell.
    expired: Holder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The key is somebody else's. Without holders: the store could not tell, try again."""

    # Who has it exclusively, or had it and lets it cool down.
    holder: Holder | None = None
    # Others have claims on it, whose rows are not read yet.
    several: bool = False
    # Seconds until trying again may help.
    remaining: float = 0.0
    # See claims.Refusal.
    starves: bool = False
    # See claims.Denial.
    version: int | None = None
    reason: str = ""


BUSY = Held(reason="Other statements have it in their hands.")


class Wanted(NamedTuple):
    """One claim that is to last longer; microseconds."""

    key: str
    owner_id: str
    fencing_token: int
    ttl_us: int
    min_hold_us: int


@dataclass(frozen=True, slots=True)
class Freed:
    """What a release found."""

    ours: bool
    # Somebody sleeps beside the key and has to be told.
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a sweep."""

    examined: int
    last_key: str
    expired: list[Holder]
    deleted: int


class Dialect(ABC):
    """The statements of one kind of database. Knows neither threads, nor retries, nor waiting."""

    # Is there one writer at a time for the whole database? Then a lock taken inside a transaction
    # has to live in that transaction: a second connection would wait for the first.
    one_writer: bool = False
    # Can processes be told of a release, and has the driver what it takes?
    can_announce: bool = False

    def __init__(self, alias: str, tables: Tables) -> None:
        self.alias = alias
        self.table = tables.locks
        self.tables = tables

    @cached_property
    @abstractmethod
    def several(self) -> Several:
        """The statements of claims that several may have on one key."""

    @abstractmethod
    def channel(self) -> Channel:
        """A new way to the database, outside the callers' transactions."""

    @abstractmethod
    def acquire(self, session: Session, key: str, request: Request) -> Taken | Held:
        """Take the key exclusively if it is free, expired, or has our owner id already; and, if
        the request names an authority, only while that is the database's, which cannot change
        before the grant is there for everybody to see."""

    @abstractmethod
    def has_authority(self, session: Session, authority: tuple[str, int]) -> bool:
        """Whether the authority is the database's in this epoch, and stays so until the
        transaction ends."""

    @abstractmethod
    def release(
        self, session: Session, key: str, owner_id: str, token: int | None, min_hold_us: int
    ) -> Freed:
        """Free the key in place if it is this owner's (and this token's, if one is given)."""

    @abstractmethod
    def extend(
        self, session: Session, wanted: Sequence[Wanted]
    ) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """Extend each exclusive claim that is live; (extended, busy) as (key, owner id)."""

    @abstractmethod
    def holders(self, session: Session, prefix: str, limit: int | None) -> list[Holder]:
        """Who has keys exclusively that begin with `prefix`."""

    @abstractmethod
    def force_release(self, session: Session, key: str) -> tuple[Holder | None, bool]:
        """Free the key from who has it exclusively; who, and whether somebody waits for it."""

    @abstractmethod
    def sweep(
        self, session: Session, after: str, batch_size: int, older_than_us: int, dry_run: bool
    ) -> Batch | None:
        """Clear and delete among the next `batch_size` keys past `after`; None at the end."""

    @abstractmethod
    def is_taken(self, session: Session, key: str) -> bool:
        """Whether somebody has the key, without writing anything."""

    @abstractmethod
    def is_freed(self, session: Session, key: str, token: int) -> bool:
        """Whether the holder of this token has released the key, and nobody else has since freed
        or taken it."""

    def all_or_none(self, session: Session, work: Callable[[], T]) -> T:
        """Do `work` in one transaction, and return what it returns."""
        with session.transaction():
            return work()

    # Only where can_announce is True

    def mark(self, session: Session, key: str, version: int | None) -> bool:
        """Leave word that somebody sleeps beside the key; False if it is free, or at another
        version than the given one: do not sleep."""
        raise NotImplementedError

    def announce(self, session: Session, text: str) -> None:
        """Tell every listening process."""
        raise NotImplementedError

    # Where databases differ in kind

    def is_busy(self, error: object) -> bool:
        """Whether a statement failed only because others have in their hands what it needs."""
        return False

    def explain(self, error: Exception, *, in_transaction: bool) -> str:
        """What the user should do about a database error that this dialect knows; or ''."""
        return ""


# Invariant: the authority does not change while a transaction that has read this, or the statement
# that it stands in, is under way.
AUTHORITY = """FROM {authorities}
WHERE name = %(authority)s AND epoch = %(epoch)s AND phase = 'db'"""


def holder_from(row: Row) -> Holder:
    """A holder from the columns HOLDER_COLUMNS."""
    key, owner_id, token, acquired_us, remaining_us, host, pid, thread, label, metadata, mode = row
    return Holder(
        key=key,
        owner_id=owner_id,
        fencing_token=token,
        since=from_us(acquired_us),
        remaining=remaining_us / MICROSECOND,
        host=host,
        pid=pid,
        thread=thread,
        label=label,
        metadata=json.loads(metadata) if isinstance(metadata, str) else metadata,
        mode=mode,
    )


def held_by(holder: Holder) -> Held:
    """The denial of an exclusive claim, from the key's row."""
    if holder.mode == EXCLUSIVE:
        return Held(holder=holder, remaining=holder.remaining)
    return Held(several=True, remaining=holder.remaining, starves=True)


def acquire_params(key: str, request: Request) -> dict[str, Any]:
    """The parameters of a dialect's acquire statement."""
    authority, epoch = request.authority or ("", 0)
    return {
        "authority": authority,
        "epoch": epoch,
        "key": key,
        "owner": request.owner_id,
        "hold": request.hold_us,
        "host": request.host,
        "pid": request.pid,
        "thread": request.thread,
        "label": request.label,
        "metadata": json.dumps(request.metadata) if request.metadata else "{}",
    }
