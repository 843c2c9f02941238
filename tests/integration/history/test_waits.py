"""Who waits for a lock is told to all, with what it holds; and who waits for each other."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from distlocks import db_lock, locks
from distlocks.history import waits as module
from distlocks.history.journal import journal
from distlocks.history.waits import told, waits
from distlocks.models import LockEvent, LockWaiter
from distlocks.signals import cycle_found
from distlocks.testing import flush_events
from tests.integration.history.conftest import History
from tests.servers import session
from tests.servers.children import Child, Spawner
from tests.waiting import eventually


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are told at each look."""
    monkeypatch.setattr(module, "TELL_AFTER", 0.0)
    monkeypatch.setattr(module, "TELL_EVERY", 0.0)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(thread_name_prefix="waiter") as pool:
        yield pool


def waiter_of(history: History, key: str) -> LockWaiter | None:
    journal.look()
    return next((waiter for waiter in history.waiters() if waiter.key == key), None)


@pytest.mark.usefixtures("at_once")
class TestTold:
    def test_who_waits_for_what_until_when_and_with_what_in_its_hands(
        self, history: History, key: str, pool: ThreadPoolExecutor
    ) -> None:
        lease = db_lock(key).acquire()

        def wait() -> None:
            with (
                db_lock(f"{key}:own"),
                db_lock(key, timeout=30, label="second", metadata={"task": "t2"}),
            ):
                pass

        waiting = pool.submit(wait)
        row = eventually(lambda: waiter_of(history, key))
        assert (row.backend, row.label, row.metadata) == ("default", "second", {"task": "t2"})
        assert row.thread.startswith("waiter")
        assert row.deadline is not None
        assert 29e6 < row.deadline - row.since <= 30e6
        assert row.blockers == [lease.owner_id]
        (held,) = row.holds
        assert (held["backend"], held["keys"]) == ("default", [f"{key}:own"])
        assert row.holding == 1
        lease.release()
        waiting.result(20)
        assert waiter_of(history, key) is None

    def test_who_waits_for_ever_and_what_others_hold(
        self, history: History, key: str, pool: ThreadPoolExecutor
    ) -> None:
        """A lease of another thread is not the waiter's."""
        lease = db_lock(key).acquire()
        waiting = pool.submit(db_lock(key, timeout=None).acquire)
        row = eventually(lambda: waiter_of(history, key))
        assert row.deadline is None
        assert (row.holds, row.holding) == ([], 0)
        lease.release()
        waiting.result(20).release()

    def test_a_task(self, history: History, key: str, pool: ThreadPoolExecutor) -> None:
        import asyncio

        lease = db_lock(key).acquire()

        async def wait() -> None:
            async with db_lock(f"{key}:own"), db_lock(key, timeout=30):
                pass

        async def several() -> None:
            await asyncio.gather(wait_alone(), wait())

        async def wait_alone() -> None:
            async with db_lock(f"{key}:other"):
                await asyncio.sleep(0)

        waiting = pool.submit(asyncio.run, several())
        row = eventually(lambda: waiter_of(history, key))
        assert [held["keys"] for held in row.holds] == [[f"{key}:own"]]
        lease.release()
        waiting.result(20)

    def test_of_one_that_is_gone_nobody_hears_for_long(self, history: History, key: str) -> None:
        row = LockWaiter(owner_id=key[-30:], backend="default", key=key, since=1, valid_until=1)
        row.save(using=history.using)
        assert told(history.using) == []


# Circles

HOLD_AND_WAIT = """
    from distlocks import LockTimeout, db_lock
    mine = db_lock(own[0], backend=own[1], ttl=4).acquire()
    print("holds")
    input()
    try:
        db_lock(wanted[0], backend=wanted[1], timeout=60, ttl=4).acquire()
    except LockTimeout:
        pass
    print("done")
"""


