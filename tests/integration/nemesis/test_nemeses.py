"""Whatever befalls servers, network and workers: no two leases of a key at once, tokens grow, what
is guarded loses nothing, whoever waits is served soon after, and nothing is left."""

import os
import random
from collections.abc import Callable

import pytest

from distlocks.clock import lease_now
from tests.integration.nemesis.conftest import TTL
from tests.integration.nemesis.nemeses import (
    NEMESES,
    OF_WORKERS,
    Nemesis,
    evicted,
    requests_held_back,
    restarted_empty,
    restarted_with_old_snapshot,
)
from tests.integration.nemesis.scene import Scene

SOAK_SECONDS = float(os.environ.get("DISTLOCKS_SOAK_SECONDS", "300"))
# Of a soak: after each round, the journals are checked and thrown away.
ROUND_SECONDS = 20.0
# An ordinary run shows them, or the like, on another topology.
FOR_LONG_RUNS = {
    ("proxied", requests_held_back),
    ("sentinel", restarted_with_old_snapshot),
    ("cluster", restarted_empty),
}
ALL = [
    pytest.param(
        topology,
        nemesis,
        id=f"{topology}-{nemesis.__name__}",
        marks=[pytest.mark.soak] if (topology, nemesis) in FOR_LONG_RUNS else [],
    )
    for topology, nemeses in NEMESES.items()
    for nemesis in nemeses
]
Record = Callable[[str, object], None]


@pytest.mark.parametrize(("topology", "nemesis"), ALL)
def test_no_lock_is_held_twice(
    stage: Callable[..., Scene], topology: str, nemesis: Nemesis, record_property: Record
) -> None:
    # Redis tells in whole seconds what was used least recently.
    scene = stage(topology, ttl=2.0 if nemesis is evicted else TTL)
    gap = scene.suffer(nemesis, holding=nemesis not in OF_WORKERS)
    report = scene.finish()
    record_property("seen", f"gap {gap:.2f} s, {report}")
    assert not report.violations, report
    assert report.counts["grants"] >= 10, report
    assert report.counts["committed"] >= 3, report
    scene.check_nothing_is_left()


@pytest.mark.soak
@pytest.mark.parametrize("topology", [*NEMESES, "valkey"])
def test_no_lock_is_held_twice_for_long(
    stage: Callable[..., Scene], topology: str, record_property: Record
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    choose = random.Random(seed)
    nemeses = NEMESES["alone" if topology == "valkey" else topology]
    give_up = lease_now() + SOAK_SECONDS
    rounds = 0
    while lease_now() < give_up:
        rounds += 1
        scene = stage(topology, keys=4, ttl=2.0, runners=5)
        until = min(give_up, lease_now() + ROUND_SECONDS)
        suffered = []
        while lease_now() < until:
            nemesis = choose.choice(nemeses)
            suffered.append(nemesis.__name__)
            scene.suffer(nemesis, holding=nemesis not in OF_WORKERS)
            scene.topology.heal()
        report = scene.finish()
        seen = f"{', '.join(suffered)}: gap {max(scene.gaps):.2f} s, {report}"
        record_property(f"round {rounds}", seen)
        assert not report.violations, f"seed {seed}: {seen}"
        scene.check_nothing_is_left()
        scene.rig.discard()
