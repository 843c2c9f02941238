"""What a change of authority asks of Redis: is it healthy, and may it begin an epoch."""

from __future__ import annotations

import secrets

from ... import clock
from ...exceptions import BackendUnavailable
from ..redis import RedisBackend
from ..redis.scripts import script
from ..redis.wire import packed


def epoch_word(epoch: int) -> bytes:
    """What scripts are told of the epoch in which they are asked."""
    return b"e%d" % epoch


class Servers:
    """The servers of a fast path's Redis half."""

    def __init__(self, redis: RedisBackend) -> None:
        self._redis = redis

    @property
    def buckets(self) -> int:
        """How many have to be opened."""
        return len(self._redis.servers.hashes)

    def look(self) -> tuple[float, int]:
        """Write to each server; how far its clock is ahead of the lease clock at most (seconds),
        and the latest epoch that any bucket there has seen.

        Raises BackendUnavailable.
        """
        return self._mark(b"h", b"%d" % (clock.lease_now() * 1000), self._one_of_each())

    def open(self, epoch: int, highest_token: int) -> int:
        """Have every bucket begin the epoch with nothing held; 0, or the later epoch that one of
        them has seen.

        Nothing is sent twice: a nonce that arrives when it has been used would let its opening
        take effect again. Raises BackendUnavailable: then only a later epoch may be tried.
        """
        nonce = secrets.token_hex(16).encode()
        hashes = self._redis.servers.hashes
        self._mark(b"n", nonce, hashes)
        words = packed((epoch_word(epoch), nonce, b"%d" % highest_token))
        for hash_name in hashes:
            reply = self._redis.servers.run_once(hash_name, script("open"), 3, words)
            if reply == b"N":
                raise BackendUnavailable("Another process is opening Redis for the locks.")
            if reply != b"O":
                return int(reply[1:])
        return 0

    def _mark(self, field: bytes, mark: bytes, hashes: list[bytes]) -> tuple[float, int]:
        ahead, latest = float("-inf"), 0
        words = packed((field, mark))
        for hash_name in hashes:
            before = clock.lease_now()
            now_us, epoch = self._redis.servers.run_once(hash_name, script("mark"), 2, words)
            ahead = max(ahead, int(now_us) / 1_000_000 - (before + clock.lease_now()) / 2)
            latest = max(latest, int(epoch[1:] or 0))
        return ahead, latest

    def _one_of_each(self) -> list[bytes]:
        """A bucket of each server."""
        servers = self._redis.servers
        return list({servers.address(name): name for name in servers.hashes}.values())
