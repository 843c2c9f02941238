"""Fairness is not promised; that nobody starves beside a free lock is."""

import time
from collections.abc import Callable

import pytest

from tests.integration.rig.checker import Report
from tests.integration.rig.conductor import WORKERS, Rig
from tests.integration.rig.test_rig import SOAK_SECONDS

# Each process takes so many locks at least.
LEAST = 60


def run(rig: Rig, seconds: float = 0.0) -> Report:
    """Eight processes take and release, while one sweeps the table."""
    sweeper = rig.start("sweeper")
    sleepers = [rig.start("sleeper") for _ in range(WORKERS)]
    time.sleep(seconds)
    rig.stop(*sleepers)
    rig.order(sweeper, "stop")
    assert rig.hear(sweeper, "swept")["times"] >= 1
    rig.hear(sweeper, "stopped")
    return rig.report()


def check(report: Report) -> None:
    assert not report.violations, report
    assert report.counts["grants"] >= WORKERS * LEAST, report
    assert report.counts["woken"] >= WORKERS * 10, report


def test_nobody_sleeps_beside_a_free_lock(make_rig: Callable[..., Rig]) -> None:
    """On PostgreSQL, where sleepers rely on being told. Nothing expires: who is not told sleeps on
    for 5 s."""
    check(run(make_rig("postgres", 3, ttls=[20.0], least=LEAST, noting=True)))


@pytest.mark.soak
def test_nobody_sleeps_beside_a_free_lock_for_long(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("postgres", 3, ttls=[20.0], least=LEAST, noting=True)
    check(run(rig, SOAK_SECONDS))
