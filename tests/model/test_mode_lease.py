"""The fast path's protocol, searched through: safe with all its rules, and unsafe without any.

`pytest tests/model -rP` shows each verdict with its states, and each counter-example step by step.
"""

from collections.abc import Callable, Hashable
from dataclasses import fields

import pytest

from tests.model.alike import Alike
from tests.model.explorer import Report, as_it_is, explore
from tests.model.mode_lease import (
    CLOSING,
    DATABASE,
    DRAIN,
    GONE,
    INSTANCES,
    REDIS,
    Bounds,
    ModeLease,
    Rules,
    State,
    violation,
)
from tests.model.verdicts import Tell, assert_can_be_walked, name_of

Goal = Callable[[State], bool]

LIMIT = 100_000
LIMIT_OF_LONG_RUNS = 2_000_000

# The smallest worlds in which the rules about late answers matter: T = 1 and W = 1.
LATE = Bounds(mode_ticks=1, lease_ticks=1, answers_late=True)

# With the number of their states: if the model lost some, its proofs would be worth less. In none
# of them is there a bound on faults, on changes of the authority or on time.
WORLDS = [
    (Bounds(), 4018),
    (Bounds(mode_ticks=1, lease_ticks=3), 4212),
    (Bounds(mode_ticks=3, lease_ticks=1), 1633),
    (Bounds(attempts=3, opens=3), 8633),
    (Bounds(processes=3, mode_ticks=1), 3860),
    (LATE, 14128),
]
LARGE_WORLDS = [
    (Bounds(mode_ticks=3, lease_ticks=3), 24109),
    (Bounds(mode_ticks=2, lease_ticks=4), 26051),
    (Bounds(mode_ticks=4, lease_ticks=2), 15129),
    (Bounds(processes=3, attempts=3, opens=3), 34987),
    (Bounds(mode_ticks=1, answers_late=True), 45170),
    (Bounds(lease_ticks=1, answers_late=True), 53408),
    (Bounds(answers_late=True), 178743),
    (Bounds(processes=3, mode_ticks=1, lease_ticks=1, answers_late=True), 159862),
]

# What is left out, in which world, and the length of a shortest way to two holders.
BROKEN = [
    (("row_decides",), Bounds(), 4),
    (("age_from_before_read",), LATE, 11),
    (("knowledge_ages",), Bounds(), 9),
    (("epoch_checked",), Bounds(), 17),
    (("incarnation_checked",), Bounds(), 7),
    (("copying_ends_incarnation",), Bounds(), 8),
    (("deadline_from_before_send",), LATE, 10),
    (("release_is_final",), LATE, 10),
    (("drain_first",), Bounds(), 5),
    (("drain_covers_leases",), Bounds(), 8),
    (("grant_checks_row",), LATE, 17),
    (("closing_grants_nothing",), Bounds(), 15),
    (("leases_end_first",), Bounds(), 15),
    (("epoch_per_attempt",), Bounds(), 21),
    (("nonce_needed",), Bounds(), 17),
    (("nonce_sent_once",), Bounds(), 19),
    (("nonce_ends_with_incarnation",), Bounds(), 19),
    # The two stand in for each other.
    (("closing_raises_epoch", "breaking_off_raises_epoch"), Bounds(), 17),
]


def without(*names: str) -> Rules:
    return Rules(**dict.fromkeys(names, False))


def search(
    model: ModeLease,
    wrong: Callable[[State], str] = violation,
    *,
    start: State | None = None,
    canonical: Callable[[State], Hashable] | None = None,
    limit: int = LIMIT,
) -> Report[State]:
    return explore(
        start or model.initial(),
        model.successors,
        wrong,
        canonical=canonical or Alike(model).form,
        limit=limit,
    )


@pytest.mark.parametrize(("bounds", "states"), WORLDS, ids=name_of)
def test_with_all_rules_no_two_ever_have_the_key(bounds: Bounds, states: int, tell: Tell) -> None:
    report = search(ModeLease(Rules(), bounds))
    tell(report)
    assert not report.violation, report
    assert report.states == states


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("bounds", "states"), LARGE_WORLDS, ids=name_of)
def test_with_all_rules_no_two_ever_have_the_key_in_larger_worlds(
    bounds: Bounds, states: int, tell: Tell
) -> None:
    report = search(ModeLease(Rules(), bounds), limit=LIMIT_OF_LONG_RUNS)
    tell(report)
    assert not report.violation, report
    assert report.states == states


@pytest.mark.parametrize(("names", "bounds", "steps"), BROKEN, ids=name_of)
def test_without_a_rule_two_have_the_key(
    names: tuple[str, ...], bounds: Bounds, steps: int, tell: Tell
) -> None:
    model = ModeLease(without(*names), bounds)
    report = search(model)
    tell(report)
    assert report.violation
    assert len(report.trace) == steps, report
    assert_can_be_walked(report, model.initial(), model.successors, violation)


def test_each_rule_is_left_out_once() -> None:
    assert sorted(name for names, _, _ in BROKEN for name in names) == sorted(
        field.name for field in fields(Rules)
    )


@pytest.mark.parametrize("name", ["closing_raises_epoch", "breaking_off_raises_epoch"])
def test_it_is_enough_to_raise_the_epoch_at_one_end_of_the_closing(name: str, tell: Tell) -> None:
    report = search(ModeLease(without(name), Bounds(mode_ticks=1)))
    tell(report)
    assert not report.violation, report


def test_an_open_that_is_executed_once_may_find_an_old_nonce(tell: Tell) -> None:
    """Only its being sent again makes that dangerous."""
    for name in ("nonce_ends_with_incarnation", "nonce_sent_once"):
        report = search(ModeLease(without(name), Bounds(mode_ticks=1, lease_ticks=1, opens=1)))
        tell(report)
        assert not report.violation, report


