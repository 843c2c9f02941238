"""Whatever befalls the ensemble, the network and the workers: no two leases of a key at once,
tokens grow, what is guarded loses nothing, whoever waits is served soon after, nothing is left."""

import os
import random
from collections.abc import Callable

import pytest

from distlocks.clock import lease_now
from tests.integration.zookeeper.nemeses import (
    NEMESES,
    OF_WORKERS,
    Nemesis,
    cut_off_for_a_moment,
    first_waiters_killed_and_paused,
    leader_paused,
)
from tests.integration.zookeeper.scene import Scene

SOAK_SECONDS = float(os.environ.get("DISTLOCKS_SOAK_SECONDS", "300"))
# Of a soak: after each round, the journals are checked and thrown away.
ROUND_SECONDS = 20.0
# An ordinary run shows the like.
FOR_LONG_RUNS = {cut_off_for_a_moment, first_waiters_killed_and_paused, leader_paused}
ALL = [
    pytest.param(
        nemesis,
        id=nemesis.__name__,
        marks=[pytest.mark.soak] if nemesis in FOR_LONG_RUNS else [],
    )
    for nemesis in NEMESES
]
Record = Callable[[str, object], None]


@pytest.mark.parametrize("nemesis", ALL)
def test_no_lock_is_held_twice(
    stage: Callable[..., Scene], nemesis: Nemesis, record_property: Record
) -> None:
    scene = stage()
    gap = scene.suffer(nemesis, holding=nemesis not in OF_WORKERS)
    report = scene.finish()
    record_property("seen", f"gap {gap:.2f} s, {report}")
    assert not report.violations, report
    assert report.counts["grants"] >= 10, report
    assert report.counts["committed"] >= 3, report
    scene.check_nothing_is_left()


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
        scene = stage(keys=4, runners=5)
        until = min(give_up, lease_now() + ROUND_SECONDS)
        suffered = []
        while lease_now() < until:
            nemesis = choose.choice(NEMESES)
            suffered.append(nemesis.__name__)
            scene.suffer(nemesis, holding=nemesis not in OF_WORKERS)
            scene.cut.heal()
        report = scene.finish()
        seen = f"{', '.join(suffered)}: gap {max(scene.gaps):.2f} s, {report}"
        record_property(f"round {rounds}", seen)
        assert not report.violations, f"seed {seed}: {seen}"
        scene.check_nothing_is_left()
        scene.rig.discard()
