"""What time it is for a lease."""

import asyncio
import threading
import time

import pytest

from distlocks import clock
from distlocks.testing import FakeClock, fake_clock


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="needs a clock that counts suspend")
def test_the_lease_clock_goes_on_while_the_machine_is_suspended() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = clock.lease_now()
    assert before <= now <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_without_such_a_clock_there_is_the_monotonic_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_CLOCK_ID", None)
    before = time.monotonic()
    assert before <= clock.lease_now() <= time.monotonic()


def test_the_wall_clock_counts_whole_microseconds() -> None:
    before = time.time_ns() // 1000
    now = clock.current().wall_us()
    assert isinstance(now, int)
    assert before <= now <= time.time_ns() // 1000


def test_a_wait_ends_with_the_event_or_with_the_time() -> None:
    event = threading.Event()
    now = clock.lease_now()
    assert not clock.current().wait(event, now + 0.01)
    assert clock.lease_now() >= now + 0.01
    # A moment that has passed is no reason to fail, or to sleep for ever.
    assert not clock.current().wait(event, now - 100)
    event.set()
    assert clock.current().wait(event, now + 100)


async def test_on_an_event_loop_too() -> None:
    future = asyncio.get_running_loop().create_future()
    now = clock.lease_now()
    assert not await clock.current().wait_async(future, now + 0.01)
    assert clock.lease_now() >= now + 0.01
    assert not await clock.current().wait_async(future, now - 100)
    assert not future.cancelled()
    future.set_result(None)
    assert await clock.current().wait_async(future, now + 100)


def test_a_fake_clock_stands_still_until_it_is_advanced() -> None:
    with fake_clock() as fake:
        now, wall = clock.lease_now(), clock.current().wall_us()
        assert clock.lease_now() == now == fake.now()
        fake.advance(2.5)
        assert clock.lease_now() == now + 2.5
        assert clock.current().wall_us() == pytest.approx(wall + 2_500_000, abs=1)
    assert clock.current() is not fake


def test_the_real_clock_comes_back_after_an_error() -> None:
    before = clock.current()
    with pytest.raises(ZeroDivisionError), fake_clock():
        _ = 1 / 0
    assert clock.current() is before


def test_a_fake_clock_begins_where_the_real_one_is() -> None:
    before, wall = clock.lease_now(), clock.current().wall_us()
    with fake_clock() as fake:
        assert before <= fake.now() <= clock.Clock().now()
        assert wall <= fake.wall_us() <= clock.Clock().wall_us()


def test_no_clock_goes_backwards() -> None:
    with fake_clock() as fake, pytest.raises(ValueError, match="cannot be set back"):
        fake.advance(-1)


def test_a_wait_moves_a_fake_clock() -> None:
    with fake_clock() as fake:
        until = fake.now() + 3600
        assert not fake.wait(threading.Event(), until)
        assert fake.now() == until


async def test_an_asynchronous_wait_moves_it_too() -> None:
    with fake_clock() as fake:
        until = fake.now() + 3600
        assert not await fake.wait_async(asyncio.get_running_loop().create_future(), until)
        assert fake.now() == until


async def test_another_task_comes_first() -> None:
    with fake_clock() as fake:
        now = fake.now()
        future = asyncio.get_running_loop().create_future()

        async def resolve() -> None:
            future.set_result(None)

        task = asyncio.create_task(resolve())
        assert await fake.wait_async(future, now + 3600)
        assert fake.now() == now
        await task


def test_a_clock_that_only_the_test_moves_keeps_waiters_waiting() -> None:
    with fake_clock(auto_advance=False) as fake:
        event, answers = threading.Event(), []
        until = fake.now() + 10
        waiter = threading.Thread(target=lambda: answers.append(fake.wait(event, until)))
        waiter.start()
        fake.advance(9.5)
        waiter.join(0.05)
        assert waiter.is_alive()
        fake.advance(0.5)
        waiter.join(10)
        assert answers == [False]
        assert fake.now() == until


def test_it_wakes_a_waiter_whose_event_is_set() -> None:
    fake = FakeClock(auto_advance=False)
    event, answers = threading.Event(), []
    waiter = threading.Thread(target=lambda: answers.append(fake.wait(event, fake.now() + 10)))
    waiter.start()
    event.set()
    waiter.join(10)
    assert answers == [True]
