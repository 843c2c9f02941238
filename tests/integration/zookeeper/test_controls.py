"""Locks without one of their safeguards, which the journals must show to be broken."""

from collections.abc import Callable

from tests.integration.zookeeper.scene import Scene


def test_a_claim_taken_for_over_too_soon_is_caught(stage: Callable[..., Scene]) -> None:
    scene = stage(keys=1, runners=0, broken="believes_too_soon")
    rig, key = scene.rig, scene.rig.keys[0]
    holder, heir = rig.start("follower"), rig.start("follower")
    rig.order(holder, "hold", key=key, ttl=scene.ttl, renew=False)
    rig.hear(holder, "holding")
    rig.order(heir, "inherit", key=key, ttl=scene.ttl, timeout=6)
    assert rig.hear(heir, "asked")["granted"]
    rig.order(heir, "release")
    rig.hear(heir, "released")
    rig.hear(holder, "released")
    assert scene.finish().rules() == {"exclusion"}
