"""The backend broken on purpose: called in a worker before it has used it."""

from distlocks.backends.zookeeper.records import Held
from distlocks.backends.zookeeper.table import Judge


def believes_too_soon() -> None:
    """Takes a claim for over when it has seen it for a third of its time."""
    really_left = Judge.left_us

    def left_us(self: Judge, found: Held, now_us: int) -> int:
        return really_left(self, found, now_us) - found.ttl_us * 2 // 3

    Judge.left_us = left_us  # type: ignore[method-assign]
