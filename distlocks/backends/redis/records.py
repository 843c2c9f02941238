"""What the scripts know of holders and waiters, as values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ...claims import (
    EXCLUSIVE,
    INTENTION,
    MICROSECOND,
    PERMIT,
    SHARED,
    Holder,
    Request,
    Waiter,
    from_us,
)
from ...keys import Key

# How the scripts write a mode.
LETTER = {EXCLUSIVE: b"E", SHARED: b"S", PERMIT: b"P", INTENTION: b"I"}
MODE = {letter: mode for mode, letter in LETTER.items()}
# Between what is known of a holder; none of it holds a control character.
_BETWEEN = "\t"


def who(request: Request) -> bytes:
    """What the store is to know of the asker."""
    about = _about(request.host, request.pid, request.thread, request.label)
    if request.metadata:
        return about + json.dumps(request.metadata).encode()
    return about


@lru_cache(maxsize=256)
def _about(host: str, pid: int, thread: str, label: str) -> bytes:
    return (_BETWEEN.join((host, str(pid), thread, label)) + _BETWEEN).encode()


def _known(text: bytes) -> dict[str, Any]:
    about = text.partition(b"\n")[0] or b"\t0\t\t\t"
    host, pid, thread, label, metadata = about.decode().split(_BETWEEN, 4)
    return {
        "host": host,
        "pid": int(pid),
        "thread": thread,
        "label": label,
        "metadata": json.loads(metadata) if metadata else {},
    }


def holder(fields: Sequence[bytes], now: int) -> Holder:
    """A holder, from what a script tells: see told() in claims.lua."""
    key, owner, expiry, token, acquired, state, mode, text = fields
    return Holder(
        key=key.decode(),
        owner_id="" if state == b"C" else owner.decode(),
        fencing_token=int(token),
        since=from_us(int(acquired)),
        remaining=(int(expiry) - now) / MICROSECOND,
        mode=MODE[mode],
        **_known(text),
    )


def split(key: bytes, record: bytes) -> tuple[bytes, ...]:
    """The fields of a record of one claim: see common.lua, and redlock.lua of the tab."""
    owner, _, text = record[49:].partition(b"\n")
    owner = owner.partition(b"\t")[0]
    return (key, owner, record[:16], record[16:32], record[32:48], record[48:49], b"E", text)


def is_live(record: bytes, now: int) -> bool:
    """Whether a record says that somebody has its key."""
    return record[48:49] != b"F" and int(record[:16]) > now


def waiter(key: Key, owner: bytes, asked: float, record: bytes) -> Waiter:
    """A waiter, from its place in a queue."""
    head, _, text = record.partition(b"\n")
    return Waiter(
        key=key,
        owner_id=owner.decode(),
        since=from_us(int(asked)),
        mode=MODE[head[16:17]],
        **_known(text),
    )
