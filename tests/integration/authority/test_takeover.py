"""Redis fails, or is to be left: the database takes over when every lease from there has ended."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distlocks import BackendUnavailable, Lease, LeaseLost, LockTimeout, clock, signals
from distlocks.claims import to_us
from tests.integration.authority.conftest import Heard
from tests.integration.authority.scene import FAST, RETURN_AFTER, Scene, sent_at
from tests.integration.contract.stores import Gate
from tests.servers.proxy import FaultProxy
from tests.waiting import eventually, eventually_on_loop

Start = Callable[..., Future[Any]]
WHY = "Redis is to be replaced"


# Redis forgets


def test_after_a_flush_the_database_takes_over_until_redis_is_well(
    fast: Scene, heard: Heard, key: str
) -> None:
    held = fast.hold(key)
    fast.server.ask("FLUSHALL")
    with pytest.raises(LockTimeout, match="Redis has lost its memory of locks"):
        fast.hold(key)
    with fast.lock(key, timeout=15) as second:
        assert fast.store_of(second) == "database"
        assert sent_at(second) >= held.deadline
        assert second.fencing_token > held.fencing_token
        row = fast.row
        assert row.phase == "db"
        assert "Redis has lost its memory of locks" in row.why
        # It has been left soon after it was returned to: the next return takes longer.
        assert row.patience == to_us(2 * RETURN_AFTER)
    fast.reaches("redis")
    with fast.lock(key, timeout=0) as third:
        assert fast.store_of(third) == "redis"
        assert third.fencing_token > second.fencing_token
    heard.hears_of("closing", "redis", "drain", "db", "closing", "redis")


def test_a_lease_that_outlives_the_flush_is_not_taken_for_lost_before_its_time(
    fast: Scene, key: str
) -> None:
    with fast.lock(key, timeout=0, renew=False) as lease:
        fast.server.ask("FLUSHALL")
        assert fast.lock(f"{key} other", timeout=0).try_acquire() is None
        fast.reaches("drain")
        assert not lease.lost
    # Nobody is let in before its deadline: what was done in the block stands.
    assert not lease.lost


def test_renewals_find_out_that_redis_has_forgotten(scene: Scene, heard: Heard, key: str) -> None:
    scene.add(max_ttl=2)
    lease = scene.lock(key, timeout=0).acquire()
    scene.server.ask("FLUSHALL")
    eventually(lambda: lease.ending)
    assert not lease.lost
    assert len(heard.of(signals.lease_ending)) == 1
    scene.reaches("drain")
    assert "Redis has lost its memory of locks" in scene.row.why
    with pytest.raises(BackendUnavailable, match="Redis has lost its memory of locks"):
        lease.extend()


# Redis is gone


def test_two_failures_take_the_authority_from_redis(fast: Scene, key: str) -> None:
    first = fast.hold(key)
    fast.server.kill()
    with pytest.raises(BackendUnavailable, match="does not answer") as caught:
        fast.hold(key)
    assert caught.value.keys == (key,)
    # One may be an accident.
    fast.backend.authority.look()
    assert fast.row.phase == "redis"
    with pytest.raises(BackendUnavailable, match="does not answer"):
        fast.hold(key)
    fast.reaches("drain")
    said = r"The database takes over from Redis in [\d.]+ s .*Redis has failed 2 times in a row"
    with pytest.raises(LockTimeout, match=said):
        fast.hold(key)
    with fast.lock(key, timeout=15) as second:
        assert fast.store_of(second) == "database"
        assert sent_at(second) >= first.deadline
        assert second.fencing_token > first.fencing_token
    fast.server.start()
    fast.reaches("redis")
    with fast.lock(key, timeout=0) as third:
        assert fast.store_of(third) == "redis"
        assert third.fencing_token > second.fencing_token


def test_a_failure_between_answers_takes_nothing(
    fast: Scene, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    fast.hold(key)
    redis = fast.backend.redis
    real, fails = redis.try_acquire, [True, False, True, False, True]

    def now_and_then(request: Any) -> Any:
        if fails.pop(0):
            raise BackendUnavailable("Nothing was heard.") from ConnectionResetError()
        return real(request)

    monkeypatch.setattr(redis, "try_acquire", now_and_then)
    for _ in range(2):
        with pytest.raises(BackendUnavailable):
            fast.hold(key)
        assert fast.lock(key, timeout=0).try_acquire() is None
    with pytest.raises(BackendUnavailable):
        fast.hold(key)
    fast.backend.authority.look()
    assert fast.row.phase == "redis"


def test_a_redis_that_has_lost_its_replicas_is_left(scene: Scene, key: str) -> None:
    """It answers, and grants nothing."""
    scene.add("contented")
    scene.lock(key, timeout=0, alias="contented").acquire().release()
    quick = {"socket_timeout": 0.4, "socket_connect_timeout": 0.4}
    url = scene.server.url
    scene.add(redis={"url": url, "min_replicas": 1, "connection": quick})
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="0 of 1 replicas"):
            scene.hold(key)
    scene.backend.authority.look()
    assert scene.row.phase == "drain"
    # Nor is it returned to.
    scene.reaches("db")
    eventually(lambda: scene.backend.authority.look() and scene.backend.authority.ailment)
    assert "0 of 1 replicas" in scene.backend.authority.ailment
    assert scene.row.phase == "db"


def test_what_is_left_of_an_unanswered_try_cannot_touch_the_next(
    fast: Scene, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    fast.hold(f"{key} other")
    redis = fast.backend.redis
    acquire, abandon = redis.try_acquire, redis.abandon
    asked: list[str] = []
    abandoned: list[str] = []

    def unheard_at_first(request: Any) -> Any:
        asked.append(request.owner_id)
        answer = acquire(request)
        if len(asked) == 1:
            raise BackendUnavailable("Nothing was heard.") from TimeoutError()
        return answer

    def noted(request: Any) -> None:
        abandon(request)
        abandoned.append(request.owner_id)

    monkeypatch.setattr(redis, "try_acquire", unheard_at_first)
    monkeypatch.setattr(redis, "abandon", noted)
    lease = fast.lock(key, timeout=10, renew=False).acquire()
    assert lease.owner_id == asked[-1] != asked[0]
    # It had been granted, and was given back.
    assert asked[0] in abandoned
    assert fast.store_of(lease) == "redis"


def test_who_waits_in_redis_is_served_by_the_database(fast: Scene, start: Start, key: str) -> None:
    held = fast.hold(key)
    waiting = start(lambda: fast.lock(key, timeout=20, renew=False).acquire())
    eventually(lambda: fast.backend.waiters(key))
    fast.server.kill()
    lease = waiting.result(20)
    assert fast.store_of(lease) == "database"
    assert sent_at(lease) >= held.deadline
    assert lease.fencing_token > held.fencing_token


@pytest.fixture
def slow_to_look(scene: Scene) -> Scene:
    """Who waits hears of a change by itself only seconds later."""
    scene.add(max_ttl=40, mode_lease=40)
    return scene


def change(scene: Scene) -> float:
    """The database takes over; when."""
    scene.backend.authority.drain(WHY)
    # Another process has waited for long enough.
    scene.change_row(phase="db")
    scene.backend.authority.look()
    return clock.lease_now()


def test_who_waits_in_redis_is_woken_by_the_change(
    slow_to_look: Scene, start: Start, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    scene = slow_to_look
    monkeypatch.setattr(scene.backend.redis.servers._mailboxes, "_slice", 0.1)
    scene.hold(key)
    waiting = start(lambda: scene.lock(key, timeout=30, renew=False).acquire())
    eventually(lambda: scene.backend.waiters(key))
    changed = change(scene)
    lease = waiting.result(10)
    assert scene.store_of(lease) == "database"
    assert sent_at(lease) < changed + 1


async def test_so_is_a_task_that_waits_there(slow_to_look: Scene, key: str) -> None:
    scene = slow_to_look
    await scene.lock(key, timeout=0, renew=False).aacquire()
    waiting = asyncio.create_task(scene.lock(key, timeout=30, renew=False).aacquire())
    await eventually_on_loop(lambda: scene.backend.waiters(key))
    changed = await asyncio.to_thread(change, scene)
    lease = await waiting
    assert scene.store_of(lease) == "database"
    assert sent_at(lease) < changed + 1


async def test_so_is_a_task(fast: Scene, key: str) -> None:
    async with fast.lock(key, timeout=0) as first:
        assert fast.store_of(first) == "redis"
    fast.server.kill()
    with pytest.raises(BackendUnavailable, match="does not answer"):
        await fast.lock(key, timeout=0).aacquire()
    async with fast.lock(key, timeout=15) as second:
        assert fast.store_of(second) == "database"
        assert second.fencing_token > first.fencing_token


async def test_a_task_that_waits_in_redis_is_served_by_the_database(
    fast: Scene, heard: Heard, key: str
) -> None:
    held = await fast.lock(key, timeout=0, renew=False).aacquire()
    fast.server.ask("FLUSHALL")
    lease = await fast.lock(key, timeout=15, renew=False).aacquire()
    assert fast.store_of(lease) == "database"
    assert sent_at(lease) >= held.deadline
    assert lease.fencing_token > held.fencing_token
    assert await lease.arelease() is True


def test_renewals_that_fail_take_the_authority_too(scene: Scene, key: str) -> None:
    scene.add(max_ttl=1.5)
    lease = scene.lock(key, timeout=0).acquire()
    scene.server.kill()
    scene.reaches("drain")
    eventually(lambda: lease.lost)
    assert "Redis has failed 2 times in a row" in scene.row.why


def test_a_redis_that_hangs_keeps_nobody_from_the_database(scene: Scene, key: str) -> None:
    """It is asked how it is all the time, and each of its answers is waited for in vain."""
    scene.begin(patience=to_us(60))
    scene.add()
    scene.server.pause()
    try:
        began = clock.lease_now()
        while clock.lease_now() < began + 3:
            with scene.lock(key, timeout=0) as lease:
                assert lease.waited < 1
        eventually(lambda: "does not answer" in scene.backend.authority.ailment)
    finally:
        scene.server.resume()


# Leases from Redis while it loses the authority


def test_a_renewed_lease_is_told_early_and_runs_to_its_deadline(
    scene: Scene, heard: Heard, warnings: Callable[[], list[str]], key: str
) -> None:
    scene.add(max_ttl=2)
    lost: list[Lease] = []
    lease = scene.lock(key, timeout=0, on_lost=lost.append).acquire()
    scene.backend.authority.drain(WHY)
    eventually(lambda: lease.ending)
    assert WHY in lease.ending
    assert not lease.lost
    assert lease.remaining > 0
    lease.check()
    deadline = lease.deadline
    (ending,) = heard.of(signals.lease_ending)
    assert ending["keys"] == (key,)
    assert ending["owner_id"] == lease.owner_id
    assert WHY in ending["reason"]
    assert ending["remaining"] > 0
    assert any(f"The lease of {key!r} ends in" in said and WHY in said for said in warnings())
    with pytest.raises(BackendUnavailable, match=WHY) as refused:
        lease.extend()
    assert refused.value.keys == (key,)
    assert not lease.lost
    assert lease.deadline == deadline
    eventually(lambda: lease.lost)
    assert clock.lease_now() >= deadline
    eventually(lambda: lost == [lease])
    with pytest.raises(LeaseLost, match=WHY):
        lease.check()
    assert WHY in heard.of(signals.lease_lost)[0]["reason"]
    # Told once.
    assert len(heard.of(signals.lease_ending)) == 1


def test_who_extends_by_hand_is_told_why_that_is_over(fast: Scene, heard: Heard, key: str) -> None:
    lease = fast.hold(key)
    fast.backend.authority.drain(WHY)
    assert lease.ending == ""
    with pytest.raises(BackendUnavailable, match=rf"{WHY}.*It lasts for another [01]\.\d s"):
        lease.extend()
    assert WHY in lease.ending
    assert not lease.lost
    lease.check()
    assert [said["keys"] for said in heard.of(signals.lease_ending)] == [(key,)]


async def test_so_is_a_task_that_extends(fast: Scene, key: str) -> None:
    lease = await fast.lock(key, timeout=0, renew=False).aacquire()
    fast.aside(lambda: fast.backend.authority.drain(WHY))
    with pytest.raises(BackendUnavailable, match=WHY):
        await lease.aextend()
    assert not lease.lost
    assert WHY in lease.ending


def test_messages_of_the_end_are_sentences(fast: Scene, key: str) -> None:
    """Those of the command, for instance, are sentences of their own."""
    lease = fast.hold(key)
    fast.backend.authority.drain("Taken from Redis by an operator.")
    with pytest.raises(BackendUnavailable, match="by an operator") as refused:
        lease.extend()
    assert ".." not in str(refused.value)


def test_a_block_that_ends_in_time_ends_well(fast: Scene, key: str) -> None:
    with fast.lock(key, timeout=0, renew=False) as lease:
        fast.backend.authority.drain(WHY)
    assert not lease.lost
    # The key is nobody's: the database grants nothing before all from there would have ended.
    with fast.lock(key, timeout=15) as later:
        assert fast.store_of(later) == "database"
        assert sent_at(later) >= lease.deadline


def test_a_release_needs_no_redis_any_more(fast: Scene, key: str) -> None:
    """Nobody would notice it: the lease just runs out."""
    lease = fast.hold(key)
    fast.server.kill()
    for _ in range(2):
        with pytest.raises(BackendUnavailable):
            fast.hold(f"{key} other")
    fast.reaches("drain")
    assert lease.release() is True
    assert not lease.lost


# Both are gone


@pytest.mark.parametrize("timeout", [0, 3])
def test_without_either_the_error_comes_in_time(
    cut_off: Scene, proxy: FaultProxy, key: str, timeout: float
) -> None:
    cut_off.hold(key)
    cut_off.server.kill()
    proxy.mode = "reset"
    began = clock.lease_now()
    with pytest.raises(BackendUnavailable):
        cut_off.lock(key, timeout=timeout).acquire()
    assert clock.lease_now() < began + timeout + 2


def test_so_it_does_for_who_has_asked_nothing_yet(
    cut_off: Scene, proxy: FaultProxy, key: str
) -> None:
    cut_off.server.kill()
    proxy.mode = "reset"
    for timeout in (0, 3):
        with pytest.raises(BackendUnavailable, match="Nobody knows which store may grant"):
            cut_off.lock(key, timeout=timeout).acquire()


# What is told


def test_each_process_tells_that_the_authority_has_changed(
    fast: Scene, heard: Heard, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    fast.hold(key)
    fast.add("other")
    fast.hold(key + " other", alias="other")
    caplog.clear()
    with caplog.at_level("INFO", logger="distlocks"):
        fast.backend.authority.drain(WHY)
        fast.reaches("drain", "other")
    (said,) = heard.of_phase("drain")
    (noticed,) = heard.of(signals.authority_changed, "other")
    row = fast.row
    for one, made_here in ((said, True), (noticed, False)):
        assert one["authority"] == "drain"
        assert one["reason"] == WHY
        assert one["epoch"] == row.epoch
        assert one["made_here"] is made_here
    told = {one.levelname: one.getMessage() for one in caplog.records if WHY in one.getMessage()}
    assert f"The locks of {FAST!r}: nobody grants until" in told["WARNING"]
    assert "The locks of 'other': nobody grants until" in told["INFO"]


def test_of_several_that_find_it_out_one_changes_it(
    fast: Scene, heard: Heard, start: Start, gate: Callable[..., Gate], key: str
) -> None:
    fast.add("other")
    aliases = (FAST, "other")
    for alias in aliases:
        fast.hold(f"{key} {alias}", alias=alias)
    epoch = fast.row.epoch
    fast.server.ask("FLUSHALL")
    # Each has read that Redis has the authority when it is about to take it away.
    gates = [gate(fast.backend_of(alias).authority._row, "change") for alias in aliases]
    tries = [
        start(lambda a=alias: fast.lock(key, timeout=0, alias=a).try_acquire()) for alias in aliases
    ]
    assert [future.result(10) for future in tries] == [None, None]
    for one in gates:
        assert one.arrived.wait(10)
    for one in gates:
        one.open()
    for alias in aliases:
        fast.reaches("drain", alias)
    assert fast.row.epoch == epoch + 1
    made = [heard.of_phase("drain", alias)[-1]["made_here"] for alias in aliases]
    assert sorted(made) == [False, True]
