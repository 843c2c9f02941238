"""The explorer sees every state once, finds the nearest violation, and never just gives up."""

from collections.abc import Hashable, Iterator

import pytest

from tests.model.explorer import TooManyStates, explore

Jugs = tuple[int, int]
SMALL, LARGE = 3, 5


def pour(jugs: Jugs) -> Iterator[tuple[str, Jugs]]:
    """The puzzle of measuring four litres with jugs of three and of five."""
    small, large = jugs
    yield "fill the small one", (SMALL, large)
    yield "fill the large one", (small, LARGE)
    yield "empty the small one", (0, large)
    yield "empty the large one", (small, 0)
    to_large = min(small, LARGE - large)
    yield "pour into the large one", (small - to_large, large + to_large)
    to_small = min(large, SMALL - small)
    yield "pour into the small one", (small + to_small, large - to_small)


def holds(litres: int, jugs: Jugs) -> str:
    return f"{litres} litres" if litres in jugs else ""


def test_a_search_without_a_violation_has_seen_every_state_once() -> None:
    met: list[Jugs] = []

    def note(jugs: Jugs) -> str:
        met.append(jugs)
        return ""

    report = explore((0, 0), pour, note, limit=16)
    assert sorted(met) == sorted(set(met))
    # All but those in which neither jug is full or empty.
    assert len(met) == report.states == (SMALL + 1) * (LARGE + 1) - (SMALL - 1) * (LARGE - 1)
    assert not report.violation
    assert not report.trace


def test_the_trace_is_a_shortest_way_to_the_violation() -> None:
    report = explore((0, 0), pour, lambda jugs: holds(4, jugs), limit=16)
    assert report.violation == "4 litres"
    assert report.labels() == [
        "fill the large one",
        "pour into the small one",
        "empty the small one",
        "pour into the small one",
        "fill the large one",
        "pour into the small one",
    ]
    assert report.depth == len(report.trace)
    assert report.trace[-1].state == (3, 4)
    assert "6 pour into the small one" in str(report)


def test_each_step_of_a_trace_follows_from_the_one_before() -> None:
    report = explore((0, 0), pour, lambda jugs: holds(4, jugs), limit=16)
    before = (0, 0)
    for step in report.trace:
        assert (step.label, step.state) in list(pour(before))
        before = step.state


def test_a_violation_at_the_beginning_needs_no_steps() -> None:
    report = explore((0, 4), pour, lambda jugs: holds(4, jugs), limit=16)
    assert (report.violation, report.states, report.trace) == ("4 litres", 1, ())


def test_a_search_that_would_have_to_leave_states_out_fails() -> None:
    with pytest.raises(TooManyStates):
        explore((0, 0), pour, lambda jugs: "", limit=15)


def test_states_that_are_alike_count_as_one() -> None:
    def step(pair: Jugs) -> Iterator[tuple[str, Jugs]]:
        yield "first", ((pair[0] + 1) % 3, pair[1])
        yield "second", (pair[0], (pair[1] + 1) % 3)

    def unordered(pair: Jugs) -> Hashable:
        return tuple(sorted(pair))

    every = explore((0, 0), step, lambda pair: "", limit=9)
    fewer = explore((0, 0), step, lambda pair: "", canonical=unordered, limit=9)
    assert (every.states, fewer.states) == (9, 6)
