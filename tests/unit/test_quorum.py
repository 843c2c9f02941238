"""What answers of several nodes come to."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from distlocks.backends.redlock.quorum import (
    Outcome,
    free_in,
    majority,
    median,
    most_common,
    outcome,
    verdict,
)

sizes = st.integers(min_value=3, max_value=9)


@given(sizes)
def test_two_majorities_have_a_node_in_common(nodes: int) -> None:
    needed = majority(nodes)
    assert 2 * needed > nodes
    # And no smaller number would do.
    assert 2 * (needed - 1) <= nodes


def test_a_majority_with_the_proposal_is_a_grant() -> None:
    assert outcome(5, 7, [7, 7, 7], 0) is Outcome.GRANTED
    assert outcome(5, 7, [7, 9, 7, 7], 1) is Outcome.GRANTED


def test_while_it_may_still_be_one_more_answers_are_waited_for() -> None:
    assert outcome(5, 7, [7, 7, 9], 0) is Outcome.OPEN
    assert outcome(5, 7, [7, 7], 2) is Outcome.OPEN
    assert outcome(5, 7, [], 2) is Outcome.OPEN


def test_a_majority_with_other_values_has_to_agree_on_a_token() -> None:
    assert outcome(5, 7, [7, 9, 9, 9], 0) is Outcome.TO_BE_RAISED
    assert outcome(5, 7, [7, 7, 9], 2) is Outcome.TO_BE_RAISED


def test_without_a_majority_it_is_refused() -> None:
    assert outcome(5, 7, [7, 7], 3) is Outcome.REFUSED
    assert outcome(3, 7, [], 2) is Outcome.REFUSED


@given(st.data(), sizes)
def test_more_answers_never_take_back_what_was_decided(data: st.DataObject, nodes: int) -> None:
    answers = data.draw(st.lists(st.sampled_from([7, 8, None]), min_size=nodes, max_size=nodes))
    decided = None
    for count in range(nodes + 1):
        values = [answer for answer in answers[:count] if answer is not None]
        refusals = count - len(values)
        found = outcome(nodes, 7, values, refusals)
        if decided in (Outcome.GRANTED, Outcome.REFUSED, Outcome.TO_BE_RAISED):
            assert found is decided
        decided = found
    assert decided is not Outcome.OPEN


@given(sizes, st.data())
def test_a_verdict_needs_a_majority(nodes: int, data: st.DataObject) -> None:
    yes = data.draw(st.integers(0, nodes))
    no = data.draw(st.integers(0, nodes - yes))
    found = verdict(nodes, yes, no)
    assert (found is True) == (yes >= majority(nodes))
    # However the others may decide, it can be none any more.
    assert (found is False) == (nodes - no < majority(nodes))


def test_a_key_is_free_when_a_majority_is() -> None:
    assert free_in(5, [0, 0, 0, 30, 30]) == 0
    assert free_in(5, [30, 1, 2, 0, 40]) == 2
    assert free_in(5, [1, 2]) == float("inf")


@given(st.data(), sizes)
def test_a_key_is_not_free_while_a_majority_holds_it(data: st.DataObject, nodes: int) -> None:
    found = data.draw(
        st.lists(st.floats(min_value=0, max_value=100), min_size=nodes, max_size=nodes)
    )
    moment = free_in(nodes, found)
    assert sum(left > moment for left in found) < majority(nodes)
    assert sum(left >= moment for left in found) + majority(nodes) > nodes


def test_the_median_is_right_while_most_are() -> None:
    for wrong in combinations(range(5), 2):
        times = [1e9 if number in wrong else 100.0 + number for number in range(5)]
        assert 100 <= median(times) <= 104
    assert median([1, 2]) == 1


def test_the_most_common() -> None:
    assert most_common("abcab"[1:]) == ("b", 2)
