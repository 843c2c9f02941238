"""What operators see and clear up: in the store that grants, and what is left in the other."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distlocks import BackendUnavailable, LeaseLost, clock
from distlocks.models import Lock
from tests.integration.authority.scene import MAX_TTL, Scene
from tests.waiting import eventually

Start = Callable[..., Future[Any]]
WHY = "Redis is to be replaced"


@pytest.fixture(params=["redis", "db"])
def phased(request: pytest.FixtureRequest, scene: Scene) -> Scene:
    """Either store has the authority."""
    if request.param == "db":
        scene.begin(pinned=True)
    scene.add()
    assert scene.backend.authority.awaited().phase == request.param
    return scene


def test_holders_are_listed(phased: Scene, key: str) -> None:
    one = phased.hold(f"{key} 1", label="work", metadata={"job": 7})
    two = phased.hold(f"{key} 2", f"{key} 3")
    phased.hold("elsewhere")
    found = phased.backend.holders(key)
    assert [holder.key for holder in found] == [f"{key} {number}" for number in (1, 2, 3)]
    assert [holder.owner_id for holder in found] == [one.owner_id, two.owner_id, two.owner_id]
    assert (found[0].label, found[0].metadata) == ("work", {"job": 7})
    assert found[0].fencing_token == one.fencing_token
    assert 0 < found[0].remaining <= MAX_TTL
    assert [holder.key for holder in phased.backend.holders(key, limit=2)] == [
        f"{key} 1",
        f"{key} 2",
    ]
    assert len(phased.backend.holders()) == 4


def test_a_key_is_freed_by_force(phased: Scene, key: str) -> None:
    lease = phased.hold(key)
    (holder,) = phased.backend.force_release(key)
    assert holder.owner_id == lease.owner_id
    assert phased.backend.holders(key) == []
    with phased.lock(key, timeout=0) as later:
        assert later.fencing_token > lease.fencing_token
        with pytest.raises(LeaseLost):
            lease.extend()
    assert phased.backend.force_release(key) == []


def test_what_has_been_left_behind_is_swept(phased: Scene, key: str) -> None:
    lease = phased.hold(key)

    def owners(dry_run: bool) -> list[str]:
        swept = phased.backend.sweep(older_than=86400, batch_size=1000, dry_run=dry_run)
        return [one.owner_id for batch in swept for one in batch.expired if one.key == key]

    # The store counts from when it was asked, the holder from before.
    assert eventually(lambda: owners(True)) == [lease.owner_id]
    assert clock.lease_now() > lease.deadline
    assert owners(False) == [lease.owner_id]
    assert owners(False) == []


def test_who_waits_in_redis_is_listed(fast: Scene, start: Start, key: str) -> None:
    held = fast.hold(key)
    waiting = start(lambda: fast.lock(key, timeout=10, label="next", renew=False).acquire())
    (waiter,) = eventually(lambda: fast.backend.waiters(key))
    assert (waiter.key, waiter.label) == (key, "next")
    held.release()
    assert waiting.result(10).owner_id == waiter.owner_id
    assert fast.backend.waiters(key) == []


def test_of_who_waits_in_the_database_nothing_is_known(
    scene: Scene, start: Start, key: str
) -> None:
    scene.begin(pinned=True)
    scene.add()
    held = scene.hold(key)
    waiting = start(lambda: scene.lock(key, timeout=10, renew=False).acquire())
    eventually(lambda: scene.backend.database._sleepers)
    assert scene.backend.waiters(key) == []
    held.release()
    waiting.result(10)


# While the authority changes


def test_leases_from_redis_are_listed_until_they_have_ended(fast: Scene, key: str) -> None:
    lease = fast.hold(key)
    fast.backend.authority.drain(WHY)
    assert fast.phase_of() == "drain"
    assert [holder.owner_id for holder in fast.backend.holders(key)] == [lease.owner_id]
    fast.server.kill()
    # What cannot be asked is not needed: the key is in nobody's hands for long.
    assert fast.backend.holders(key) == []
    assert fast.backend.force_release(key) == []


def test_leases_of_the_database_are_listed_until_they_have_ended(scene: Scene, key: str) -> None:
    scene.begin(pinned=True)
    scene.add()
    lease = scene.hold(key)
    scene.backend.authority.resume(WHY, end_leases=False)
    assert scene.phase_of() == "closing"
    assert [holder.owner_id for holder in scene.backend.holders(key)] == [lease.owner_id]
    # Whoever frees it lets everybody go on.
    assert [holder.owner_id for holder in scene.backend.force_release(key)] == [lease.owner_id]
    scene.reaches("redis")


def test_a_key_that_the_database_cannot_tell_about_is_an_error(fast: Scene, key: str) -> None:
    """Nobody is to believe that a lock is free because Redis, which grants it, is down."""
    fast.hold(key)
    fast.server.kill()
    for ask in (fast.backend.holders, fast.backend.force_release):
        with pytest.raises(BackendUnavailable):
            ask(key)


def test_a_sweep_clears_what_the_other_store_has_left(scene: Scene, key: str) -> None:
    """The database has been left with rows of leases that ended on their own."""
    scene.begin(pinned=True)
    scene.add()
    lease = scene.hold(key)
    scene.backend.authority.resume(WHY, end_leases=False)
    scene.reaches("redis")
    swept = list(scene.backend.sweep(older_than=86400, batch_size=1000))
    assert lease.owner_id in [holder.owner_id for batch in swept for holder in batch.expired]
    row = scene.aside(lambda: Lock.objects.using(scene.using).get(key=scene.prefix + key))
    assert row.owner_id == ""
