"""Rounds, medians and ratios."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Contender = Callable[[], float]


@dataclass
class Target:
    """What a figure should be at most, or at least."""

    what: str
    figure: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit


@dataclass
class Result:
    """What one benchmark has found."""

    name: str
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]]
    # For the file of figures.
    figures: dict[str, Any]
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def interleaved(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
    """What each contender has measured in each round. The order moves on by one each round."""
    names = list(contenders)
    measured: dict[str, list[float]] = {name: [] for name in names}
    for contender in contenders.values():
        contender()
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            measured[name].append(contenders[name]())
    return measured


def ratios(measured: Sequence[float], base: Sequence[float]) -> list[float]:
    """Each round's ratio."""
    return [one / other for one, other in zip(measured, base, strict=True)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]


def spread(values: Sequence[float]) -> str:
    """The median, and between what the middle half lies."""
    middle = f"{median(values):.2f}"
    if len(values) < 4:
        return middle
    low, _, high = statistics.quantiles(values, n=4)
    return f"{middle} ({low:.2f} to {high:.2f})"
