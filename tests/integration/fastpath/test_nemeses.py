"""Whatever befalls the two stores, the network and the workers: no two leases of a key at once in
either store, tokens grow, what is guarded loses nothing, and whoever waits is served in time."""

import os
import random
from collections.abc import Callable

import pytest

from distlocks.clock import lease_now
from tests.integration.fastpath.nemeses import CHANGING, SINGLE, Nemesis
from tests.integration.fastpath.scene import Scene

SOAK_SECONDS = float(os.environ.get("DISTLOCKS_SOAK_SECONDS", "300"))
# Of a soak: after each round, the journals are checked and thrown away.
ROUND_SECONDS = 40.0
Record = Callable[[str, object], None]


@pytest.mark.parametrize("nemesis", SINGLE)
def test_no_lock_is_held_twice(
    stage: Callable[..., Scene], nemesis: Nemesis, record_property: Record
) -> None:
    scene = stage()
    if nemesis in CHANGING:
        scene.hold_across()
    nemesis(scene)
    report = scene.finish()
    gaps = ", ".join(f"{what} {gap:.2f} s" for what, gap in scene.gaps.items())
    record_property("seen", f"{gaps}; {report}")
    assert not report.violations, report
    assert report.counts["by redis"] >= 10, report
    if nemesis in CHANGING:
        assert report.counts["by database"] >= 3, report
    assert report.counts["committed"] >= 3, report


@pytest.mark.soak
def test_no_lock_is_held_twice_for_long(
    stage: Callable[..., Scene], record_property: Record
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    choose = random.Random(seed)
    give_up = lease_now() + SOAK_SECONDS
    rounds = 0
    while lease_now() < give_up:
        rounds += 1
        scene = stage(keys=4)
        until = min(give_up, lease_now() + ROUND_SECONDS)
        suffered = []
        while lease_now() < until:
            nemesis = choose.choice(SINGLE)
            suffered.append(nemesis.__name__)
            nemesis(scene)
        report = scene.finish()
        seen = f"{', '.join(suffered)}: worst {max(scene.gaps.values()):.2f} s, {report}"
        record_property(f"round {rounds}", seen)
        assert not report.violations, f"seed {seed}: {seen}"
        scene.rig.discard()
