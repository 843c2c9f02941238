"""A fast path that nobody has used yet."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Barrier
from typing import Any

import pytest

from distlocks import BackendUnavailable, Lease, LockTimeout, NotSupported
from distlocks.claims import to_us
from tests.integration.authority.scene import FAST, IN_DATABASE, MAX_TTL, MODE_LEASE, Scene, sent_at
from tests.integration.contract.stores import Gate

Start = Callable[..., Future[Any]]


def test_the_first_try_is_granted_by_redis_at_once(fast: Scene, key: str) -> None:
    with fast.lock(key, timeout=0) as lease:
        assert fast.store_of(lease) == "redis"
        row = fast.row
        assert row.phase == "redis"
        assert "used for the first time" in row.why
        assert (row.mode_lease, row.max_ttl) == (to_us(MODE_LEASE), to_us(MAX_TTL))
    with fast.lock(key, timeout=0) as later:
        assert later.fencing_token > lease.fencing_token


async def test_so_it_is_for_a_task(fast: Scene, key: str) -> None:
    async with fast.lock(key, timeout=0) as lease:
        assert fast.store_of(lease) == "redis"


def test_processes_that_begin_together_agree(scene: Scene, start: Start, key: str) -> None:
    aliases = [FAST, "second", "third", "fourth"]
    for alias in aliases:
        scene.add(alias, max_ttl=20)
    together = Barrier(len(aliases))

    def begin(alias: str) -> Lease:
        together.wait(10)
        return scene.lock(key, shared=True, timeout=10, renew=False, alias=alias).acquire()

    leases = [future.result(20) for future in [start(begin, alias) for alias in aliases]]
    assert scene.row.phase == "redis"
    # Nobody has opened Redis anew when another's lock was there already.
    held = {holder.owner_id for holder in scene.backend.redis.holders(key)}
    assert held == {lease.owner_id for lease in leases}


def test_without_redis_the_database_takes_over(fast: Scene, key: str) -> None:
    """Redis may be up and have granted: only this process cannot reach it."""
    fast.server.kill()
    with pytest.raises(LockTimeout, match="The fast path began without Redis"):
        fast.lock(key, timeout=0).acquire()
    with fast.lock(key, timeout=15) as lease:
        assert fast.store_of(lease) == "database"
        # It has waited for the leases of those who might have been there before.
        assert lease.waited >= MODE_LEASE + MAX_TTL


def test_leases_of_the_database_from_before_are_waited_for(
    scene: Scene, start: Start, key: str
) -> None:
    """Its table has been used by another alias so far, which is no longer configured."""
    scene.begin(**{**IN_DATABASE, "pinned": True})
    scene.add()
    lease = scene.hold(key)
    assert scene.store_of(lease) == "database"
    scene.aside(lambda: scene.rows.delete())
    scene.add("begins anew")
    with scene.lock(key, timeout=15, alias="begins anew") as later:
        assert scene.store_of(later) == "redis"
        assert sent_at(later) >= lease.deadline
        assert later.fencing_token > lease.fencing_token


@pytest.mark.parametrize(
    ("max_ttl", "mode_lease"), [(2 * MAX_TTL, MODE_LEASE), (MAX_TTL, 2 * MODE_LEASE)]
)
def test_a_process_with_longer_leases_says_so_before_it_takes_one(
    fast: Scene,
    start: Start,
    gate: Callable[..., Gate],
    key: str,
    max_ttl: float,
    mode_lease: float,
) -> None:
    fast.hold(f"{key} other")
    backend = fast.add("longer", max_ttl=max_ttl, mode_lease=mode_lease)
    lengthens = gate(backend.authority._row, "lengthen")
    future = start(lambda: fast.hold(key, alias="longer"))
    assert lengthens.arrived.wait(10)
    assert key not in {holder.key for holder in fast.backend.redis.holders(key)}
    lengthens.open()
    lease = future.result(20)
    assert fast.store_of(lease) == "redis"
    assert (fast.row.max_ttl, fast.row.mode_lease) == (to_us(max_ttl), to_us(mode_lease))
    # Those with shorter ones leave it so.
    fast.backend.authority.look()
    fast.hold(f"{key} more")
    assert (fast.row.max_ttl, fast.row.mode_lease) == (to_us(max_ttl), to_us(mode_lease))


def test_the_longest_lease_is_waited_for_by_all(fast: Scene, key: str) -> None:
    fast.hold(f"{key} other")
    # Longer than a mode lease and a lease of the process that is going to wait, which has read
    # the row when nobody had said so.
    fast.add("longer", max_ttl=2 * MAX_TTL)
    lease = fast.hold(key, alias="longer")
    fast.backend.authority.drain("Redis is to be replaced.")
    with fast.lock(key, timeout=15) as later:
        assert fast.store_of(later) == "database"
        assert sent_at(later) >= lease.deadline


def test_so_is_one_that_is_announced_while_redis_is_being_left(
    fast: Scene, start: Start, gate: Callable[..., Gate], key: str
) -> None:
    fast.hold(f"{key} other")
    fast.add("longer", max_ttl=2 * MAX_TTL)
    # The process that leaves Redis has read the row when nobody had said so.
    leaves = gate(fast.backend.authority._row, "change")
    leaving = start(lambda: fast.backend.authority.drain("Redis is to be replaced."))
    assert leaves.arrived.wait(10)
    lease = fast.hold(key, alias="longer")
    assert fast.row.max_ttl == to_us(2 * MAX_TTL)
    leaves.open()
    leaving.result(10)
    assert fast.row.max_ttl == to_us(2 * MAX_TTL)
    with fast.lock(key, timeout=15) as later:
        assert sent_at(later) >= lease.deadline


@pytest.mark.parametrize("phase", ["redis", "db"])
def test_a_minimum_hold_beyond_the_longest_lease_is_refused(
    scene: Scene, key: str, phase: str
) -> None:
    """A change of the authority would forget it."""
    if phase == "db":
        scene.begin(pinned=True)
    scene.add()
    with pytest.raises(NotSupported, match=r"min_hold=5 s .* MAX_TTL .*\(1 s\).* Raise MAX_TTL"):
        scene.lock(key, timeout=0, min_hold=5).acquire()
    with scene.lock(key, timeout=0, min_hold=MAX_TTL):
        pass
    with pytest.raises(LockTimeout, match="cooling down"):
        scene.lock(key, timeout=0).acquire()


async def test_so_it_is_by_a_task(fast: Scene, key: str) -> None:
    with pytest.raises(NotSupported, match="Raise MAX_TTL") as caught:
        await fast.lock(key, min_hold=5).aacquire()
    assert caught.value.keys == (key,)


def test_a_database_without_the_table_is_named(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    scene.add()
    monkeypatch.setattr(
        "distlocks.backends.fastpath.row.READ", "SELECT {columns}, {clock} FROM not_migrated"
    )
    with pytest.raises(BackendUnavailable, match=r"which store may grant.* run 'manage.py migrate"):
        scene.lock(key).acquire()
