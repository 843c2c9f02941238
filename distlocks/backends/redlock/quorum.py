"""What a number of answers comes to, of nodes of which a majority decides. Pure.

The algorithm is Redlock (Redis documentation, "Distributed Locks with Redis"); the tokens are an
addition, searched through in tests/model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from enum import Enum, auto
from typing import TypeVar

H = TypeVar("H", bound=Hashable)


class Outcome(Enum):
    """What the answers so far come to."""

    # More answers may change it.
    OPEN = auto()
    # A majority has put on the key just what was proposed.
    GRANTED = auto()
    # A majority has taken the key, and a common token must be agreed upon.
    TO_BE_RAISED = auto()
    # No majority can take the key any more.
    REFUSED = auto()


def majority(nodes: int) -> int:
    """How many of so many nodes any two majorities have one in common of."""
    return nodes // 2 + 1


def outcome(nodes: int, proposal: int, values: Collection[int], refusals: int) -> Outcome:
    """Of a request to take a key.

    `values` are what those nodes have put on it that took it; `refusals` of the others have
    refused, or will not answer.

    A token is what a majority has put on the key at once. The highest of different values is no
    token: a later holder may meet a majority whose values are all lower.
    """
    wanted = majority(nodes)
    exact = sum(value == proposal for value in values)
    outstanding = nodes - len(values) - refusals
    if exact >= wanted:
        return Outcome.GRANTED
    if len(values) + outstanding < wanted:
        return Outcome.REFUSED
    if len(values) >= wanted and exact + outstanding < wanted:
        return Outcome.TO_BE_RAISED
    return Outcome.OPEN


def verdict(nodes: int, yes: int, no: int) -> bool | None:
    """Whether a majority says yes; None while more answers may decide it.

    A node that does not answer is neither.
    """
    if yes >= majority(nodes):
        return True
    if no > nodes - majority(nodes):
        return False
    return None


def free_in(nodes: int, lefts: Iterable[float]) -> float:
    """Seconds until a majority is free, from those until each is that has answered."""
    known = sorted(lefts)
    wanted = majority(nodes)
    return known[wanted - 1] if len(known) >= wanted else float("inf")


def most_common(values: Iterable[H]) -> tuple[H, int]:
    """The value that is named most often, and how often."""
    return Counter(values).most_common(1)[0]


def median(values: Sequence[float]) -> float:
    """The one in the middle; of two, the lower. Right while fewer than half of them are wrong."""
    return sorted(values)[(len(values) - 1) // 2]
