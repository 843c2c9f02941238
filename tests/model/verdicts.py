"""What the tests of all models do with the verdict of a search, and how they name its world."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import is_dataclass
from typing import Protocol, TypeVar

from tests.model.explorer import Report

S = TypeVar("S", bound=Hashable)


class Tell(Protocol):
    """Keeps a verdict: in the test's output, and in its properties."""

    def __call__(self, report: Report[S]) -> None: ...


def name_of(value: object) -> str | None:
    """What a test's name says of a parameter: what is not as usual."""
    if isinstance(value, tuple):
        return "-and-".join(map(str, value))
    if is_dataclass(value) and not isinstance(value, type):
        usual, these = vars(type(value)()), vars(value)
        unusual = [f"{name}={these[name]}" for name in these if these[name] != usual[name]]
        return "-".join(unusual) or "usual"
    return None


def assert_can_be_walked(
    report: Report[S],
    initial: S,
    successors: Callable[[S], Iterable[tuple[str, S]]],
    violation: Callable[[S], str],
) -> None:
    """The trace leads to a violation from the beginning, by the names of all concerned."""
    state = initial
    for step in report.trace:
        assert (step.label, step.state) in list(successors(state))
        assert not violation(state)
        state = step.state
    assert violation(state)