@pytest.mark.parametrize(
    "bounds", [Bounds(), Bounds(mode_ticks=1), Bounds(lease_ticks=1)], ids=name_of
)
def test_a_drain_one_tick_shorter_is_too_short(bounds: Bounds, tell: Tell) -> None:
    model = ModeLease(Rules(), bounds)
    model.drain_ticks -= 1
    report = search(model)
    tell(report)
    assert report.violation


def all_forms(
    model: ModeLease, canonical: Callable[[State], Hashable]
) -> tuple[set[Hashable], int]:
    """The canonical forms of all states that a search meets, and how many states these were."""
    form = Alike(model).form
    forms: set[Hashable] = set()

    def note(state: State) -> str:
        forms.add(form(state))
        return ""

    report = search(model, note, canonical=canonical, limit=LIMIT_OF_LONG_RUNS)
    return forms, report.states


@pytest.mark.parametrize(
    ("rules", "bounds"),
    [
        (Rules(), Bounds(mode_ticks=1, lease_ticks=1, epochs=8, faults=0)),
        (Rules(), Bounds(mode_ticks=1, lease_ticks=1, epochs=5, faults=1)),
        (Rules(), Bounds(mode_ticks=1, lease_ticks=2, epochs=5, faults=0)),
        (Rules(), Bounds(mode_ticks=1, lease_ticks=1, epochs=4, faults=0, answers_late=True)),
        (without("closing_raises_epoch"), Bounds(mode_ticks=1, lease_ticks=1, epochs=5, faults=0)),
        (
            without("nonce_ends_with_incarnation"),
            Bounds(mode_ticks=1, lease_ticks=1, opens=1, epochs=4, faults=1),
        ),
        pytest.param(Rules(), Bounds(epochs=5, faults=1), marks=pytest.mark.soak),
        pytest.param(
            Rules(),
            Bounds(mode_ticks=1, lease_ticks=1, epochs=5, faults=0, answers_late=True),
            marks=pytest.mark.soak,
        ),
    ],
    ids=name_of,
)
def test_nothing_is_lost_by_visiting_one_of_the_states_that_are_alike(
    rules: Rules, bounds: Bounds
) -> None:
    """What a search meets that takes every difference for one is what the short search meets."""
    model = ModeLease(rules, bounds)
    forms, states = all_forms(model, Alike(model).form)
    forms_of_all, all_states = all_forms(model, as_it_is)
    assert forms == forms_of_all
    assert len(forms) == states < all_states


def held_by(who: int, phase: str) -> Goal:
    """This one alone has the key, in that phase."""
    return lambda s: (
        s.row.phase == phase and [n for n, one in enumerate(s.processes) if one.held] == [who]
    )


def reached(title: str, goal: Goal) -> Callable[[State], str]:
    return lambda state: title if goal(state) else ""


def is_open(state: State, number: int) -> bool:
    return state.instances[number].incarnation == number


# One after the other, from where the one before has led.
STORY: list[tuple[str, Goal]] = [
    ("one has the key by Redis", held_by(0, REDIS)),
    ("then the other has it", held_by(1, REDIS)),
    (
        "who still has it in the last tick of the drain",
        lambda s: held_by(1, DRAIN)(s) and s.row.drain_left == 1,
    ),
    ("the first has it by the database", held_by(0, DATABASE)),
    ("then the other", held_by(1, DATABASE)),
    (
        "who has it in the last tick while the database closes",
        lambda s: held_by(1, CLOSING)(s) and s.processes[1].held == 1,
    ),
    (
        "and extends it",
        lambda s: held_by(1, CLOSING)(s) and s.processes[1].held > 1,
    ),
    (
        "both instances are open, one for an epoch of the past",
        lambda s: (
            s.row.phase == CLOSING
            and all(is_open(s, number) for number in INSTANCES)
            and s.instances[0].epoch < s.instances[1].epoch == s.row.epoch
        ),
    ),
    ("the way back is broken off, and the database grants again", held_by(0, DATABASE)),
    ("Redis takes over again, and grants", held_by(1, REDIS)),
    (
        "an OPEN is still on its way, and will find no nonce",
        lambda s: (
            held_by(1, REDIS)(s)
            and any(one.opens_left and one.opened and GONE in one.nonces for one in s.attempts)
        ),
    ),
    (
        "Redis forgets everything, while the lease lives on",
        lambda s: held_by(1, REDIS)(s) and not any(is_open(s, number) for number in INSTANCES),
    ),
    ("and the database takes over once more", held_by(0, DATABASE)),
]


def test_what_should_happen_can_happen(tell: Tell) -> None:
    """Locks that nobody ever gets are safe, too.

    The names of the processes matter here: no states are alike.
    """
    model = ModeLease(Rules(), Bounds())
    state = model.initial()
    for title, goal in STORY:
        report = search(model, reached(title, goal), start=state, canonical=as_it_is)
        tell(report)
        assert report.violation == title
        state = report.trace[-1].state if report.trace else state


def test_a_request_may_be_executed_when_nobody_wants_it_any_more(tell: Tell) -> None:
    def haunted(state: State) -> bool:
        """Redis keeps the key, though it lost the authority so long ago that nobody believes it."""
        kept = any(one.kept[number] for one in state.processes for number in INSTANCES)
        return state.row.phase == DATABASE and kept

    report = search(ModeLease(Rules(), LATE), reached("a lock of nobody's", haunted))
    tell(report)
    assert report.violation
