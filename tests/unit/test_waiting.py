"""When a lease ends, when it is extended, when a waiter looks again."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlocks.waiting import (
    MAX_SLEEP,
    busy_delays,
    lease_deadline,
    poll_delay,
    renewal_due,
    renewal_retry,
    wake_at,
)

moments = st.floats(min_value=0, max_value=1e7)
ttls = st.floats(min_value=1, max_value=366 * 86400)


@given(moments, ttls)
def test_a_holder_gives_up_before_a_store_whose_clock_is_one_percent_faster(
    sent: float, ttl: float
) -> None:
    deadline = lease_deadline(sent, ttl)
    assert sent + ttl * 0.95 < deadline < sent + ttl / 1.01


@given(moments, ttls)
def test_a_lease_is_extended_after_a_third_of_it(now: float, ttl: float) -> None:
    assert renewal_due(now, ttl, lease_deadline(now, ttl)) == now + ttl / 3


def test_a_lease_that_ends_sooner_is_due_at_its_end() -> None:
    assert renewal_due(100.0, 30.0, deadline=105.0) == 105.0


@given(moments, ttls)
def test_a_failed_extension_is_tried_several_more_times(now: float, ttl: float) -> None:
    deadline = lease_deadline(now, ttl)
    at = renewal_due(now, ttl, deadline)
    tries = 0
    while (at := renewal_retry(at, ttl, deadline)) < deadline:
        tries += 1
        assert tries < 1000
    assert tries >= 5


@given(moments, ttls, st.floats(min_value=0, max_value=1))
def test_a_retry_never_comes_at_once(now: float, ttl: float, share: float) -> None:
    assert renewal_retry(now, ttl, now + ttl * share) > now


@given(moments, st.floats(min_value=0, max_value=100), st.floats(min_value=-10, max_value=1e6))
def test_a_waiter_never_sleeps_past_its_end_the_expiry_or_the_longest_sleep(
    now: float, left: float, remaining: float
) -> None:
    at = wake_at(now, now + left, remaining)
    assert at <= now + left
    assert at <= now + MAX_SLEEP
    assert at <= now + max(remaining, 0) + 0.02


@given(moments, st.floats(min_value=0, max_value=4))
def test_a_waiter_wakes_just_after_the_expiry_rather_than_just_before(
    now: float, remaining: float
) -> None:
    assert wake_at(now, float("inf"), remaining) > now + remaining


@given(st.integers(min_value=0, max_value=10**9), st.floats(min_value=0.01, max_value=1))
def test_the_pause_between_looks_stays_within_its_bounds(attempt: int, cap: float) -> None:
    assert 0 < poll_delay(attempt, cap=cap) <= cap


def test_the_pause_between_looks_grows() -> None:
    pauses = [max(poll_delay(attempt, cap=1) for _ in range(50)) for attempt in (0, 5, 10, 15)]
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.002
    assert pauses[-1] > 0.4


@pytest.mark.parametrize("attempt", [0, 5, 30])
def test_waiters_do_not_look_in_step(attempt: int) -> None:
    assert len({poll_delay(attempt, cap=0.25) for _ in range(20)}) > 10


def test_a_waiter_on_another_writer_tries_often_but_not_in_a_tight_loop() -> None:
    delays = list(islice(busy_delays(), 500))
    assert min(delays) >= 0.0003
    assert max(delays) <= 0.005
    assert max(delays[:1]) <= 0.001
    assert max(delays[50:]) > 0.003
