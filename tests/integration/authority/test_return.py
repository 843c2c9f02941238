"""The authority returns to Redis: when, what becomes of leases of the database, what keeps it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from django.core.checks import Warning

from distlocks import BackendUnavailable, Lease, LeaseLost, LockTimeout, clock, signals
from distlocks.claims import to_us
from distlocks.models import Lock
from tests.integration.authority.conftest import Heard
from tests.integration.authority.scene import (
    FAST,
    MAX_TTL,
    RETURN_AFTER,
    SKEW,
    Scene,
    sent_at,
    until,
)
from tests.servers.proxy import FaultProxy
from tests.waiting import eventually

Start = Callable[..., Future[Any]]
WHY = "Redis is back"


@pytest.fixture
def fallen(scene: Scene) -> Scene:
    """The database has the authority, and is to keep it until resume()."""
    scene.begin(pinned=True)
    scene.add()
    return scene


def test_redis_grants_again_once_the_leases_of_the_database_have_ended(
    fallen: Scene, heard: Heard, key: str
) -> None:
    held = fallen.hold(key)
    assert fallen.store_of(held) == "database"
    fallen.backend.authority.resume(WHY, end_leases=False)
    with fallen.lock(key, timeout=15) as lease:
        assert fallen.store_of(lease) == "redis"
        assert sent_at(lease) >= held.deadline
        assert lease.fencing_token > held.fencing_token
    heard.hears_of("closing", "redis")


def test_it_waits_for_leases_that_its_own_clock_may_not_have_seen_end(
    scene: Scene, key: str
) -> None:
    """The clocks of the two stores may differ by the skew."""
    scene.begin(pinned=True)
    backend = scene.add(skew=30)
    scene.hold(key)
    rows = Lock.objects.using(scene.using).filter(key=scene.prefix + key)
    rows.update(expires_at=clock.current().wall_us() - to_us(5))
    backend.authority.resume(WHY, end_leases=False)
    for _ in range(3):
        assert backend.authority.look().phase == "closing"
    rows.update(expires_at=clock.current().wall_us() - to_us(60))
    backend.authority.look()
    scene.reaches("redis")


def test_it_does_so_as_soon_as_they_are_released(fallen: Scene, key: str) -> None:
    held = fallen.hold(key, ttl=MAX_TTL)
    fallen.backend.authority.resume(WHY, end_leases=False)
    fallen.reaches("closing")
    with pytest.raises(LockTimeout, match="Redis takes over from the database as soon as"):
        fallen.hold(f"{key} other")
    assert held.release() is True
    fallen.reaches("redis")
    with fallen.lock(key, timeout=0) as lease:
        assert fallen.store_of(lease) == "redis"


def test_tokens_go_on_growing_whatever_the_database_has_given(fallen: Scene, key: str) -> None:
    lease = fallen.hold(key)
    lease.release()
    rows = Lock.objects.using(fallen.using).filter(key=fallen.prefix + key)
    ahead = clock.current().wall_us() + to_us(SKEW / 2)
    rows.update(fencing_token=ahead)
    fallen.backend.authority.resume(WHY, end_leases=False)
    fallen.reaches("redis")
    assert fallen.hold(key).fencing_token > ahead


def test_tokens_that_are_ahead_of_the_clock_keep_the_authority(fallen: Scene, key: str) -> None:
    """Redis would go on from them for all keys, and the database could not when it takes over."""
    fallen.hold(key).release()
    rows = Lock.objects.using(fallen.using).filter(key=fallen.prefix + key)
    rows.update(fencing_token=clock.current().wall_us() + to_us(3600))
    fallen.backend.authority.resume(WHY, end_leases=False)
    for _ in range(3):
        assert fallen.backend.authority.look().phase == "db"
    assert "ahead of the database's clock" in fallen.backend.authority.ailment
    # The clock has caught up.
    rows.update(fencing_token=clock.current().wall_us())
    fallen.reaches("redis")


@pytest.mark.parametrize("options", [{"shared": True}, {"limit": 2}], ids=["shared", "permit"])
def test_leases_that_several_have_are_waited_for_too(
    fallen: Scene, key: str, options: dict[str, Any]
) -> None:
    held = [fallen.hold(key, **options) for _ in range(2)]
    held[0].release()
    fallen.backend.authority.resume(WHY, end_leases=False)
    with fallen.lock(key, timeout=15) as lease:
        assert fallen.store_of(lease) == "redis"
        assert sent_at(lease) >= held[1].deadline
        assert lease.fencing_token > max(one.fencing_token for one in held)


def test_a_key_that_cools_down_is_waited_for(fallen: Scene, key: str) -> None:
    began = clock.lease_now()
    with fallen.lock(key, timeout=0, min_hold=MAX_TTL):
        pass
    fallen.backend.authority.resume(WHY, end_leases=False)
    with fallen.lock(key, timeout=15) as lease:
        assert fallen.store_of(lease) == "redis"
        assert sent_at(lease) >= began + MAX_TTL


def test_who_waits_in_the_database_is_served_by_redis(
    fallen: Scene, start: Start, key: str
) -> None:
    held = fallen.hold(key)
    waiting = start(lambda: fallen.lock(key, timeout=20, renew=False).acquire())
    eventually(lambda: fallen.backend.database._sleepers)
    fallen.backend.authority.resume(WHY, end_leases=False)
    lease = waiting.result(20)
    assert fallen.store_of(lease) == "redis"
    assert sent_at(lease) >= held.deadline


async def test_so_is_a_task(fallen: Scene, key: str) -> None:
    held = await fallen.lock(key, timeout=0, renew=False).aacquire()
    assert fallen.store_of(held) == "database"
    fallen.aside(lambda: fallen.backend.authority.resume(WHY, end_leases=False))
    async with fallen.lock(key, timeout=15) as lease:
        assert fallen.store_of(lease) == "redis"
        assert sent_at(lease) >= held.deadline


# Who does not let go


def test_a_lease_that_is_extended_goes_on_and_the_return_is_given_up(
    scene: Scene, key: str
) -> None:
    scene.begin(pinned=True, max_ttl=to_us(1.5))
    scene.add(max_ttl=1.5)
    with scene.lock(key, timeout=0) as lease:
        assert scene.store_of(lease) == "database"
        scene.backend.authority.resume(WHY, end_leases=False)
        scene.reaches("closing")
        began, epoch = clock.lease_now(), scene.row.epoch
        with pytest.raises(LockTimeout, match="Redis takes over from the database"):
            scene.hold(f"{key} other")
        before = lease.deadline
        eventually(lambda: lease.deadline > before)
        # Who waits is served by the database again, if not at once.
        with scene.lock(f"{key} other", timeout=15) as other:
            assert scene.store_of(other) == "database"
            assert sent_at(other) >= began + 2 * 1.5
        row = scene.row
        assert row.phase == "db"
        assert row.epoch > epoch
        assert "were still held" in row.why
        # It had none.
        assert row.patience >= to_us(RETURN_AFTER)
        assert lease.ending == ""
        lease.check()


def test_an_operator_may_have_the_leases_end(scene: Scene, heard: Heard, key: str) -> None:
    scene.begin(pinned=True, max_ttl=to_us(1.5))
    scene.add(max_ttl=1.5)
    lost: list[Lease] = []
    lease = scene.lock(key, timeout=0, on_lost=lost.append).acquire()
    scene.backend.authority.resume(WHY, end_leases=True)
    eventually(lambda: lease.ending)
    assert WHY in lease.ending
    assert not lease.lost
    with pytest.raises(BackendUnavailable, match=WHY):
        lease.extend()
    assert not lease.lost
    (ending,) = heard.of(signals.lease_ending)
    assert ending["keys"] == (key,)
    assert WHY in ending["reason"]
    with scene.lock(key, timeout=15) as later:
        assert scene.store_of(later) == "redis"
        assert sent_at(later) >= lease.deadline
    eventually(lambda: lost == [lease])
    with pytest.raises(LeaseLost, match=WHY):
        lease.check()
    assert not scene.row.ends_leases


def test_a_lease_that_is_held_for_long_keeps_the_authority(fallen: Scene, key: str) -> None:
    """Else everybody would wait for a return that fails."""
    with fallen.lock(key, timeout=0) as lease:
        first = sent_at(lease)
        until(first + MAX_TTL + 0.1)
        for _ in range(2):
            fallen.backend.authority.resume(WHY, end_leases=False)
        assert fallen.phase_of() == "db"
        assert f"'{fallen.prefix}{key}' has been held for 1 s" in fallen.backend.authority.ailment
        with fallen.lock(f"{key} other", timeout=0):
            pass
    fallen.reaches("redis")


def test_a_return_is_not_begun_while_redis_cannot_be_reached(
    fallen: Scene, warnings: Callable[[], list[str]], key: str
) -> None:
    fallen.server.kill()
    fallen.backend.authority.resume(WHY, end_leases=False)
    for _ in range(3):
        assert fallen.backend.authority.look().phase == "db"
    assert "does not answer" in fallen.backend.authority.ailment
    with fallen.lock(key, timeout=0) as lease:
        assert fallen.store_of(lease) == "database"
    fallen.server.start()
    fallen.reaches("redis")
    assert fallen.backend.authority.ailment == ""


def test_an_open_that_fails_gives_the_authority_back(
    fallen: Scene, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Redis is there when asked how it is, and not a moment later."""

    def fails(*_: object) -> int:
        raise BackendUnavailable("Nothing was heard.") from ConnectionResetError()

    with monkeypatch.context() as patched:
        patched.setattr(fallen.backend.authority._changes._servers, "open", fails)
        epoch = fallen.row.epoch
        fallen.backend.authority.resume(WHY, end_leases=False)
        row = fallen.row
        assert row.phase == "db"
        assert "Redis could not be opened: Nothing was heard." in row.why
        assert row.epoch > epoch
        assert row.patience >= to_us(RETURN_AFTER)
        with fallen.lock(key, timeout=0) as lease:
            assert fallen.store_of(lease) == "database"
    fallen.reaches("redis")
    assert fallen.row.epoch > row.epoch