@pytest.fixture
def two_stores(databases: None) -> Iterator[list[str]]:
    session.start_for("redis")
    LockEvent.objects.all().delete()
    LockWaiter.objects.all().delete()
    kept: dict[str, Any] = {"HISTORY_DAYS": 30, "HISTORY_DATABASE": "default"}
    stores = ["postgres", "redis"]
    entries = {alias: {**settings.DISTLOCKS[alias], **kept} for alias in stores}
    with override_settings(DISTLOCKS={**settings.DISTLOCKS, **entries}):
        locks["redis"].quarantine(end=True)
        yield stores


@pytest.mark.parametrize("count", [2, 3])
def test_processes_over_two_stores_that_wait_for_each_other_are_seen(
    two_stores: list[str], spawn: Spawner, key: str, count: int
) -> None:
    keys = [(f"{key}:{number}", two_stores[number % 2]) for number in range(count)]
    children: list[Child] = [
        spawn(
            HOLD_AND_WAIT,
            own=keys[number],
            wanted=keys[(number + 1) % count],
            env={"DISTLOCKS_TEST_HISTORY": "default"},
        )
        for number in range(count)
    ]
    for child in children:
        child.expect("holds")
    for child in children:
        child.send()
    # It is told once, in one of the processes.
    eventually(lambda: LockEvent.objects.filter(kind="cycle").exists(), within=20)
    rows = told("default")
    assert len(rows) == count
    (circle,) = module.circles_of(rows)
    assert {row.owner_id for row in rows} == set(circle)
    text = module.description(rows)
    for name, alias in keys:
        assert f"waits for {name!r} ({alias})" in text
        assert f"holds {name!r} ({alias})" in text
    # Whatever comes later: once.
    logs = [child.errors.count("wait for each other's locks") for child in children]
    assert sorted(logs) == [0] * (count - 1) + [1]
    # One lets go, all go on.
    children[0].kill()
    for child in children[1:]:
        child.expect("done", timeout=60)
    (event,) = LockEvent.objects.filter(kind="cycle")
    assert all(name in event.reason for name, _ in keys)


@pytest.mark.usefixtures("at_once")
def test_a_circle_is_a_signal_and_one_line_in_the_log(
    history: History, key: str, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[dict[str, Any]] = []

    def listen(**told: Any) -> None:
        heard.append(told)

    cycle_found.connect(listen)
    try:
        together = threading.Barrier(2)

        def wait(own: str, wanted: str, timeout: float) -> None:
            with db_lock(own):
                together.wait(10)
                lease = db_lock(wanted, timeout=timeout).try_acquire()
                if lease:
                    lease.release()

        first = pool.submit(wait, f"{key}:a", f"{key}:b", 30)
        second = pool.submit(wait, f"{key}:b", f"{key}:a", 3)
        eventually(lambda: (journal.look(), flush_events(), heard)[-1])
        for _ in range(3):
            journal.look()
        flush_events()
        second.result(40)
        first.result(40)
        assert len(heard) == 1
        assert {waiter.key for waiter in heard[0]["waiters"]} == {f"{key}:a", f"{key}:b"}
        assert len([r for r in caplog.records if "wait for each other" in r.getMessage()]) == 1
    finally:
        cycle_found.disconnect(listen)
        waits._reset()


def row(owner: str, *blockers: str, holds: tuple[str, ...] = (), mode: str = "exclusive") -> Any:
    return LockWaiter(
        owner_id=owner,
        blockers=list(blockers),
        mode=mode,
        holds=[{"owner_id": held, "backend": "default", "keys": [held]} for held in holds],
    )


def test_a_permit_that_somebody_who_works_may_give_back_is_in_no_circle() -> None:
    first = row("p1", "of p2", "of p3", holds=("of p1",), mode="permit")
    second = row("p2", "of p1", holds=("of p2",))
    assert module.circles_of([first, second]) == []
    third = row("p3", "of p1", holds=("of p3",))
    assert module.circles_of([first, second, third]) == [("p1", "p2"), ("p1", "p3")]
