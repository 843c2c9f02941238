"""The values that travel between the lock and its store."""

import dataclasses
import weakref
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlocks.claims import (
    Claim,
    Denial,
    Grant,
    Holder,
    Present,
    Refusal,
    Request,
    claims_on,
    from_us,
    refusal,
    to_us,
)
from distlocks.keys import check_key


def holder(**changes: Any) -> Holder:
    values: dict[str, Any] = {
        "key": "order:42",
        "owner_id": "abc",
        "fencing_token": 7,
        "since": datetime(2024, 2, 29, 12, 30, 5, tzinfo=UTC),
        "remaining": 12.34,
        "host": "web-1",
        "pid": 4711,
        "thread": "MainThread",
    }
    return Holder(**(values | changes))


def grant() -> Grant:
    return Grant(claims=(Claim("a"),), owner_id="abc", fencing_tokens=(7,), acquired_us=0)


# Up to the year 2255, as long as tokens fit into 53 bits.
@given(st.integers(min_value=0, max_value=2**53))
def test_a_moment_keeps_its_microsecond(microseconds: int) -> None:
    moment = from_us(microseconds)
    assert moment.tzinfo is UTC
    assert (moment - from_us(0)) // timedelta(microseconds=1) == microseconds
    assert moment.microsecond == microseconds % 1_000_000


def test_seconds_become_whole_microseconds() -> None:
    assert to_us(1.0000004) == 1_000_000
    assert to_us(0.0000016) == 2
    assert isinstance(to_us(1), int)


@pytest.mark.parametrize(("ttl", "min_hold", "hold"), [(30, 0, 30), (30, 10, 30), (30, 60, 60)])
def test_the_store_keeps_a_key_for_the_longer_of_ttl_and_minimum_hold(
    ttl: int, min_hold: int, hold: int
) -> None:
    assert (
        Request(claims=(Claim("a"),), owner_id="x", ttl_us=ttl, min_hold_us=min_hold).hold_us
        == hold
    )


def test_a_holder_says_who_has_the_key() -> None:
    assert str(holder()) == (
        "'order:42' is held by web-1 pid 4711 thread MainThread since 2024-02-29 12:30:05 UTC, "
        "for another 12.3 s unless extended"
    )


def test_a_holder_shows_its_label() -> None:
    assert "thread MainThread (nightly) since" in str(holder(label="nightly"))


def test_a_key_that_cools_down_says_so() -> None:
    cooling = holder(owner_id="")
    assert cooling.cooling_down
    assert not holder().cooling_down
    assert str(cooling) == (
        "'order:42' is cooling down for another 12.3 s, last held by web-1 pid 4711 thread "
        "MainThread since 2024-02-29 12:30:05 UTC"
    )


def test_a_holder_that_says_nothing_of_itself_is_still_readable() -> None:
    text = str(holder(host="", thread="", pid=0))
    assert "held by unknown host pid 0 thread unknown" in text


def test_a_holder_that_is_over_time_has_nothing_left() -> None:
    assert "for another 0.0 s" in str(holder(remaining=-3.0))


def test_values_cannot_be_changed() -> None:
    request = Request(claims=(Claim("a"),), owner_id="x", ttl_us=1)
    for value, name in (
        (request, "ttl_us"),
        (grant(), "owner_id"),
        (holder(), "key"),
        (Denial(key="a"), "key"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, "b")


def test_equal_grants_are_still_two() -> None:
    first, second = grant(), grant()
    assert first != second
    assert len(weakref.WeakSet([first, second])) == 2


def test_a_denial_without_details_can_be_waited_out() -> None:
    denial = Denial(key="a")
    assert (denial.remaining, denial.holders, denial.can_wait) == (0.0, (), True)


# Who goes with whom


@pytest.mark.parametrize("asked", ["exclusive", "shared", "permit", "intention"])
@pytest.mark.parametrize("there", ["shared", "permit", "intention"])
def test_only_claims_of_one_mode_go_together(asked: str, there: str) -> None:
    present = Present(now=100, others=1, mode=there, soonest=150, latest=170)
    refused = refusal(Claim("a", asked, 2), present)
    if asked == there:
        assert refused is None
    else:
        assert refused == Refusal(remaining=70, starves=True)


@pytest.mark.parametrize("asked", ["exclusive", "shared", "permit", "intention"])
def test_nothing_goes_with_an_exclusive_claim(asked: str) -> None:
    held = Present(now=100, exclusive_until=130)
    assert refusal(Claim("a", asked, 2), held) == Refusal(remaining=30, starves=False)
    over = Present(now=130, exclusive_until=130)
    assert refusal(Claim("a", asked, 2), over) is None


@pytest.mark.parametrize(
    ("others", "limit", "granted"), [(0, 1, True), (2, 3, True), (3, 3, False)]
)
def test_permits_are_counted(others: int, limit: int, granted: bool) -> None:
    present = Present(now=0, others=others, mode="permit", soonest=5, latest=9)
    refused = refusal(Claim("a", "permit", limit), present)
    assert refused == (None if granted else Refusal(remaining=5, starves=False))


@pytest.mark.parametrize("asked", ["shared", "permit", "intention"])
def test_a_reservation_keeps_out_all_who_are_not_exclusive(asked: str) -> None:
    reserved = Present(now=100, reserved_until=140)
    assert refusal(Claim("a", asked, 2), reserved) == Refusal(remaining=40, starves=False)
    assert refusal(Claim("a"), reserved) is None


def test_intentions_stand_above_and_in_order() -> None:
    leaf, sibling = check_key(("a", "b", "c")), check_key(("a", "d"))
    above = check_key(("a", "b"))
    assert claims_on([sibling, leaf], "shared") == (
        Claim("a", "intention"),
        Claim(above, "intention"),
        Claim(leaf, "shared"),
        Claim(sibling, "shared"),
    )


@pytest.mark.parametrize("mode", ["exclusive", "shared", "permit"])
def test_a_key_above_another_one_of_the_request_becomes_exclusive(mode: str) -> None:
    below = check_key(("a", "b"))
    for names in (["a", below], [below, "a"]):
        upper, lower = claims_on(names, mode, 2)
        assert (upper.key, upper.mode) == ("a", "exclusive")
        assert lower == Claim(below, mode, 2)
