"""distlocks.testing, as the tests of its users see it."""

import asyncio
import os
import subprocess
import sys
import threading
import tomllib
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.test import SimpleTestCase, override_settings

from distlocks import LeaseLost, LockTimeout, db_lock, locks, signals
from distlocks.backends.memory import MemoryBackend
from distlocks.claims import Extended
from distlocks.clock import lease_now
from distlocks.renewal import renewer
from distlocks.testing import FakeClock, fake_clock, flush_events, memory_locks
from tests.servers.watchdog import ROOT

# No database here: what is in memory needs none, and a test that would need one fails.


def in_memory(alias: str = "default") -> bool:
    return isinstance(locks[alias], MemoryBackend)


# memory_locks


def test_in_a_block_all_aliases_are_in_memory() -> None:
    assert not in_memory("default")
    with memory_locks():
        assert [*locks] == [*settings.DISTLOCKS]
        assert all(in_memory(alias) for alias in locks)
        with db_lock("a"), db_lock("a", backend="sqlite"):
            assert locks["default"].holders()[0].key == "a"
    assert not in_memory("default")


@memory_locks()
def test_as_a_decorator_of_a_function() -> None:
    assert in_memory("default")
    with db_lock("a"):
        pass


@memory_locks()
async def test_as_a_decorator_of_a_coroutine() -> None:
    assert in_memory("default")
    async with db_lock("a"):
        assert await db_lock("a", timeout=0).atry_acquire() is None


@memory_locks("reports")
def test_aliases_that_the_settings_lack_can_be_added() -> None:
    assert in_memory("default")
    with db_lock("a", backend="reports") as lease:
        assert lease.ttl == 30


@memory_locks()
class DecoratedTests(SimpleTestCase):
    """Without access to a database, which a lock in one would need."""

    def test_every_test_of_the_class_has_its_locks_in_memory(self) -> None:
        assert in_memory("default")
        with db_lock("a"):
            assert db_lock("a", timeout=0).try_acquire() is None

    async def test_the_asynchronous_ones_too(self) -> None:
        assert in_memory("default")
        async with db_lock("a"):
            pass


class DecoratedSubclassTests(DecoratedTests):
    """Inherits it."""


class DecoratedMethodTests(SimpleTestCase):
    @memory_locks()
    def test_one_method_only(self) -> None:
        assert in_memory("default")

    def test_and_not_the_next(self) -> None:
        assert not in_memory("default")


def test_the_decorator_is_for_test_cases() -> None:
    with pytest.raises(ValueError, match="SimpleTestCase"):

        @memory_locks()
        class Plain:
            pass


def test_djangos_runner_knows_the_decorator_too() -> None:
    cases = unittest.defaultTestLoader.loadTestsFromTestCase(DecoratedSubclassTests)
    outcome = unittest.TestResult()
    cases.run(outcome)
    assert outcome.testsRun == 2
    assert outcome.failures == outcome.errors == []
    assert not in_memory("default")


def test_each_use_begins_with_no_locks() -> None:
    tool = memory_locks()
    for _ in range(2):
        with tool:
            assert locks["default"].holders() == []
            db_lock("a").acquire()


def test_what_an_alias_promises_is_kept() -> None:
    entry = settings.DISTLOCKS["default"] | {"TTL": 5, "MAX_TTL": 7, "KEY_PREFIX": "shop:"}
    overridden = {"default": entry | {"TIMEOUT": 0}}
    with override_settings(DISTLOCKS=overridden), memory_locks(), db_lock("a") as lease:
        assert lease.ttl == 5
        assert lease.keys == ("a",)
        assert locks["default"].prefix == "shop:"
        with pytest.raises(LockTimeout):
            db_lock("a").acquire()
        with pytest.raises(ValueError, match="from 1 to 7 s"):
            db_lock("b", ttl=8).acquire()


def test_it_gives_way_to_settings_inside_and_comes_back() -> None:
    with memory_locks():
        with override_settings(DISTLOCKS=settings.DISTLOCKS | {"extra": {"BACKEND": "no.such"}}):
            assert in_memory("default")
        assert "extra" not in [*locks]
    assert not in_memory("default")


def test_an_error_inside_ends_it_too() -> None:
    with pytest.raises(ZeroDivisionError), memory_locks():
        _ = 1 / 0
    assert not in_memory("default")


# The clock


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    with memory_locks(), fake_clock() as clock:
        yield clock


def test_an_hours_work_takes_no_time(clock: FakeClock) -> None:
    with db_lock("a", ttl=10) as lease:
        before = lease.deadline
        clock.advance(3600)
        assert lease.deadline > before + 3500
        lease.check()
    assert locks["default"].holders() == []


