"""Visits every state that a model can reach, nearest first, until one breaks its promise.

A model is three functions: where it begins, which steps lead on from a state, and what is wrong
with a state ("" if nothing is). States are hashable values. Nothing is drawn at random and nothing
is left out: a search that ends without a violation has seen all there is.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


class TooManyStates(Exception):
    """The search was not finished, so it has proved nothing."""


@dataclass(frozen=True)
class Step(Generic[S]):
    """One step of a trace, and the state it led to."""

    label: str
    state: S


@dataclass(frozen=True)
class Report(Generic[S]):
    """What a search has found, and in how many states."""

    states: int
    # Steps from the beginning to the state farthest from it.
    depth: int
    # What is wrong, "" if no state is; and a shortest way there.
    violation: str = ""
    trace: tuple[Step[S], ...] = ()

    def labels(self) -> list[str]:
        return [step.label for step in self.trace]

    def __str__(self) -> str:
        found = self.violation or "no violation"
        head = f"{found}: {self.states} states, {self.depth} steps deep"
        return "\n".join([head, *(f"{n:4} {label}" for n, label in enumerate(self.labels(), 1))])


def as_it_is(state: S) -> S:
    """The canonical form where no two states are alike."""
    return state


class _Search(Generic[S]):
    """The states met so far, each with the step by which it was met first."""

    def __init__(self, canonical: Callable[[S], Hashable], limit: int) -> None:
        self.canonical = canonical
        self.limit = limit
        self.seen: set[Hashable] = set()
        self.states: list[S] = []
        self.came_from: list[tuple[int, str]] = []

    def meet(self, state: S, parent: int, label: str) -> bool:
        """Whether the state, or its equal, is met for the first time."""
        before = len(self.seen)
        self.seen.add(self.canonical(state))
        if len(self.seen) == before:
            return False
        if before == self.limit:
            raise TooManyStates(f"more than {self.limit}")
        self.states.append(state)
        self.came_from.append((parent, label))
        return True

    def way_to(self, index: int) -> Iterator[Step[S]]:
        """The steps that led to a state, last first."""
        while index:
            parent, label = self.came_from[index]
            yield Step(label, self.states[index])
            index = parent

    def trace(self) -> tuple[Step[S], ...]:
        """A shortest way to the state met last."""
        return tuple(self.way_to(len(self.states) - 1))[::-1]


def explore(
    initial: S,
    successors: Callable[[S], Iterable[tuple[str, S]]],
    violation: Callable[[S], str],
    *,
    canonical: Callable[[S], Hashable] = as_it_is,
    limit: int,
) -> Report[S]:
    """Search breadth first from `initial`; end at the first violation or when nothing is new.

    States with equal `canonical` forms count as one; the model vouches that they have the same
    future. The trace is made of the states themselves, so its labels mean what they say. More than
    `limit` states raise `TooManyStates`.
    """
    search = _Search(canonical, limit)
    search.meet(initial, 0, "")
    wrong = violation(initial)
    depth, index, level_ends = 0, 0, 1
    while index < len(search.states) and not wrong:
        if index == level_ends:
            depth, level_ends = depth + 1, len(search.states)
        for label, state in successors(search.states[index]):
            if search.meet(state, index, label) and (wrong := violation(state)):
                break
        index += 1
    trace = search.trace() if wrong else ()
    return Report(len(search.states), len(trace) if wrong else depth, wrong, trace)
