"""How processes beside a test die, end and fork: for the `spawn` fixture."""

import asyncio
import atexit
import gc
import json
import os
import signal
import sys
import threading
from typing import Any

from django.db.backends.signals import connection_created

from distlocks import Lease, LeaseLost, db_lock, locks
from distlocks.backends.redis.links import Link
from distlocks.backends.zookeeper.session import Session
from tests.integration.hazards.roles import say
from tests.waiting import eventually


def die_at_every_statement(alias: str, key: str, **options: Any) -> dict[int, int]:
    """Acquire one key, and two, again and again in forks, each killed at another statement.

    The n-th of those that ask for `count` keys takes some that begin with `key:count:n:`. Returns
    how many were killed, by count.
    """
    # What takes long to import, so that the forks need not. No connection is opened by that.
    getattr(locks[alias], "dialect", None)
    return {
        count: _die_at_every_statement(alias, f"{key}:{count}", count, options) for count in (1, 2)
    }


def _die_at_every_statement(alias: str, key: str, count: int, options: dict[str, Any]) -> int:
    number = 0
    while True:
        child = os.fork()
        if not child:
            keys = [f"{key}:{number}:{i}" for i in range(count)]
            _acquire_and_die(alias, keys, number, options)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, status
            return number
        number += 1


def _acquire_and_die(alias: str, keys: list[str], number: int, options: dict[str, Any]) -> None:
    """Die before a statement if the number is even, after one if it is odd."""
    left = number

    def step() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def die(execute: Any, *args: Any) -> Any:
        step()
        result = execute(*args)
        step()
        return result

    def watch(connection: Any, **kwargs: Any) -> None:
        connection.execute_wrappers.append(die)

    connection_created.connect(watch)
    really_ask = Link.ask
    Link.ask = lambda *args: die(really_ask, *args)  # type: ignore[method-assign]
    really_talk = Session.ask
    Session.ask = lambda *args: die(really_talk, *args)  # type: ignore[method-assign]
    try:
        db_lock(*keys, backend=alias, ttl=30, timeout=0, **options).acquire()
        os._exit(0)
    finally:
        os._exit(1)


def end_while_holding(alias: str, key: str) -> None:
    """End with leases held and renewed, and with a thread and a task that wait.

    The end takes longer than the time between two renewals.
    """
    db_lock(key, backend=alias, ttl=3).acquire()
    together = threading.Barrier(3)

    def wait_in_thread() -> None:
        together.wait()
        db_lock(key, backend=alias, timeout=None).acquire()

    async def wait_on_loop() -> None:
        together.wait()
        await db_lock(key, backend=alias, timeout=None).aacquire()

    threading.Thread(target=wait_in_thread, daemon=True).start()
    threading.Thread(target=lambda: asyncio.run(wait_on_loop()), daemon=True).start()
    together.wait()
    db_lock(key, backend=alias, timeout=0.1).try_acquire()
    atexit.register(threading.Event().wait, 1.2)


def end_while_the_store_hangs(alias: str, key: str) -> None:
    """End while a renewal, a thread and a task stand in verbs that the store does not answer."""
    db_lock(key, backend=alias, ttl=2).acquire()
    lock = db_lock(key, backend=alias, timeout=None)
    threading.Thread(target=lock.acquire, daemon=True).start()
    threading.Thread(target=lambda: asyncio.run(lock.aacquire()), daemon=True).start()
    db_lock(key, backend=alias, timeout=0.1).try_acquire()
    say("ready")
    input()
    # All of them ask the store now and then.
    threading.Event().wait(0.7)


def fork_while_holding(alias: str, key: str) -> dict[str, Any]:
    """What a forked child, and then its parent, found out about the parent's lease."""
    lease = db_lock(f"{key}:parent", backend=alias, ttl=3, timeout=0).acquire()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as answer:
            json.dump(_look_at_the_parents(alias, key, lease), answer)
        del lease
        gc.collect()
        # With all that an interpreter does at its end.
        sys.exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = json.loads(answer.read() or "{}")
    _, status = os.waitpid(child, 0)
    # Renewed at least once since the child has ended.
    ended = lease.deadline
    eventually(lambda: lease.lost or lease.deadline > ended, within=5)
    kept = not lease.lost
    lease.extend()
    return {
        "child": found,
        "status": status,
        "kept": kept,
        "still held by it": [h.owner_id for h in locks[alias].holders(f"{key}:parent")]
        == [lease.owner_id],
        "released": lease.release(),
        "blocks": _fork_in_block(alias, f"{key}:block"),
    }


