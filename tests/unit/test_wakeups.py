"""Who sleeps beside which key, and who is woken."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from distlocks.backends.wakeups import Ticket, Wakeups
from distlocks.clock import lease_now
from tests.servers.processes import wait_until

SOON = 20.0


def test_a_sleeper_is_woken_by_its_key() -> None:
    wakeups = Wakeups()
    with ThreadPoolExecutor(1) as pool, wakeups.ticket("a") as ticket:
        woken = pool.submit(ticket.wait, lease_now() + SOON)
        wakeups.wake("a")
        assert woken.result(10)


def test_what_is_announced_before_the_sleep_is_not_missed() -> None:
    wakeups = Wakeups()
    with wakeups.ticket("a") as ticket:
        wakeups.wake("a")
        assert ticket.wait(lease_now() + SOON)


def test_another_key_wakes_nobody() -> None:
    wakeups = Wakeups()
    with wakeups.ticket("a") as ticket:
        for other in ("b", "A", "a ", ""):
            wakeups.wake(other)
        assert not ticket.wait(lease_now() + 0.01)


def test_all_sleepers_of_a_key_are_woken() -> None:
    wakeups = Wakeups()
    with (
        wakeups.ticket("a") as first,
        wakeups.ticket("a") as second,
        wakeups.ticket("b") as other,
    ):
        wakeups.wake("a")
        assert first.wait(lease_now() + SOON)
        assert second.wait(lease_now() + SOON)
        assert not other.wait(lease_now() + 0.01)


def test_everybody_can_be_woken() -> None:
    wakeups = Wakeups()
    with wakeups.ticket("a") as first, wakeups.ticket("b") as second:
        wakeups.wake_all()
        assert first.wait(lease_now() + SOON)
        assert second.wait(lease_now() + SOON)


def test_a_sleep_ends_at_its_time() -> None:
    with Wakeups().ticket("a") as ticket:
        until = lease_now() + 0.01
        assert not ticket.wait(until)
        assert lease_now() >= until


def test_a_place_is_kept_only_while_it_is_used() -> None:
    wakeups = Wakeups()
    assert not wakeups
    with wakeups.ticket("a"):
        assert wakeups
        with wakeups.ticket("a"), wakeups.ticket("b"):
            pass
        assert wakeups
    assert not wakeups
    wakeups.wake("a")
    wakeups.wake_all()


def test_an_old_announcement_wakes_no_new_sleeper() -> None:
    wakeups = Wakeups()
    wakeups.wake("a")
    with wakeups.ticket("a") as ticket:
        assert not ticket.wait(lease_now() + 0.01)


async def from_another_thread(act: Callable[[], None]) -> None:
    await asyncio.to_thread(act)


async def test_a_task_is_woken_from_another_thread() -> None:
    wakeups = Wakeups()
    with wakeups.ticket("a") as ticket:
        waiting = asyncio.create_task(ticket.wait_async(lease_now() + SOON))
        await asyncio.sleep(0)
        await from_another_thread(lambda: wakeups.wake("a"))
        assert await waiting


async def test_a_task_misses_nothing_either() -> None:
    wakeups = Wakeups()
    with wakeups.ticket("a") as ticket:
        await from_another_thread(lambda: wakeups.wake("a"))
        assert await ticket.wait_async(lease_now() + SOON)


async def test_a_task_may_sleep_again_on_one_ticket() -> None:
    ticket = Ticket()
    for _ in range(2):
        assert not await ticket.wait_async(lease_now() + 0.005)
    ticket.wake()
    assert await ticket.wait_async(lease_now() + SOON)


async def test_the_loop_goes_on_while_a_task_sleeps() -> None:
    wakeups = Wakeups()
    with wakeups.ticket("a") as ticket:
        waiting = asyncio.create_task(ticket.wait_async(lease_now() + SOON))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        wakeups.wake("a")
        assert await waiting


def test_a_ticket_whose_loop_has_ended_can_still_be_woken() -> None:
    ticket = Ticket()
    asyncio.run(ticket.wait_async(lease_now() + 0.005))
    ticket.wake()
    ticket.wake()
    assert ticket.wait(lease_now() + SOON)


async def test_a_cancelled_task_gives_its_place_back() -> None:
    wakeups = Wakeups()

    async def sleep() -> None:
        with wakeups.ticket("a") as ticket:
            await ticket.wait_async(lease_now() + SOON)

    waiting = asyncio.create_task(sleep())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert not wakeups


def test_sleepers_come_and_go_while_others_are_woken() -> None:
    wakeups = Wakeups()
    stop = threading.Event()

    def announce() -> None:
        while not stop.is_set():
            wakeups.wake("a")
            wakeups.wake_all()

    def sleep(_: int) -> int:
        woken = 0
        for _ in range(200):
            with wakeups.ticket("a") as ticket:
                woken += ticket.wait(lease_now() + SOON)
        return woken

    with ThreadPoolExecutor(4) as pool:
        announcer = pool.submit(announce)
        try:
            assert list(pool.map(sleep, range(3))) == [200, 200, 200]
        finally:
            stop.set()
        announcer.result(10)
    assert wait_until(lambda: not wakeups, 1)
