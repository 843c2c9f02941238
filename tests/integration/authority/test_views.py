"""What each process knows of the authority, and for how long it may trust that."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distlocks import BackendUnavailable, LeaseLost, LockTimeout, clock
from distlocks.claims import Denial, Grant
from tests.integration.authority.conftest import TRUSTED, Heard
from tests.integration.authority.scene import FAST, MAX_TTL, MODE_LEASE, Scene, sent_at, until
from tests.servers.proxy import FaultProxy
from tests.waiting import eventually

Start = Callable[..., Future[Any]]
WHY = "Redis is to be replaced"


def test_a_change_is_noticed_by_others_within_a_mode_lease(
    fast: Scene, heard: Heard, key: str
) -> None:
    fast.add("other")
    for alias in (FAST, "other"):
        fast.hold(f"{key} {alias}", alias=alias)
    fast.backend.authority.drain(WHY)
    changed = clock.lease_now()
    # It is in use all the time.
    while True:
        began = clock.lease_now()
        lease = fast.lock(key, timeout=0, renew=False, alias="other").try_acquire()
        if lease is None:
            break
        assert began < changed + MODE_LEASE
        lease.release()
    assert fast.phase_of("other") == "drain"
    heard.hears_of("drain", alias="other")


def test_both_sides_of_a_change_give_one_key_to_one_holder(fast: Scene, key: str) -> None:
    fast.add("other")
    first = fast.hold(key, alias="other")
    fast.backend.authority.drain(WHY)
    second = fast.lock(key, timeout=15, renew=False).acquire()
    assert sent_at(second) >= first.deadline
    assert fast.lock(key, timeout=0, alias="other").try_acquire() is None
    second.release()
    with fast.lock(key, timeout=5, alias="other") as third:
        assert fast.store_of(third) == "database"
        assert third.fencing_token > second.fencing_token > first.fencing_token


def test_a_process_that_has_not_heard_of_it_overlaps_with_nobody(
    cut_off: Scene, proxy: FaultProxy, key: str
) -> None:
    """It goes on taking locks of Redis until what it has read is too old, and keeps them."""
    cut_off.add("near", mode_lease=1.5)
    # The same terms, but its database is far.
    unaware = cut_off.add("unaware", mode_lease=1.5, database="far")
    cut_off.hold(f"{key} 1", alias="near")
    read_at = unaware.authority.look().read_at
    proxy.mode = "blackhole"
    cut_off.backend_of("near").authority.drain(WHY)
    # As late as can be told apart from too late.
    until(read_at + 0.9)
    late = cut_off.hold(key, alias="unaware")
    assert key in {holder.key for holder in unaware.redis.holders()}
    with cut_off.lock(key, timeout=15, alias="near") as lease:
        assert cut_off.store_of(lease) == "database"
        assert sent_at(lease) >= late.deadline
        assert lease.fencing_token > late.fencing_token


# Without the database


@pytest.mark.parametrize("mode", ["blackhole", "reset"])
def test_redis_grants_until_what_is_known_is_too_old(
    cut_off: Scene, proxy: FaultProxy, impatient: None, key: str, mode: Any
) -> None:
    with cut_off.lock(key, timeout=0) as lease:
        pass
    read_at = cut_off.backend.authority.look().read_at
    proxy.mode = mode
    grants = 0
    while True:
        began = clock.lease_now()
        try:
            with cut_off.lock(key, timeout=0):
                assert began < read_at + TRUSTED
                grants += 1
        except BackendUnavailable:
            break
    assert grants
    assert clock.lease_now() >= read_at + TRUSTED
    # It stays so, however long one is ready to wait.
    for timeout in (0, 3):
        began = clock.lease_now()
        with pytest.raises(BackendUnavailable, match=r"[wW]hich store may grant") as caught:
            cut_off.lock(key, timeout=timeout).acquire()
        assert clock.lease_now() < began + timeout + 2
        assert caught.value.keys == (key,)
    with pytest.raises(BackendUnavailable):
        cut_off.backend.holders()
    proxy.mode = "pass"
    with cut_off.lock(key, timeout=5) as lease:
        assert lease.owner_id in {holder.owner_id for holder in cut_off.backend.redis.holders()}


async def test_so_it_does_for_tasks(
    cut_off: Scene, proxy: FaultProxy, impatient: None, key: str
) -> None:
    async with cut_off.lock(key, timeout=0):
        pass
    proxy.mode = "blackhole"
    until(clock.lease_now() + TRUSTED)
    for timeout in (0, 3):
        with pytest.raises(BackendUnavailable, match=r"[wW]hich store may grant"):
            await cut_off.lock(key, timeout=timeout).aacquire()


def test_no_lease_is_extended_beyond_it(
    cut_off: Scene, proxy: FaultProxy, impatient: None, key: str
) -> None:
    lease = cut_off.lock(key, timeout=0).acquire()
    read_at = cut_off.backend.authority.look().read_at
    proxy.mode = "blackhole"
    eventually(lambda: lease.lost)
    # Whoever drains Redis waits until then.
    assert lease.deadline < read_at + TRUSTED + MAX_TTL


def test_a_read_that_took_long_is_counted_from_its_beginning(
    cut_off: Scene, proxy: FaultProxy, start: Start, key: str
) -> None:
    cut_off.hold(f"{key} 1")
    authority = cut_off.backend.authority
    proxy.answers = "blackhole"
    looking = start(lambda: authority.look())
    # It has been asked, and is answered when that is too old to be of use.
    eventually(lambda: authority._asked > authority._done)
    until(clock.lease_now() + TRUSTED)
    cut_off.change_row(phase="drain", epoch=cut_off.row.epoch + 1, why=WHY)
    proxy.answers = "pass"
    looking.result(10)
    with pytest.raises(LockTimeout, match=WHY):
        cut_off.hold(key)


def test_a_process_that_stood_still_asks_before_it_goes_on(fast: Scene, key: str) -> None:
    fast.hold(f"{key} 1")
    fast.add("other")
    fast.hold(f"{key} 2", alias="other")
    fast.backend.authority.drain(WHY)
    fast.reaches("db")
    mode = fast.backend_of("other").authority._mode
    assert mode is not None
    assert mode.phase == "redis"
    assert fast.backend_of("other").authority.known() is None
    with fast.lock(key, timeout=0, alias="other") as lease:
        assert fast.store_of(lease) == "database"


# Denials and grants in what is known no more


def test_a_grant_in_an_epoch_that_is_over_is_refused_by_the_database(
    scene: Scene, key: str
) -> None:
    """The process that asks has read the row a moment before it was changed."""
    scene.begin(pinned=True)
    backend = scene.add(mode_lease=20)
    scene.hold(f"{key} 1")
    for values in ({"epoch": 8, "phase": "closing"}, {"epoch": 9, "phase": "db"}):
        known = backend.authority.known()
        assert known is not None
        assert (known.epoch, known.phase) == (7, "db")
        scene.change_row(**values)
        answer = backend.database.try_acquire(
            scene.request(key, authority=(backend.settings.name, known.epoch))
        )
        assert isinstance(answer, Denial)
        assert not answer.holders
    # It is told of the change by that.
    with scene.lock(key, timeout=5) as lease:
        assert scene.store_of(lease) == "database"
    known = backend.authority.known()
    assert known is not None
    assert known.epoch == 9


def test_a_request_in_an_epoch_that_is_over_is_refused_by_redis(fast: Scene, key: str) -> None:
    fast.hold(f"{key} 1")
    epoch = fast.row.epoch
    backend = fast.add("other", mode_lease=20)
    fast.hold(f"{key} 2", alias="other")
    fast.backend.authority.drain(WHY)
    # Another process has drained it and returned meanwhile.
    fast.change_row(phase="db", epoch=epoch + 5, pinned=False, patience=0)
    fast.backend.authority.look()
    fast.reaches("redis")
    known = backend.authority.known()
    assert known is not None
    assert (known.epoch, known.phase) == (epoch, "redis")
    answer = backend.try_acquire(fast.request(key))
    assert not isinstance(answer, Grant)
    # Its mistake is nobody else's trouble.
    eventually(lambda: (now := backend.authority.known()) and now.epoch > epoch + 5)
    assert fast.row.phase == "redis"
    with fast.lock(key, timeout=5, alias="other") as lease:
        assert fast.store_of(lease) == "redis"


def test_a_late_extension_brings_nothing_back(fast: Scene, key: str) -> None:
    """Redis is open again, in another epoch, and somebody else has the key."""
    held = fast.hold(key, ttl=MAX_TTL)
    epoch = fast.row.epoch
    fast.change_row(phase="db", epoch=epoch + 5, pinned=False, patience=0)
    fast.backend.authority.look()
    fast.reaches("redis")
    with fast.lock(key, timeout=5) as lease:
        with pytest.raises(LeaseLost):
            held.extend()
        lease.extend()
