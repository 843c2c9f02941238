"""What befalls the ensemble and the ways to it. Each returns when it has healed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.integration.nemesis.nemeses import (
    first_waiters_killed_and_paused,
    holders_killed_and_paused,
    wait_for,
)

if TYPE_CHECKING:
    from tests.integration.zookeeper.scene import Scene

Nemesis = Callable[["Scene"], None]
# Seconds for which it goes on without the one that is away.
AWAY = 0.5


def leader_killed(scene: Scene) -> None:
    """Another takes over, and the first comes back."""
    scene.ensemble.leader.kill()
    assert scene.ensemble.leader
    time.sleep(AWAY)
    scene.ensemble.start()


def leader_paused(scene: Scene) -> None:
    """Another takes over, and the first wakes and takes itself for the leader."""
    old = scene.ensemble.leader
    old.pause()
    try:
        others = [member for member in scene.ensemble.members if member is not old]
        wait_for(lambda: any(member.mode == "leader" for member in others))
    finally:
        old.resume()
    wait_for(lambda: old.mode != "")


def all_restarted(scene: Scene) -> None:
    """They know what they knew."""
    scene.ensemble.kill()
    scene.ensemble.start()


def cut_off_for_longer_than_a_session(scene: Scene) -> None:
    """What those behind the cut have is had by others meanwhile."""
    with scene.cut.cut_off():
        time.sleep(2 * scene.ttl)


def cut_off_for_a_moment(scene: Scene) -> None:
    """Again and again, in the middle of requests; sessions live on."""
    for _ in range(6):
        with scene.cut.cut_off():
            time.sleep(scene.ttl / 8)
        time.sleep(scene.ttl / 4)


def answers_dropped(scene: Scene) -> None:
    """The servers do what they are asked, and nobody hears of it."""
    for proxy in scene.cut.proxies:
        proxy.answers = "blackhole"
    time.sleep(scene.ttl / 2)
    for proxy in scene.cut.proxies:
        proxy.cut()
        proxy.mode = "pass"


OF_WORKERS: tuple[Nemesis, ...] = (
    holders_killed_and_paused,  # type: ignore[assignment]
    first_waiters_killed_and_paused,  # type: ignore[assignment]
)
NEMESES: tuple[Nemesis, ...] = (
    leader_killed,
    leader_paused,
    all_restarted,
    cut_off_for_longer_than_a_session,
    cut_off_for_a_moment,
    answers_dropped,
    *OF_WORKERS,
)
