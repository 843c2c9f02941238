"""The fast path without one of its rules, which the journals must show to be broken."""

from collections.abc import Callable

import pytest

from tests.integration.fastpath.scene import TTL, Scene
from tests.integration.rig.checker import Report


class Two:
    """One who has the key through the left proxy, and one who asks for it through the right."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.rig = scene.rig
        self.key = scene.rig.keys[0]
        self.renews = False
        self.left, self.right = (self.rig.start("follower", stores=e) for e in scene.entries)

    def left_holds(self, *, renew: bool = False) -> None:
        self.renews = renew
        self.rig.order(self.left, "hold", key=self.key, ttl=TTL, renew=renew)
        self.rig.hear(self.left, "holding")

    def right_gets_it(self) -> None:
        self.rig.order(self.right, "inherit", key=self.key, ttl=TTL, timeout=20)
        assert self.rig.hear(self.right, "asked")["granted"]

    def right_gets_it_and_is_done(self) -> None:
        self.right_gets_it()
        self.rig.order(self.right, "release")
        self.rig.hear(self.right, "released")

    def finish(self) -> Report:
        """What is to be said of it once both have ended."""
        self.rig.order(self.right, "release")
        self.rig.hear(self.right, "released")
        if self.renews:
            self.rig.order(self.left, "release")
        # Else when its lease has ended.
        self.rig.hear(self.left, "released")
        return self.scene.finish()

    def is_caught(self) -> None:
        report = self.finish()
        assert "exclusion" in report.rules(), report


@pytest.mark.parametrize("broken", [None, "falls_back_at_each_error"])
def test_the_database_at_each_error_of_redis_is_caught(
    stage: Callable[..., Scene], broken: str | None
) -> None:
    scene = stage(keys=1, runners=0, broken=broken)
    two = Two(scene)
    # It would have to be given back otherwise before the other can have it.
    two.left_holds(renew=broken is not None)
    scene.stores.right.mode = "reset"
    two.right_gets_it()
    if broken is None:
        assert not two.finish().violations
    else:
        two.is_caught()


def test_a_server_that_remembers_another_time_is_caught(stage: Callable[..., Scene]) -> None:
    scene = stage(keys=1, runners=0, broken="trusts_any_incarnation")
    server, two = scene.stores.primary, Two(scene)
    # It is to remember that it was opened.
    two.right_gets_it_and_is_done()
    server.snapshot()
    two.left_holds()
    server.kill()
    server.start()
    for path in server.folder.glob("*.rdb"):
        path.unlink()
    two.right_gets_it()
    two.is_caught()


def test_a_database_that_takes_over_at_once_is_caught(stage: Callable[..., Scene]) -> None:
    scene = stage(keys=1, runners=0, broken="waits_for_nobody")
    two = Two(scene)
    two.left_holds()
    scene.stores.primary.ask("FLUSHALL")
    two.right_gets_it()
    two.is_caught()


def test_a_process_that_never_reads_again_who_grants_is_caught(
    stage: Callable[..., Scene],
) -> None:
    scene = stage(keys=1, runners=0, broken="never_reads_again")
    two = Two(scene)
    two.left_holds(renew=True)
    scene.stores.right.mode = "reset"
    two.right_gets_it()
    two.is_caught()


def test_a_server_that_was_left_behind_and_grants_on_is_caught(
    stage: Callable[..., Scene],
) -> None:
    """The old primary lives on beside its successor, for which a later epoch was begun."""
    scene = stage(keys=2, runners=0, broken="trusts_any_epoch")
    two = Two(scene)
    two.right_gets_it_and_is_done()
    scene.stores.replica.promote()
    scene.stores.lead_to(scene.stores.replica, scene.stores.right)
    # Somebody who keeps asking, so that the authority moves on.
    scene.rig.start("runner", stores=scene.entries[1], keys=[scene.rig.keys[1]])
    scene.await_phase("drain", "db")
    scene.await_phase("redis")
    two.left_holds()
    two.right_gets_it()
    two.is_caught()