# How long it must have been well


def test_it_returns_only_after_some_time_of_health(scene: Scene, key: str) -> None:
    scene.begin(patience=to_us(1), since=clock.current().wall_us())
    scene.add()
    began = clock.lease_now()
    scene.reaches("redis")
    assert clock.lease_now() >= began + 1


def test_who_cannot_reach_redis_keeps_everybody_from_returning(scene: Scene) -> None:
    scene.begin(patience=to_us(20))
    with FaultProxy(scene.server.host, scene.server.port) as proxy:
        scene.add()
        other = scene.add("other", redis={"url": f"redis://{proxy.host}:{proxy.port}/0"})
        proxy.mode = "reset"
        assert other.authority.look().phase == "db"
        assert other.authority.ailment
        here = scene.backend.authority
        here.look()
        # It has found Redis healthy for long.
        here._changes._healthy_since = clock.lease_now() - 60
        for _ in range(2):
            assert here.look().phase == "db"
        # Nobody has had trouble for long.
        scene.change_row(unhealthy_at=1)
        here.look()
        scene.reaches("redis")


def test_clocks_that_are_apart_keep_the_authority_in_the_database(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    scene.begin()
    backend = scene.add()
    look = backend.authority._changes._servers.look

    def ahead() -> tuple[float, int]:
        shift, epoch = look()
        return shift + 10, epoch

    with monkeypatch.context() as patched:
        patched.setattr(backend.authority._changes._servers, "look", ahead)
        for _ in range(3):
            assert backend.authority.look().phase == "db"
        assert "clocks of Redis and the database are 10.0 s apart" in backend.authority.ailment
        with scene.lock(key, timeout=0) as lease:
            assert scene.store_of(lease) == "database"
    scene.reaches("redis")
    assert backend.authority.ailment == ""


def test_leaving_soon_again_takes_longer_each_time(fast: Scene, key: str) -> None:
    fast.hold(f"{key} 1")
    patience = []
    for number in range(3):
        # It has just returned.
        fast.change_row(since=clock.current().wall_us(), phase="redis", epoch=fast.row.epoch + 1)
        fast.backend.authority.look()
        mode = fast.backend.authority.known()
        assert mode is not None
        fast.backend.authority.accuse(mode, f"It has failed for the time {number}.")
        fast.reaches("drain")
        patience.append(fast.row.patience)
    assert patience == [to_us(RETURN_AFTER * 2**doublings) for doublings in (1, 2, 3)]
    # After a long time of health it begins anew.
    fast.change_row(since=1, phase="redis", epoch=fast.row.epoch + 1)
    fast.backend.authority.look()
    mode = fast.backend.authority.known()
    assert mode is not None
    fast.backend.authority.accuse(mode, "It has failed again.")
    fast.reaches("drain")
    assert fast.row.patience == to_us(RETURN_AFTER)


# By an operator


def test_a_drain_pins_the_database_until_told_otherwise(scene: Scene, key: str) -> None:
    backend = scene.add(return_after=0)
    with scene.lock(key, timeout=0) as lease:
        assert scene.store_of(lease) == "redis"
    mode = backend.authority.drain("Redis is to be replaced.")
    assert mode.phase == "drain"
    scene.reaches("db")
    for _ in range(3):
        assert backend.authority.look().phase == "db"
    assert scene.row.pinned
    assert scene.row.why.endswith("Redis is to be replaced.")
    with scene.lock(key, timeout=0) as lease:
        assert scene.store_of(lease) == "database"
    backend.authority.resume(WHY, end_leases=False)
    scene.reaches("redis")
    assert not scene.row.pinned
    with scene.lock(key, timeout=0) as lease:
        assert scene.store_of(lease) == "redis"


@pytest.mark.parametrize("database", ["postgres", "mariadb", "sqlite"])
def test_draining_what_is_drained_pins_it(
    make_scene: Callable[..., Scene], database: str, key: str
) -> None:
    scene = make_scene(database)
    scene.begin(patience=to_us(600))
    backend = scene.add()
    for _ in range(2):
        mode = backend.authority.drain("Redis is to be replaced.")
        assert (mode.phase, mode.row.pinned) == ("db", True)
    for _ in range(2):
        backend.authority.resume(WHY, end_leases=False)
    scene.reaches("redis")


def test_a_drain_stops_a_return_that_is_under_way(fallen: Scene, key: str) -> None:
    held = fallen.hold(key)
    fallen.backend.authority.resume(WHY, end_leases=False)
    fallen.reaches("closing")
    mode = fallen.backend.authority.drain("Not yet.")
    assert (mode.phase, mode.row.pinned) == ("db", True)
    with fallen.lock(f"{key} other", timeout=0) as lease:
        assert fallen.store_of(lease) == "database"
    # Whose epoch was another when it was granted.
    held.extend()
    held.release()
    assert fallen.backend.authority.look().phase == "db"


def test_a_return_keeps_to_what_the_check_says(fallen: Scene) -> None:
    (message,) = [one for one in fallen.backend.check_store() if one.id == "distlocks.W013"]
    assert isinstance(message, Warning)
    assert f"Redis does not grant the locks of {FAST!r}: the database grants, since" in message.msg
    assert "(epoch 7)" in message.msg
    fallen.backend.authority.resume(WHY, end_leases=False)
    fallen.reaches("redis")
    assert "distlocks.W013" not in {one.id for one in fallen.backend.check_store()}