@pytest.mark.parametrize("ttl", [1, 7, 30])
@pytest.mark.parametrize("step", [0.1, 3, 29, 200])
def test_renewals_take_place_however_far_the_clock_is_advanced(
    clock: FakeClock, ttl: float, step: float
) -> None:
    with db_lock("a", ttl=ttl) as lease:
        for _ in range(10):
            clock.advance(step)
            assert not lease.lost
            assert lease.remaining > ttl / 2


def test_a_lease_that_is_not_renewed_is_reported_before_advance_returns(clock: FakeClock) -> None:
    lost: list[object] = []
    heard: list[str] = []

    def hear(reason: str, **_: Any) -> None:
        heard.append(reason)

    signals.lease_lost.connect(hear)
    try:
        lease = db_lock("a", ttl=10, renew=False, on_lost=lost.append).acquire()
        clock.advance(9)
        assert (lost, lease.lost) == ([], False)
        clock.advance(1)
        assert (lost, lease.lost) == ([lease], True)
        assert heard == ["it was not extended before its deadline"]
    finally:
        signals.lease_lost.disconnect(hear)
    with pytest.raises(LeaseLost):
        lease.check()


def test_losses_are_reported_in_their_order(clock: FakeClock) -> None:
    lost: list[str] = []
    for ttl in (20, 5, 10):
        name = f"{ttl}"
        db_lock(name, ttl=ttl, renew=False, on_lost=lambda le: lost.append(le.keys[0])).acquire()
    clock.advance(60)
    assert lost == ["5", "10", "20"]


def test_a_lock_taken_from_a_holder_is_noticed_at_the_next_renewal(clock: FakeClock) -> None:
    lost: list[object] = []
    lease = db_lock("a", ttl=30, on_lost=lost.append).acquire()
    locks["default"].force_release("a")
    clock.advance(9)
    assert lost == []
    clock.advance(2)
    assert lost == [lease]


def test_a_failure_of_the_store_can_be_played(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[object] = []
    lease = db_lock("a", ttl=30, on_lost=lost.append).acquire()
    backend = locks["default"]
    nothing = Extended(extended=frozenset(), lost=frozenset())
    with monkeypatch.context() as patched:
        patched.setattr(backend, "extend", lambda extensions: nothing)
        clock.advance(20)
        assert lost == []
    clock.advance(60)
    assert lost == []
    monkeypatch.setattr(backend, "extend", lambda extensions: nothing)
    clock.advance(60)
    assert lost == [lease]


def test_a_wait_passes_at_once(clock: FakeClock) -> None:
    with db_lock("a"):
        began = clock.now()
        with pytest.raises(LockTimeout, match="within 600 s"):
            db_lock("a", timeout=600).acquire()
        assert clock.now() == pytest.approx(began + 600)


def test_a_wait_ends_when_the_holder_is_dead(clock: FakeClock) -> None:
    db_lock("a", ttl=20, renew=False).acquire()
    with db_lock("a", timeout=None) as lease:
        assert lease.waited == pytest.approx(20, abs=0.1)


def test_a_waiter_in_another_thread_gets_it_when_it_is_released(clock: FakeClock) -> None:
    clock.auto_advance = False
    lease = db_lock("a").acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: db_lock("a", timeout=60).acquire())
        clock.advance(30)
        assert not waiting.done()
        lease.release()
        assert waiting.result(20).fencing_token > lease.fencing_token


def test_a_waiter_whom_nobody_helps_times_out_by_the_fake_clock(clock: FakeClock) -> None:
    clock.auto_advance = False
    with db_lock("a"), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: db_lock("a", timeout=60).try_acquire())
        clock.advance(59)
        assert not waiting.done()
        # It may have begun to wait only after that.
        while not waiting.done():
            clock.advance(1)
        assert waiting.result(20) is None


def test_the_minimum_hold_is_over_when_the_clock_says_so(clock: FakeClock) -> None:
    with db_lock("a", min_hold=60):
        pass
    with pytest.raises(LockTimeout, match="cooling down"):
        db_lock("a", timeout=0).acquire()
    clock.advance(60)
    with db_lock("a", timeout=0):
        pass


async def test_tasks_wait_by_the_same_clock(clock: FakeClock) -> None:
    async with db_lock("a", ttl=30) as lease:
        began = clock.now()
        assert await db_lock("a", timeout=600).atry_acquire() is None
        assert clock.now() == pytest.approx(began + 600)
        assert not lease.lost


async def test_a_task_that_releases_lets_the_next_one_in_without_time_passing(
    clock: FakeClock,
) -> None:
    order: list[str] = []
    began = clock.now()

    async def work(name: str) -> None:
        async with db_lock("a", timeout=60):
            order.append(f"{name} in")
            await asyncio.sleep(0)
            order.append(f"{name} out")

    await asyncio.gather(*(work(name) for name in "abc"))
    assert [step.split()[1] for step in order] == ["in", "out"] * 3
    assert clock.now() < began + 60


