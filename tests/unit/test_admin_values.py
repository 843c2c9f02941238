"""What the admin reckons without asking anybody: addresses, durations, predictions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlocks.admin.addresses import KeyName, address, from_address
from distlocks.admin.past import ring
from distlocks.histogram import BOUNDS, SIZE, bucket, percentile, rest, within
from distlocks.keys import SEPARATOR
from distlocks.templatetags.distlocks_admin import about, duration, pairs, seconds

PARTS = st.text(
    st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20
) | st.sampled_from([".", "..", "_", "_41", "a/b", "%2F", "%", "//", "?", "#", " ", "add"])


@given(
    st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1), st.lists(PARTS, min_size=1)
)
def test_every_lock_has_an_address_and_is_found_by_it(alias: str, parts: list[str]) -> None:
    name = SEPARATOR.join(parts)
    found = address(alias, name)
    assert from_address(found) == (alias, name)
    for part in found.split("/"):
        assert part not in ("", ".", "..")
        assert not set(part) & set("?#%&\\ '\"<>")


def test_ordinary_keys_stay_readable() -> None:
    assert address("default", "order:42") == "default/order:42"
    assert address("default", f"customer:7{SEPARATOR}order:42") == "default/customer:7/order:42"
    assert KeyName().to_url("a/b c_d") == "a_2Fb_20c_5Fd"


@pytest.mark.parametrize("text", ["", "a", "/a", "a/"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        from_address(text)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-3.0, "0 s"),
        (0.9, "0 s"),
        (59.9, "59 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (86399, "23 h 59 min"),
        (90000, "1 d 1 h"),
        (None, ""),
    ],
)
def test_durations_have_two_units_at_most(value: float | None, shown: str) -> None:
    assert duration(value) == shown


def test_what_has_ended_is_told_more_exactly() -> None:
    assert [seconds(value) for value in (0.00123, 7.5, 31.44, 75)] == [
        "0.00123 s",
        "7.5 s",
        "31.4 s",
        "1 min 15 s",
    ]


def test_whom_a_holder_works_for() -> None:
    assert about({"user": "olga", "request": "a", "request_id": "b", "task": "t", "x": 1}) == [
        ("user", "olga"),
        ("request", "b"),
        ("task", "t"),
    ]
    assert about({"user": "", "task_id": 7}) == [("task", "7")]
    assert about({"user": 7, "username": "olga"}) == [("user", "olga")]
    assert about(None) == about([]) == []
    assert pairs({"items": 3}) == [("items", 3)]


COUNTS = st.lists(st.integers(0, 100), min_size=SIZE, max_size=SIZE)


@given(COUNTS, st.floats(0, 2000))
def test_within_goes_from_none_to_all(counts: list[int], age: float) -> None:
    assert within(counts, 0) == 0
    assert within(counts, age) <= sum(counts)
    assert within(counts, age) <= within(counts, age + 1)
    assert math.isclose(within(counts, BOUNDS[-1]), sum(counts[:-1]))


@given(COUNTS, st.floats(0, 2000))
def test_what_is_left_is_half_of_what_got_so_far(counts: list[int], age: float) -> None:
    left = rest(counts, age)
    longer = sum(counts) - within(counts, age)
    if left is None:
        assert (
            longer < 1
            or percentile(counts, (within(counts, age) + sum(counts)) / 2 / sum(counts))
            == BOUNDS[-1]
        )
    else:
        assert left >= 0
        ended = within(counts, age + left) - within(counts, age)
        assert math.isclose(ended, longer / 2, rel_tol=1e-6, abs_tol=1e-6)


def test_a_fresh_hold_lasts_as_long_as_half_of_all() -> None:
    counts = [0] * SIZE
    counts[bucket(20)] = 10
    assert rest(counts, 0) == percentile(counts, 0.5) == 20
    assert rest(counts, 40) is None
    assert rest([0] * SIZE, 0) is None


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_a_ring_is_round(count: int) -> None:
    points = ring([None] * count)  # type: ignore[list-item]
    assert len({(point.x, point.y) for point in points}) == count
    for point in points:
        assert math.isclose(math.hypot(point.x - 100, point.y - 100), 70, abs_tol=0.2)
        assert math.isclose(math.hypot(point.arrow_x - 100, point.arrow_y - 100), 70, abs_tol=0.2)
