"""What the states of the Redlock model are made of, and how they change piece by piece."""

from collections.abc import Iterable, Sequence
from itertools import pairwise, permutations
from typing import Any, NamedTuple

from tests.model.values import put, without

# How far an attempt has come.
ASKING, RAISING, HOLDING, EXTENDING = "asking", "raising", "holding", "extending"

# Whether a node keeps the key of an attempt. LOOSE: it may expire before the attempt's deadline.
NONE, LOOSE, FIRM = 0, 1, 2


class Slot(NamedTuple):
    """What is between one node and one attempt."""

    key: int
    # How often the request may still be executed.
    copies: int
    # Of an attempt that is asking, the answer; otherwise, whether the node counts: 0 or 1.
    said: int


class Node(NamedTuple):
    ahead: int
    last: int
    # When its quarantine ends, by its own clock; 0 if it is in none.
    shut_until: int
    slots: tuple[Slot, ...]


class Attempt(NamedTuple):
    # In the order of their beginnings; only labels tell.
    name: int
    phase: str
    proposal: int
    # What it raises the nodes to.
    token: int
    # When it began, or began the extension by which it holds the key; and the one under way.
    since: int
    asked: int


class State(NamedTuple):
    now: int
    # The highest token so far; and one that was admitted after one as high, 0 if there is none.
    highest: int
    late: int
    begun: int
    faults_left: int
    # Those that have begun and not ended, and the nodes with a slot for each of them.
    attempts: tuple[Attempt, ...]
    nodes: tuple[Node, ...]


def with_attempt(state: State, who: int, one: Attempt) -> State:
    return state._replace(attempts=put(state.attempts, who, one))


def with_node(state: State, number: int, node: Node) -> State:
    return state._replace(nodes=put(state.nodes, number, node))


def with_said(state: State, who: int, said: list[int]) -> State:
    nodes = [
        node._replace(slots=put(node.slots, who, node.slots[who]._replace(said=each)))
        for node, each in zip(state.nodes, said, strict=True)
    ]
    return state._replace(nodes=tuple(nodes))


def loosened(state: State, who: int) -> State:
    """After an extension: only the nodes that counted keep the key until the new deadline."""
    nodes = []
    for node in state.nodes:
        slot = node.slots[who]
        if slot.key == FIRM and not slot.said:
            node = node._replace(slots=put(node.slots, who, slot._replace(key=LOOSE)))
        nodes.append(node)
    return state._replace(nodes=tuple(nodes))


def count(state: State, who: int) -> int:
    return sum(node.slots[who].said for node in state.nodes)


def ended(state: State, who: int) -> State:
    nodes = [node._replace(slots=without(node.slots, who)) for node in state.nodes]
    return state._replace(attempts=without(state.attempts, who), nodes=tuple(nodes))


def canonical(state: State) -> tuple[Any, ...]:
    """The same for states that differ only in the order of the nodes or in that of the attempts."""
    heads = [one[1:] for one in state.attempts]
    order = sorted(range(len(heads)), key=heads.__getitem__)
    in_order = [heads[who] for who in order]
    orders: Iterable[Sequence[int]] = [order]
    if any(head == after for head, after in pairwise(in_order)):
        orders = [each for each in permutations(order) if [heads[who] for who in each] == in_order]
    return (*state[:5], tuple(in_order), min([_columns(state, each) for each in orders]))


def _columns(state: State, order: Sequence[int]) -> tuple[tuple[Any, ...], ...]:
    """The nodes in an order of their own, with the attempts in that order."""
    columns: list[tuple[Any, ...]] = [
        (node.ahead, node.last, node.shut_until, *[node.slots[who] for who in order])
        for node in state.nodes
    ]
    return tuple(sorted(columns))
