"""What clients ask of the server, seen by the server."""

import re
from collections import Counter
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from benchmarks.environment import Environment

# +1733000000.123456 [0 127.0.0.1:50000] "evalsha" "…"
LINE = re.compile(rb'([\d.]+) \[\d+ (.*?)\] (".*")')
WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')


class Requests:
    """A block in which each request is noted: one round trip each. What scripts call is none."""

    def __init__(self, env: Environment) -> None:
        self._client = env.redis
        self.mark = uuid4().hex.encode()

    def __enter__(self) -> Self:
        self._connection = self._client.connection_pool.get_connection()
        # What opens the other connection is not to be seen.
        self._client.ping()
        self._connection.send_command("MONITOR")
        assert self._connection.read_response() in (b"OK", "OK")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.disconnect()
        self._client.connection_pool.release(self._connection)

    def take(self) -> list[tuple[float, list[bytes]]]:
        """The requests since the block began, or since the last call, and when they came."""
        self._client.echo(self.mark)
        found = []
        while True:
            when, who, words = self._next()
            if words[-1] == self.mark:
                return found
            if who != b"lua":
                found.append((when, words))

    def counted(self) -> Counter[str]:
        """How many there were of each command."""
        return Counter(words[0].decode().upper() for _, words in self.take())

    def _next(self) -> tuple[float, bytes, list[bytes]]:
        line: Any = self._connection.read_response(disable_decoding=True)
        match = LINE.fullmatch(line)
        assert match, line
        return float(match[1]), match[2], [_plain(word) for word in WORD.findall(match[3])]


def _plain(word: bytes) -> bytes:
    """Without the escapes with which MONITOR shows it."""
    if b"\\" not in word:
        return word
    return word.decode("unicode_escape").encode("latin-1")


def told(counts: Counter[str], times: float) -> str:
    """How many of each there were each time."""
    shares = {name: count / times for name, count in counts.most_common(5)}
    return ", ".join(f"{name} {shown(n)}" for name, n in shares.items() if n >= 0.005)


def shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
