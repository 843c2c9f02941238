"""Redlock's grants and tokens, searched through: safe with all its rules, and unsafe without any.

`pytest tests/model -rP` shows each verdict with its states, and each counter-example step by step.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, replace

import pytest

from tests.model.explorer import Report, as_it_is, explore
from tests.model.redlock_state import FIRM, HOLDING, NONE, State, canonical
from tests.model.redlock_tokens import Bounds, RedlockTokens, Rules, violation
from tests.model.values import put
from tests.model.verdicts import Tell, assert_can_be_walked, name_of

Goal = Callable[[State], bool]

LIMIT = 100_000
LIMIT_OF_LONG_RUNS = 4_000_000

# A node fails early enough that its quarantine ends: in one of two ticks.
FAULT = Bounds(faults=1, lasts=(0, 0, 0), begin=1, end=4, proposals=4)
# The same where clocks differ: a node far ahead has given the highest value that there may be.
SKEWED = Bounds(faults=1, lasts=(0, 0, 2), begin=1, end=5, proposals=4, skew=1, ahead=(0, 0, 1))
HASTY = replace(FAULT, lasts=(1, 0, 0), end=3, proposals=3, attempts=3, hasty=True)

# With the number of their states: if the model lost some, its proofs would be worth less.
WORLDS = [
    (Bounds(), 835),
    (Bounds(attempts=3), 3922),
    (Bounds(attempts=4, lasts=(1, 0, 0), proposals=2), 4205),
    (Bounds(lasts=(2, 1, 0), proposals=4), 1410),
    (Bounds(extends=True, copies=2), 11771),
    (Bounds(lasts=(0, 0), ahead=(0, 0), attempts=3), 463),
    (Bounds(lasts=(2, 1, 0, 0), ahead=(0, 0, 0, 0)), 1484),
    (Bounds(lasts=(2, 0, 0, 0, 0), ahead=(0, 0, 0, 0, 0)), 4501),
    (FAULT, 3656),
    (replace(FAULT, extends=True, proposals=2), 6671),
    (replace(FAULT, faults=2, proposals=2), 7502),
    (SKEWED, 13490),
]
LARGE_WORLDS = [
    (Bounds(attempts=5), 28984),
    (Bounds(attempts=4, lasts=(4, 2, 0), proposals=6), 72252),
    (Bounds(attempts=4, extends=True), 18663),
    (Bounds(attempts=3, lasts=(2, 1, 0), proposals=4, extends=True, copies=2), 81245),
    (Bounds(attempts=3, lasts=(2, 1, 0, 0, 0), ahead=(0, 0, 0, 0, 0)), 44200),
    (replace(FAULT, attempts=3, end=5, extends=True), 67268),
    (replace(FAULT, faults=3, end=6, proposals=6), 178776),
    (replace(FAULT, lasts=(0, 0, 0, 0, 0), ahead=(0, 0, 0, 0, 0), faults=2, proposals=2), 38566),
    (replace(FAULT, lease_ticks=2, end=6, proposals=6, extends=True, copies=2), 109490),
    (replace(SKEWED, end=7, proposals=9), 86508),
    (replace(SKEWED, ahead=(0, 1, 1), end=7, proposals=9), 122505),
    (replace(SKEWED, ahead=(0, 0, 0), end=7, proposals=8), 36400),
    (replace(SKEWED, attempts=3, end=6), 187440),
    (replace(SKEWED, attempts=3, extends=True), 116447),
    (replace(SKEWED, faults=2, end=7, extends=True), 538626),
    (replace(SKEWED, skew=2, ahead=(0, 0, 2), lasts=(0, 0, 4), end=8, proposals=8), 90212),
]

# What is left out, in which world, and the length of a shortest way to what must not be.
BROKEN = [
    (("quorum_is_majority",), Bounds(), 4),
    (("value_above_last",), Bounds(), 7),
    (("raised_if_unequal",), Bounds(), 7),
    (("raise_needs_key",), Bounds(), 9),
    (("raise_needs_majority",), Bounds(), 8),
    (("kept_past_deadline",), Bounds(), 7),
    (("extend_needs_majority",), Bounds(extends=True), 9),
    (("extend_needs_key",), Bounds(extends=True), 10),
    (("quarantined",), FAULT, 7),
    (("old_data_noticed",), FAULT, 7),
    (("no_extend_in_quarantine",), replace(FAULT, extends=True, end=2, proposals=2), 14),
    (("quarantine_covers_lease",), FAULT, 8),
    (("quarantine_covers_skew",), replace(SKEWED, end=3, proposals=3), 12),
    (("quarantine_leaves_floor",), FAULT, 10),
    (("ahead_refused",), FAULT, 10),
]
# What the rest of the rules makes up for.
NOT_NEEDED = [
    pytest.param("no_raise_in_quarantine", replace(FAULT, end=3, proposals=3)),
    pytest.param(
        "no_raise_in_quarantine",
        replace(FAULT, attempts=3, extends=True, proposals=2),
        marks=[pytest.mark.soak, pytest.mark.timeout(1800)],
    ),
]


def without(*names: str) -> Rules:
    return Rules(**dict.fromkeys(names, False))


def search(
    model: RedlockTokens,
    wrong: Callable[[State], str] = violation,
    *,
    start: State | None = None,
    form: Callable[[State], Hashable] = canonical,
    limit: int = LIMIT,
) -> Report[State]:
    start = start or model.initial()
    return explore(start, model.successors, wrong, canonical=form, limit=limit)


@pytest.mark.parametrize(("bounds", "states"), WORLDS, ids=name_of)
def test_with_all_rules_one_holds_the_key_and_tokens_grow(
    bounds: Bounds, states: int, tell: Tell
) -> None:
    report = search(RedlockTokens(Rules(), bounds))
    tell(report)
    assert not report.violation, report
    assert report.states == states


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("bounds", "states"), LARGE_WORLDS, ids=name_of)
def test_with_all_rules_one_holds_the_key_and_tokens_grow_in_larger_worlds(
    bounds: Bounds, states: int, tell: Tell
) -> None:
    report = search(RedlockTokens(Rules(), bounds), limit=LIMIT_OF_LONG_RUNS)
    tell(report)
    assert not report.violation, report
    assert report.states == states


@pytest.mark.parametrize(("names", "bounds", "steps"), BROKEN, ids=name_of)
def test_without_a_rule_two_hold_the_key_or_a_token_does_not_grow(
    names: tuple[str, ...], bounds: Bounds, steps: int, tell: Tell
) -> None:
    model = RedlockTokens(without(*names), bounds)
    report = search(model)
    tell(report)
    assert report.violation
    assert len(report.trace) == steps, report
    assert_can_be_walked(report, model.initial(), model.successors, violation)


@pytest.mark.parametrize(("name", "bounds"), NOT_NEEDED, ids=name_of)
def test_a_rule_that_is_not_needed(name: str, bounds: Bounds, tell: Tell) -> None:
    report = search(RedlockTokens(without(name), bounds))
    tell(report)
    assert not report.violation, report


def test_each_rule_is_left_out() -> None:
    left_out = [name for names, _, _ in BROKEN for name in names]
    not_needed = {str(one.values[0]) for one in NOT_NEEDED}
    assert sorted([*left_out, *not_needed]) == sorted(field.name for field in fields(Rules))


def test_of_an_even_number_of_nodes_half_is_enough_to_raise(tell: Tell) -> None:
    """Half and a majority have a node in common. Of three or five nodes, less than a majority is
    less than that.
    """
    for nodes, enough in [(4, True), (5, False)]:
        bounds = Bounds(lasts=(2, *[0] * (nodes - 1)), ahead=(0,) * nodes)
        report = search(RedlockTokens(without("raise_needs_majority"), bounds))
        tell(report)
        assert bool(report.violation) is not enough, report


@pytest.mark.parametrize(
    ("lease", "skew"),
    [
        (1, 0),
        (2, 0),
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.soak),
        pytest.param(3, 1, marks=pytest.mark.soak),
        pytest.param(1, 2, marks=pytest.mark.soak),
    ],
)
def test_a_quarantine_has_to_last_the_longer_of_a_lease_and_twice_the_skew(
    lease: int, skew: int, tell: Tell
) -> None:
    """T + 2 S is more than that: what a node has ever counted for was asked before its fault."""
    needed = max(lease, 2 * skew)
    bounds = Bounds(
        faults=1,
        begin=1,
        end=needed + 2,
        lease_ticks=lease,
        skew=skew,
        ahead=(0, 0, skew),
        lasts=(0, 0, 2 * skew),
        proposals=needed + 1,
    )
    for ticks in (needed, needed - 1):
        model = RedlockTokens(Rules(), bounds)
        model.quarantine = ticks
        report = search(model)
        tell(report)
        assert bool(report.violation) is (ticks < needed), report


def test_values_that_get_ahead_of_the_clocks_are_above_the_floor(tell: Tell) -> None:
    """What the promise about tokens hangs on: that a node takes no two keys in a microsecond."""
    report = search(RedlockTokens(Rules(), HASTY))
    tell(report)
    assert report.violation.startswith("token"), report
    report = search(RedlockTokens(Rules(), replace(HASTY, hasty=False)))
    tell(report)
    assert not report.violation, report


def all_forms(model: RedlockTokens, form: Callable[[State], Hashable]) -> tuple[set[Hashable], int]:
    """The canonical forms of all states that a search meets, and how many states these were."""
    forms: set[Hashable] = set()

    def note(state: State) -> str:
        forms.add(canonical(state))
        return violation(state)

    report = search(model, note, form=form, limit=LIMIT_OF_LONG_RUNS)
    assert not report.violation, report
    return forms, report.states


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(proposals=2, extends=True),
        replace(FAULT, end=3, proposals=2),
        pytest.param(FAULT, marks=pytest.mark.soak),
        pytest.param(Bounds(attempts=3), marks=pytest.mark.soak),
    ],
    ids=name_of,
)
def test_nothing_is_lost_by_visiting_one_of_the_states_that_are_alike(bounds: Bounds) -> None:
    """What a search meets that takes every difference for one is what the short search meets."""
    model = RedlockTokens(Rules(), bounds)
    forms, _ = all_forms(model, canonical)
    forms_of_all, all_states = all_forms(model, as_it_is)
    assert forms == forms_of_all
    assert len(forms) < all_states


class Punctual(RedlockTokens):
    """Time never stops mattering."""

    def _settled(self, state: State) -> State:
        return state


@pytest.mark.parametrize(
    "bounds",
    [
        replace(FAULT, end=3, proposals=3),
        pytest.param(replace(FAULT, extends=True), marks=pytest.mark.soak),
        pytest.param(SKEWED, marks=pytest.mark.soak),
    ],
    ids=name_of,
)
def test_nothing_is_lost_where_time_is_taken_to_matter_no_more(bounds: Bounds, tell: Tell) -> None:
    report = search(Punctual(Rules(), bounds), limit=LIMIT_OF_LONG_RUNS)
    tell(report)
    assert not report.violation, report


def reached(title: str, goal: Goal) -> Callable[[State], str]:
    return lambda state: title if goal(state) else ""


def holder(state: State) -> int:
    """Who holds the key, as the number of its attempt; -1 if nobody does."""
    return next((one.name for one in state.attempts if one.phase == HOLDING), -1)


def keys_of(state: State, name: int) -> list[int]:
    """What the nodes keep for that attempt; nothing, unless it is under way."""
    return [
        node.slots[who].key
        for who, one in enumerate(state.attempts)
        if one.name == name
        for node in state.nodes
    ]


# One after the other, from where the one before has led.
STORY: list[tuple[str, Goal]] = [
    (
        "one holds the key with the token that it proposed",
        lambda s: holder(s) == 0 and s.attempts[0].proposal == s.highest,
    ),
    (
        "it holds the key of two nodes, and the third has dropped it",
        lambda s: (
            s.faults_left > 0
            and holder(s) == 0
            and keys_of(s, 0) == [NONE, FIRM, FIRM]
            and not s.nodes[0].slots[0].copies
        ),
    ),
    ("which another gets", lambda s: holder(s) == 0 and keys_of(s, 1) == [FIRM, NONE, NONE]),
    (
        "that holds the key when the first has ended, with a token that it did not propose",
        lambda s: holder(s) == 1 and s.attempts[0].proposal < s.highest,
    ),
    (
        "while a node loses its data that it counted on",
        lambda s: (
            holder(s) == 1 and s.nodes[0].shut_until > 0 and keys_of(s, 1) == [NONE, FIRM, NONE]
        ),
    ),
    (
        "which is back when a third comes, and counts for it",
        lambda s: holder(s) == 2 and keys_of(s, 2) == [FIRM, NONE, FIRM],
    ),
]


def test_what_should_happen_can_happen(tell: Tell) -> None:
    """Locks that nobody ever gets are safe, too.

    The names of the nodes and of the attempts matter here: no states are alike.
    """
    bounds = Bounds(attempts=3, faults=1, begin=3, end=6, proposals=3, extends=True)
    model = RedlockTokens(Rules(), bounds)
    state = model.initial()
    for title, goal in STORY:
        report = search(model, reached(title, goal), start=state, form=as_it_is)
        tell(report)
        assert report.violation == title
        state = report.trace[-1].state


# For each node, whom it has given a permit.
Permits = tuple[frozenset[str], ...]


@pytest.mark.parametrize(("nodes", "permits"), [(3, 2), (3, 3), (5, 2)])
def test_on_a_majority_more_hold_a_permit_than_there_are(
    nodes: int, permits: int, tell: Tell
) -> None:
    """Why a quorum has no semaphores: AB, BC and AC, and no node gives more than it may."""
    clients, majority = "ABCD"[: permits + 1], nodes // 2 + 1

    def give(state: Permits) -> Iterator[tuple[str, Permits]]:
        for number, given in enumerate(state):
            if len(given) < permits:
                for who in set(clients) - given:
                    yield f"node {number} gives {who} a permit", put(state, number, given | {who})

    def too_many(state: Permits) -> str:
        holders = [who for who in clients if sum(who in given for given in state) >= majority]
        return f"{holders} hold {permits} permits" if len(holders) > permits else ""

    def unordered(state: Permits) -> Hashable:
        return tuple(sorted(["".join(sorted(given)) for given in state]))

    nobody: Permits = (frozenset(),) * nodes
    report = explore(nobody, give, too_many, canonical=unordered, limit=LIMIT)
    tell(report)
    assert len(report.trace) == majority * len(clients), report
