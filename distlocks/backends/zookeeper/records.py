"""What the nodes of claims and of places hold, as values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ...claims import MICROSECOND, Holder, Request, Waiter, from_us
from ...keys import Key
from .nodes import Named

# ZooKeeper tells times in whole milliseconds, rounded down.
MILLISECOND = 1000


@dataclass(frozen=True, slots=True)
class Held:
    """One claim on a key, as its node was at one moment."""

    named: Named
    path: str
    token: int
    acquired_us: int
    ttl_us: int
    # How long it keeps the key taken from the making of its node on, at least.
    min_hold_us: int
    # Host, pid, thread, label and metadata.
    about: dict[str, Any]
    # When its node was made, and last written for an extension, by the servers' clock; the latter
    # not before it was.
    created_us: int
    written_us: int
    # Changes with each extension; no two states of any node have the same.
    state: int
    version: int
    # Does the session that it goes with live?
    trusted: bool

    @property
    def cooled_us(self) -> int:
        """Until when its minimum hold keeps the key taken."""
        return self.created_us + self.min_hold_us if self.min_hold_us else 0

    @property
    def expires_us(self) -> int:
        """Until when it keeps the key taken if nobody extends it, by the servers' clock."""
        if self.named.released:
            return self.cooled_us
        return max(self.written_us + self.ttl_us, self.cooled_us)

    def data(self, *, ttl_us: int) -> bytes:
        """What the node is to hold when the lease is to last that long from the writing on."""
        return claim_data(self.token, self.acquired_us, ttl_us, self.min_hold_us, self.about)

    def cooling_data(self, rest_us: int) -> bytes:
        """What the node that takes its place is to hold when only so much of its minimum hold is
        left."""
        return claim_data(self.token, self.acquired_us, 0, rest_us, self.about)


def claim_data(
    token: int, acquired_us: int, ttl_us: int, min_hold_us: int, about: dict[str, Any]
) -> bytes:
    """What the node of a claim holds."""
    return json.dumps(
        {
            "token": token,
            "acquired_us": acquired_us,
            "ttl_us": ttl_us,
            "min_hold_us": min_hold_us,
            **about,
        }
    ).encode()


def about(request: Request) -> dict[str, Any]:
    """What an operator is told of the asker."""
    return {
        "host": request.host,
        "pid": request.pid,
        "thread": request.thread,
        "label": request.label,
        "metadata": dict(request.metadata),
    }


def place_data(request: Request) -> bytes:
    """What the node of a place in a queue holds."""
    return json.dumps(about(request)).encode()


def held(named: Named, path: str, data: bytes, stat: Any, *, trusted: bool) -> Held:
    """A claim, from its node."""
    said = json.loads(data)
    return Held(
        named=named,
        path=path,
        token=said.pop("token"),
        acquired_us=said.pop("acquired_us"),
        ttl_us=said.pop("ttl_us"),
        min_hold_us=said.pop("min_hold_us"),
        about=said,
        created_us=stat.ctime * MILLISECOND,
        written_us=(stat.mtime + 1) * MILLISECOND,
        state=stat.mzxid,
        version=stat.version,
        trusted=trusted,
    )


def holder(found: Held, key: Key, now_us: int) -> Holder:
    """A claim as it is shown, at a moment by the servers' clock."""
    longest = max(found.ttl_us, found.min_hold_us)
    return Holder(
        key=key,
        owner_id="" if found.named.released else found.named.owner_id,
        fencing_token=found.token,
        since=from_us(found.acquired_us),
        remaining=min(found.expires_us - now_us, longest) / MICROSECOND,
        mode=found.named.claim.mode,
        **found.about,
    )


def waiter(named: Named, key: Key, data: bytes, stat: Any) -> Waiter:
    """Who waits, from the node of its place."""
    return Waiter(
        key=key,
        owner_id=named.owner_id,
        since=from_us(stat.ctime * MILLISECOND),
        mode=named.claim.mode,
        **json.loads(data),
    )