def _look_at_the_parents(alias: str, key: str, lease: Lease) -> dict[str, Any]:
    found: dict[str, Any] = {"lost": lease.lost, "released": lease.release()}
    for verb in ("check", "extend"):
        try:
            getattr(lease, verb)()
        except LeaseLost as lost:
            found[verb] = str(lost)
    found["denied"] = db_lock(f"{key}:parent", backend=alias, timeout=0).try_acquire() is None
    # It can take locks of its own, and they are renewed.
    own = db_lock(f"{key}:child", backend=alias, ttl=4, timeout=5).acquire()
    first = own.deadline
    eventually(lambda: own.deadline > first)
    found["other owner"] = own.owner_id.split("-")[0] != lease.owner_id.split("-")[0]
    found["own pid"] = locks[alias].holders(f"{key}:child")[0].pid == os.getpid()
    found["own released"] = own.release()
    gc.collect()
    return found


def _fork_in_block(alias: str, key: str) -> dict[str, Any]:
    """Exit codes of children that leave the parent's block in three ways, and if it was kept."""
    answers: dict[str, Any] = {}
    for how in ("exits", "raises", "ends"):
        with db_lock(key, backend=alias, ttl=30, timeout=0) as lease:
            child = os.fork()
            if not child:
                os._exit(_leave_as_child(how, lease))
            _, status = os.waitpid(child, 0)
            answers[how] = os.waitstatus_to_exitcode(status)
            lease.check()
            holders = locks[alias].holders(key)
            answers[f"{how}: kept"] = [h.owner_id for h in holders] == [lease.owner_id]
    return answers


def _leave_as_child(how: str, lease: Lease) -> int:
    """0 if the end of the block was told right."""
    error: BaseException | None = None
    if how == "exits":
        error = SystemExit(0)
    elif how == "raises":
        error = RuntimeError("of the child")
    try:
        lease.finish(error)
    except LeaseLost:
        return 0 if how == "ends" else 1
    return 1 if how == "ends" else 0


def _fork_and_lock(alias: str, key: str) -> int:
    """The exit code of a forked child that takes and releases a lock of its own."""
    child = os.fork()
    if not child:
        # A child that hangs is ended, which its exit code shows.
        signal.alarm(5)
        if lease := db_lock(key, backend=alias, timeout=1).try_acquire():
            lease.release()
        os._exit(0 if lease else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_at_any_moment(alias: str, key: str) -> list[int]:
    """Fork again and again while other threads use locks; the children's exit codes."""
    ending = threading.Event()

    def work(number: int) -> None:
        while not ending.is_set():
            with db_lock(f"{key}:{number}", backend=alias, timeout=10):
                pass

    # A fork in the middle of another thread's import is Python's own hazard: import all before.
    db_lock(key, backend=alias, timeout=0).acquire().release()
    workers = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for worker in workers:
        worker.start()
    codes = [_fork_and_lock(alias, f"{key}:child:{number}") for number in range(12)]
    ending.set()
    for worker in workers:
        worker.join()
    return codes


def fork_during_renewal(alias: str, key: str) -> dict[str, Any]:
    """Fork while a thread of ours is between two statements of a renewal."""
    under_way = threading.Event()

    def dawdle(execute: Any, sql: str, *args: Any) -> Any:
        result = execute(sql, *args)
        renewing = threading.current_thread().name.startswith("distlocks-worker")
        if renewing and sql.startswith("BEGIN") and not under_way.is_set():
            under_way.set()
            threading.Event().wait(0.2)
        return result

    def watch(connection: Any, **kwargs: Any) -> None:
        connection.execute_wrappers.append(dawdle)

    connection_created.connect(watch)
    with db_lock(f"{key}:parent", backend=alias, ttl=4, timeout=0) as lease:
        assert under_way.wait(5)
        code = _fork_and_lock(alias, f"{key}:child")
        first = lease.deadline
        eventually(lambda: lease.lost or lease.deadline > first)
        return {"child": code, "kept": not lease.lost}
