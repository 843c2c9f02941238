"""What is said on a connection to Redis: requests packed, replies unpacked. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# What a reply is: bytes, int, None, a list of replies, or the server's error.
Reply = Any


class ReplyError(Exception):
    """The server's answer is an error: its code ("NOSCRIPT", "MOVED") and what it says."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class Incomplete(Exception):
    """More of the reply is to come."""


def pack(*words: bytes) -> bytes:
    """A command."""
    return b"*%d\r\n%b" % (len(words), packed(words))


def packed(words: Iterable[bytes]) -> bytes:
    """Words of a command, without its head."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def unpack(data: bytes | bytearray, start: int = 0) -> tuple[Reply, int]:
    """The reply that begins at `start`, and where it ends; Incomplete if it does not end here.

    Knows RESP 2 and 3. An error inside a list is an element of it, a ReplyError.
    """
    end = data.find(b"\r\n", start)
    if end < 0:
        raise Incomplete
    kind, text, after = data[start], data[start + 1 : end], end + 2
    if kind == 43:  # +
        return bytes(text), after
    if kind == 58:  # :
        return int(text), after
    if kind in (36, 61, 33):  # $ = !
        size = int(text)
        if size < 0:
            return None, after
        if len(data) < after + size + 2:
            raise Incomplete
        found = bytes(data[after : after + size])
        if kind == 33:
            return ReplyError(found.decode(errors="replace")), after + size + 2
        return found, after + size + 2
    if kind in (42, 126, 62, 37):  # * ~ > %
        count = int(text)
        if count < 0:
            return None, after
        items = []
        for _ in range(count * 2 if kind == 37 else count):
            item, after = unpack(data, after)
            items.append(item)
        if kind == 62:
            # Pushed by the server at its own will: none that we have asked for.
            return unpack(data, after)
        return items, after
    if kind == 45:  # -
        return ReplyError(text.decode(errors="replace")), after
    if kind == 95:  # _
        return None, after
    if kind == 35:  # #
        return int(text == b"t"), after
    if kind == 44:  # ,
        return bytes(text), after
    raise ReplyError(f"PROTOCOL unknown reply {bytes(data[start : start + 40])!r}")
