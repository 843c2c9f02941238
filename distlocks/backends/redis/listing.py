"""Who has keys and who waits for them, as the servers know it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...claims import MICROSECOND
from .records import is_live, split
from .scripts import script
from .server import Servers
from .wire import pack, packed

# So many fields are looked at by one request.
PAGE = 500


def holders_in(
    servers: Servers, hash_name: bytes, prefix: bytes
) -> Iterator[tuple[Sequence[bytes], int]]:
    """The holders of a hash's keys that begin with `prefix`, in no order: their fields (see told()
    in claims.lua), and the time by the server's clock in microseconds."""
    cursor, several = b"0", []
    seen: set[bytes] = set()
    pattern = re.sub(rb"([*?\[\]^\\])", rb"\\\1", prefix) + b"*"
    while True:
        now = _now(servers, hash_name)
        cursor, page = servers.ask(
            hash_name,
            pack(b"HSCAN", hash_name, cursor, b"MATCH", pattern, b"COUNT", b"%d" % PAGE),
        )
        for key, record in zip(page[::2], page[1::2], strict=True):
            if key in seen or key[:1] == b"\x01":
                continue
            seen.add(key)
            if record[48:49] == b"S":
                several.append(key)
            elif is_live(record, now):
                yield split(key, record), now
        if cursor == b"0":
            break
    if several:
        told_at, told, _ = servers.run(hash_name, script("find"), len(several), packed(several))
        for fields in told:
            yield fields, int(told_at)


def holder_in(servers: Servers, hash_name: bytes, key: bytes) -> tuple[Sequence[bytes], int] | None:
    """As holders_in(), of one key that only one can have."""
    record = servers.ask(hash_name, pack(b"HGET", hash_name, key))
    now = _now(servers, hash_name)
    return (split(key, record), now) if record and is_live(record, now) else None


def queue_of(servers: Servers, key: str) -> list[tuple[bytes, float, bytes]]:
    """Who waits for the key, first come first: owner id, since when in microseconds, and its
    record (see common.lua)."""
    name, hash_name = key.encode(), servers.hash_name(key)
    queue = servers.ask(
        hash_name, pack(b"ZRANGE", hash_name + b":q:" + name, b"0", b"-1", b"WITHSCORES")
    )
    details = servers.ask(hash_name, pack(b"HGETALL", hash_name + b":w:" + name))
    known = dict(zip(details[::2], details[1::2], strict=True))
    now = _now(servers, hash_name)
    return [
        (owner, float(asked), known[owner])
        for owner, asked in zip(queue[::2], queue[1::2], strict=True)
        if owner in known and int(known[owner][:16]) >= now
    ]


def _now(servers: Servers, hash_name: bytes) -> int:
    """Microseconds, by the server's clock."""
    seconds, us = servers.ask(hash_name, pack(b"TIME"))
    return int(seconds) * MICROSECOND + int(us)