def test_leases_from_before_the_fake_clock_go_on_making_sense() -> None:
    with memory_locks(), db_lock("a") as lease:
        with fake_clock() as clock:
            assert not lease.lost
            clock.advance(100)
            assert not lease.lost
        assert lease_now() < clock.now()


def test_an_advance_waits_for_the_renewals_that_another_one_began(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads may wait, and so advance the clock, at once."""
    began = clock.now()
    lease = db_lock("a", ttl=30).acquire()
    backend = locks["default"]
    extend, entered, go_on = backend.extend, threading.Event(), threading.Event()

    def slowly(extensions: Any) -> Extended:
        entered.set()
        assert go_on.wait(20)
        return extend(extensions)

    monkeypatch.setattr(backend, "extend", slowly)
    first = threading.Thread(target=clock.advance, args=(12,))
    second = threading.Thread(target=clock.advance, args=(100,))
    first.start()
    assert entered.wait(20)
    second.start()
    # If it does not wait, it is done in no time.
    second.join(0.2)
    go_on.set()
    first.join(20)
    second.join(20)
    flush_events()
    assert not lease.lost
    # Nor does the shorter one set the clock back.
    assert clock.now() >= began + 100
    lease.release()


def test_an_advance_waits_for_what_another_thread_is_about_to_renew(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that keeps leases may look just when one is due."""
    lease = db_lock("a", ttl=30).acquire()
    act, taken, go_on = renewer._act, threading.Event(), threading.Event()

    def slowly(due: Any, now: float) -> None:
        if due and threading.current_thread() is renewer._thread:
            taken.set()
            assert go_on.wait(20)
        act(due, now)

    monkeypatch.setattr(renewer, "_act", slowly)
    clock._set(clock.now() + 12)
    renewer._look_by(clock.now())
    assert taken.wait(20)
    advance = threading.Thread(target=clock.advance, args=(100,))
    advance.start()
    # If it does not wait, it is done in no time.
    advance.join(0.2)
    go_on.set()
    advance.join(20)
    assert not lease.lost
    lease.release()


def test_a_clock_advanced_by_many_threads_never_goes_back(clock: FakeClock) -> None:
    barrier = threading.Barrier(4)

    def advance(number: int) -> bool:
        barrier.wait(20)
        seen = [clock.now()]
        for _ in range(50):
            clock.advance(number)
            seen.append(clock.now())
        return seen == sorted(seen)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(advance, (0.5, 1, 7, 100)))


def test_events_are_flushed_or_it_says_so() -> None:
    go_on = threading.Event()

    def slow(**_: Any) -> None:
        assert go_on.wait(20)

    signals.lock_released.connect(slow)
    try:
        with memory_locks():
            with db_lock("a"):
                pass
            with pytest.raises(TimeoutError, match=r"did not finish within 0\.01 s"):
                flush_events(0.01)
            go_on.set()
            flush_events()
    finally:
        signals.lock_released.disconnect(slow)


# The fixtures for pytest


INNER_TESTS = """
import pytest
from distlocks import db_lock, locks
from distlocks.backends.memory import MemoryBackend

def test_memory_locks(memory_locks):
    assert isinstance(locks["default"], MemoryBackend)
    db_lock("a").acquire()

def test_they_are_fresh(memory_locks):
    assert locks["default"].holders() == []

def test_lock_clock(lock_clock):
    assert isinstance(locks["default"], MemoryBackend)
    with db_lock("a", ttl=5) as lease:
        lock_clock.advance(3600)
        assert not lease.lost

async def test_lock_clock_in_a_task(lock_clock):
    async with db_lock("a"):
        assert await db_lock("a", timeout=3600).atry_acquire() is None

def test_without_them():
    assert not isinstance(locks["default"], MemoryBackend)
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """With the plugins that are named, and ours, which the installed package brings along."""
    return subprocess.run(
        [
            *[sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder)],
            *["-p", "no:cacheprovider", "-p", "distlocks.testing.fixtures", "-W", "error"],
            *[*options, str(folder)],
        ],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_fixtures_work_in_a_project_of_its_own(tmp_path: Path) -> None:
    tmp_path.joinpath("test_inner.py").write_text(INNER_TESTS)
    done = run_pytest(
        tmp_path,
        *["-p", "pytest_django.plugin", "--ds", "tests.settings"],
        *["-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto"],
        *["-o", "asyncio_default_fixture_loop_scope=function"],
    )
    assert "5 passed" in done.stdout, done.stdout


def test_a_project_without_settings_is_not_disturbed_by_the_plugin(tmp_path: Path) -> None:
    tmp_path.joinpath("test_inner.py").write_text(
        "def test_it():\n    from django.conf import settings\n    assert not settings.configured\n"
    )
    done = run_pytest(tmp_path)
    assert "1 passed" in done.stdout, done.stdout


def test_the_package_announces_its_plugin() -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"distlocks": "distlocks.testing.fixtures"}
