"""Holders killed, paused, slow and quick, on one, ten and a thousand keys: nobody gets between."""

import os
import random
from collections.abc import Callable
from itertools import cycle, product

import pytest

from distlocks.clock import lease_now
from tests.integration.rig.checker import Report
from tests.integration.rig.conductor import KINDS, WORKERS, Rig

SOAK_SECONDS = float(os.environ.get("DISTLOCKS_SOAK_SECONDS", "300"))
# Of a soak: after each round, the journals are checked and thrown away.
ROUND_SECONDS = 20.0
STORES = ("sqlite", "postgres", "mariadb")
KEYS = (1, 10, 1000)


def check(report: Report, store: str, hint: str = "") -> None:
    """Nothing was wrong, and everything was there that could have been."""
    assert not report.violations, f"{report}\n{hint}"
    assert report.counts["updates"] >= 10, report
    if store == "postgres" and "grants in the log" in report.counts:
        assert report.counts["grants in the log"] >= report.counts["grants"], report
        assert report.counts["extensions in the log"] >= 1, report


@pytest.mark.parametrize(("store", "count"), [*product(STORES, KEYS), ("advisory", 10)])
def test_no_two_trust_a_lock_at_once(make_rig: Callable[..., Rig], store: str, count: int) -> None:
    rig = make_rig(store, count, least=10)
    runners = [rig.start("runner") for _ in range(WORKERS)]
    if count == 1:
        # One key has one holder: one fault after the other.
        for number, kind in enumerate(("killed", "paused", "overrun", "kept")):
            rig.faults(runners[number:], rig.keys, [kind])
    else:
        rig.faults(runners, rig.keys, KINDS)
    rig.stop()

    report = rig.report()
    check(report, store)
    assert report.counts["grants"] >= (WORKERS - 2) * 10, report
    assert report.counts["killed holders inherited from"] == (1 if count == 1 else 2), report
    assert report.counts["paused holders"] == (1 if count == 1 else 2), report


@pytest.mark.soak
@pytest.mark.parametrize("store", [*STORES, "advisory"])
def test_no_two_trust_a_lock_at_once_for_long(make_rig: Callable[..., Rig], store: str) -> None:
    seed = random.SystemRandom().randrange(2**32)
    choose = random.Random(seed)
    counts = cycle(KEYS)
    give_up = lease_now() + SOAK_SECONDS
    while lease_now() < give_up:
        rig = make_rig(store, next(counts), least=10)
        runners = [rig.start("runner") for _ in range(WORKERS)]
        until = min(give_up, lease_now() + ROUND_SECONDS)
        while lease_now() < until:
            several = choose.randint(1, min(len(rig.keys), WORKERS - 2))
            victims, kinds = choose.sample(runners, several), choose.choices(KINDS, k=several)
            rig.faults(victims, choose.sample(rig.keys, several), kinds)
            for victim, kind in zip(victims, kinds, strict=True):
                if kind.startswith("killed"):
                    runners[runners.index(victim)] = rig.start("runner")
        rig.stop()
        check(rig.report(), store, f"seed {seed}")
        rig.discard()
