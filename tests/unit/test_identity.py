"""Who is asking."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from distlocks import identity
from tests.servers.children import Spawner


def test_a_thread_has_a_number_that_no_other_ever_has() -> None:
    numbers: list[int] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: numbers.append(identity.unit()[1]))
        thread.start()
        thread.join()
    assert len({*numbers, identity.unit()[1]}) == 4
    assert identity.unit() == identity.unit()


def test_no_two_acquires_have_one_owner_id() -> None:
    barrier = threading.Barrier(4)

    def make(_: int) -> list[str]:
        barrier.wait(10)
        return [identity.new_owner_id() for _ in range(500)]

    with ThreadPoolExecutor(4) as pool:
        ids = [one for many in pool.map(make, range(4)) for one in many]
    assert len(set(ids)) == len(ids) == 2000
    # The column that keeps them has 64 characters.
    assert max(map(len, ids)) <= 64


def test_a_forked_process_has_its_own_owner_ids(spawn: Spawner) -> None:
    child = spawn(
        """
        import os
        from distlocks import identity

        ours = [identity.new_owner_id() for _ in range(3)]
        reading, writing = os.pipe()
        forked = os.fork()
        if not forked:
            theirs = [identity.new_owner_id() for _ in range(3)]
            os.write(writing, f"{identity.pid()} {' '.join(theirs)}".encode())
            os._exit(0)
        os.waitpid(forked, 0)
        pid, *theirs = os.read(reading, 10000).decode().split()
        ours += [identity.new_owner_id() for _ in range(3)]
        result = [ours, theirs, int(pid) == forked, identity.pid() == os.getpid()]
        """
    )
    ours, theirs, names_its_own_process, parents_is_kept = child.result()
    assert len({*ours, *theirs}) == len(ours) + len(theirs)
    assert {one.split("-")[0] for one in ours}.isdisjoint(one.split("-")[0] for one in theirs)
    assert names_its_own_process
    assert parents_is_kept


def test_a_thread_is_known_by_its_name() -> None:
    names = []
    thread = threading.Thread(target=lambda: names.append(identity.unit()[0]), name="x" * 300)
    thread.start()
    thread.join()
    assert names == ["x" * 100]
    assert identity.current_task() is None


async def test_a_task_is_known_by_its_name() -> None:
    async def ask() -> tuple[str, bool]:
        return identity.unit()[0], identity.current_task() is asyncio.current_task()

    assert await asyncio.create_task(ask(), name="import of 2024") == ("import of 2024", True)
    # A thread beside the loop runs no task.
    assert await asyncio.to_thread(identity.current_task) is None


def test_the_host_fits_its_column() -> None:
    assert 0 < len(identity.host()) <= 100
