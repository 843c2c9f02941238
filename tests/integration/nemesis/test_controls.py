"""Locks without one of their safeguards, which the journals must show to be broken."""

from collections.abc import Callable

import pytest

from tests.integration.nemesis.nemeses import (
    Nemesis,
    evicted,
    flushed,
    locks_and_scripts_flushed,
    restarted_empty,
)
from tests.integration.nemesis.scene import Scene

# Seconds in which somebody behind a dead waiter looks again and finds what was reserved lapsed.
IN_TIME = 4.5


@pytest.mark.parametrize(
    "nemesis", [flushed, restarted_empty, pytest.param(evicted, marks=pytest.mark.soak)]
)
def test_a_server_trusted_whatever_it_has_forgotten_is_caught(
    stage: Callable[..., Scene], nemesis: Nemesis
) -> None:
    scene = stage("alone", ttl=2.0, runners=2, keys=1, options={"incarnation_guard": "off"})
    scene.suffer(nemesis)
    report = scene.finish()
    # The guard of the data holds all the same.
    assert report.rules() == {"exclusion"}, report
    assert report.counts["committed"] >= 1, report


def test_servers_that_vote_whatever_they_have_forgotten_are_caught(
    stage: Callable[..., Scene],
) -> None:
    """A majority has, one after the other."""
    scene = stage("quorum", ttl=2.0, runners=2, keys=1, options={"incarnation_guard": "off"})
    scene.suffer(locks_and_scripts_flushed)
    report = scene.finish()
    # Who has it is also told that it has lost it, by those who have forgotten it.
    assert "exclusion" in report.rules() <= {"exclusion", "early loss"}, report
    assert report.counts["committed"] >= 1, report


@pytest.mark.parametrize("fault", [pytest.param(None, marks=pytest.mark.soak), "reserves_for_ever"])
def test_a_reservation_without_an_end_is_caught(
    stage: Callable[..., Scene], fault: str | None
) -> None:
    scene = stage("alone", keys=1, runners=0, fault=fault)
    rig, key = scene.rig, scene.rig.keys[0]
    holder, first, second = (rig.start("follower") for _ in range(3))
    rig.order(holder, "hold", key=key, ttl=scene.ttl, renew=True)
    rig.hear(holder, "holding")
    rig.order(first, "inherit", key=key, ttl=scene.ttl, timeout=None)
    scene.await_waiter(key, rig.pid(first))
    rig.order(second, "inherit", key=key, ttl=scene.ttl, timeout=IN_TIME)
    scene.await_waiter(key, rig.pid(second))
    rig.kill(first)
    rig.order(holder, "release")
    rig.hear(holder, "released")
    assert rig.hear(second, "asked")["granted"] == (fault is None)
    if fault is None:
        rig.order(second, "release")
    assert not scene.finish().violations
