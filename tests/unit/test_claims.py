"""The values that travel between the lock and its store."""

import dataclasses
import weakref
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlocks.claims import Claim, Denial, Grant, Holder, Request, from_us, to_us


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
