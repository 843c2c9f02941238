"""Durations in buckets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlocks.histogram import BOUNDS, SIZE, bucket, percentile


def counted(*durations: float) -> list[int]:
    counts = [0] * SIZE
    for duration in durations:
        counts[bucket(duration)] += 1
    return counts


def test_each_bucket_has_its_upper_end() -> None:
    assert [bucket(bound) for bound in BOUNDS] == list(range(len(BOUNDS)))
    assert bucket(0.0) == 0
    assert bucket(BOUNDS[-1] + 1) == SIZE - 1


def test_of_nothing_there_is_no_percentile() -> None:
    assert percentile([0] * SIZE, 0.5) is None


@given(
    st.lists(st.floats(0, 2000), min_size=1, max_size=50),
    st.sampled_from([0.01, 0.25, 0.5, 0.95, 0.99, 1.0]),
)
def test_a_percentile_lies_in_the_bucket_of_the_true_one(
    durations: list[float], share: float
) -> None:
    found = percentile(counted(*durations), share)
    assert found is not None
    ordered = sorted(durations)
    true = next(
        value for index, value in enumerate(ordered, 1) if index >= share * len(ordered) - 1e-9
    )
    low = BOUNDS[bucket(true) - 1] if bucket(true) else 0.0
    high = BOUNDS[bucket(true)] if bucket(true) < len(BOUNDS) else BOUNDS[-1]
    assert low <= found <= high


def test_halfway_through_a_bucket() -> None:
    assert percentile(counted(0.3, 0.3, 0.3, 0.3), 0.5) == pytest.approx(0.375)
