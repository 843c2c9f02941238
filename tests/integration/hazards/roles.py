"""What the processes beside a test do: for the `spawn` fixture."""

import asyncio
import atexit
import gc
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from django.db.backends.signals import connection_created

from distlocks import Lease, LeaseLost, db_lock, locks, renewal
from distlocks.renewal import renewer
from distlocks.testing import flush_events
from tests.waiting import eventually


def say(*words: object) -> None:
    """Print a line for the test to read."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def hold(alias: str, *keys: str, **options: Any) -> None:
    """Hold the keys, and do what the test says: see the cases."""
    lost: list[Lease] = []
    lease = db_lock(*keys, backend=alias, timeout=0, on_lost=lost.append, **options).acquire()
    say("held by", lease.owner_id)
    while True:
        match input():
            case "release":
                say("released", lease.release())
            case "lost?":
                say("lost" if lease.lost else "kept")
            case "told?":
                flush_events()
                say("told" if lost else "not told")
            case "end":
                return


def wait(alias: str, key: str, **options: Any) -> None:
    """Wait for the key, which is held; say when the waiting begins and when it is over."""
    backend = locks[alias]
    real = backend.wait

    def say_so(*args: Any) -> None:
        say("waiting")
        real(*args)

    backend.wait = say_so  # type: ignore[method-assign]
    lease = db_lock(key, backend=alias, **options).acquire()
    say("had by", lease.owner_id)
    input()
    lease.release()


def wait_when_told(alias: str, key: str, **options: Any) -> None:
    """See wait(): but until told to begin, wait for moments only, so that all is warm by then."""
    told = threading.Event()
    threading.Thread(target=lambda: (input(), told.set()), daemon=True).start()
    while not told.is_set():
        db_lock(key, backend=alias, timeout=0.05).try_acquire()
    wait(alias, key, **options)


def try_each(alias: str, keys: list[str]) -> list[str]:
    """Try each key once, when told to begin; those that were had."""
    db_lock(f"{keys[0]}:warm", backend=alias, timeout=0).acquire().release()
    say("ready")
    input()
    return [key for key in keys if db_lock(key, backend=alias, timeout=0).try_acquire()]


def die_at_every_statement(alias: str, key: str) -> dict[int, int]:
    """Acquire one key, and two, again and again in forks, each killed at another statement.

    The n-th of those that ask for `count` keys takes some that begin with `key:count:n:`. Returns
    how many were killed, by count.
    """
    # What takes long to import, so that the forks need not. No connection is opened by that.
    getattr(locks[alias], "dialect", None)
    return {count: _die_at_every_statement(alias, f"{key}:{count}", count) for count in (1, 2)}


def _die_at_every_statement(alias: str, key: str, count: int) -> int:
    number = 0
    while True:
        child = os.fork()
        if not child:
            _acquire_and_die(alias, [f"{key}:{number}:{i}" for i in range(count)], number)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, status
            return number
        number += 1


def _acquire_and_die(alias: str, keys: list[str], number: int) -> None:
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
    try:
        db_lock(*keys, backend=alias, ttl=30, timeout=0).acquire()
        os._exit(0)
    finally:
        os._exit(1)


def be_interrupted(alias: str, held: str, free: str) -> None:
    """Wait for a key that is held, and ask for one that is free; be interrupted (SIGINT) in the
    wait, and when the store has granted the other and the answer is on its way.

    Then end, while the store takes its time to take the grant back.
    """
    backend: Any = locks[alias]
    really_wait, really_try, really_abandon = backend.wait, backend.try_acquire, backend.abandon

    def wait(*args: Any) -> None:
        say("ready")
        really_wait(*args)

    def try_acquire(*args: Any) -> None:
        really_try(*args)
        say("ready")
        threading.Event().wait(20)

    def abandon(*args: Any) -> None:
        threading.Event().wait(0.2)
        really_abandon(*args)

    def ask(key: str) -> None:
        try:
            with db_lock(key, backend=alias, timeout=20, ttl=30):
                say("the body ran")
        except KeyboardInterrupt:
            say("interrupted")

    backend.wait = wait
    backend.abandon = abandon
    ask(held)
    backend.try_acquire = try_acquire
    ask(free)


def be_stopped(alias: str, key: str) -> None:
    """Ask for the key; a signal handler raises an ordinary exception, as time limits of task
    queues do. Stay until told to end.
    """

    class TimeLimit(Exception):
        pass

    def stop(*args: Any) -> None:
        raise TimeLimit

    signal.signal(signal.SIGUSR1, stop)
    say("ready")
    try:
        db_lock(key, backend=alias, timeout=20, ttl=30).acquire()
        say("had it")
    except TimeLimit:
        renewer.settle_releases()
        say("stopped")
    input()


def be_interrupted_on_loop(alias: str, held: str, free: str) -> None:
    """See be_interrupted(): the same with asyncio.run(), which turns SIGINT into a cancellation."""
    backend: Any = locks[alias]
    really_wait, really_try = backend.await_, backend.try_acquire

    async def wait(*args: Any) -> None:
        say("ready")
        await really_wait(*args)

    def try_acquire(*args: Any) -> Any:
        # In a thread beside the event loop: the answer comes when the loop has been interrupted.
        answer = really_try(*args)
        say("ready")
        threading.Event().wait(0.2)
        return answer

    async def work(key: str) -> None:
        async with db_lock(key, backend=alias, timeout=20, ttl=30):
            say("the body ran")

    def ask(key: str) -> None:
        try:
            asyncio.run(work(key))
        except KeyboardInterrupt:
            say("interrupted")

    backend.await_ = wait
    ask(held)
    backend.try_acquire = try_acquire
    ask(free)


def end_while_holding(alias: str, key: str) -> None:
    """End with leases held and renewed, and with a thread and a task that wait.

    The end takes longer than the time between two renewals.
    """
    db_lock(key, backend=alias, ttl=1).acquire()
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
    atexit.register(threading.Event().wait, 0.45)


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
    lease = db_lock(f"{key}:parent", backend=alias, ttl=1, timeout=0).acquire()
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
    own = db_lock(f"{key}:child", backend=alias, ttl=1, timeout=5).acquire()
    first = own.deadline
    eventually(lambda: own.deadline > first, within=5)
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
    with db_lock(f"{key}:parent", backend=alias, ttl=1, timeout=0) as lease:
        assert under_way.wait(5)
        code = _fork_and_lock(alias, f"{key}:child")
        first = lease.deadline
        eventually(lambda: lease.lost or lease.deadline > first, within=5)
        return {"child": code, "kept": not lease.lost}


def go_on_after_code_that_exits() -> dict[str, bool]:
    """Whether callbacks are called, and leases renewed, after a callback and a store have called
    sys.exit() in the threads that do so.
    """
    backend: Any = locks["memory"]
    really_extend = backend.extend
    called, failed = threading.Event(), threading.Event()

    def exit_in_callback(lease: Lease) -> None:
        sys.exit(1)

    def exit_in_store(extensions: Any) -> Any:
        backend.extend = really_extend
        failed.set()
        sys.exit(1)

    first = db_lock("first", backend="memory", ttl=1, on_lost=exit_in_callback).acquire()
    second = db_lock("second", backend="memory", ttl=1, on_lost=lambda lease: called.set())
    for lease in (first, second.acquire()):
        backend.force_release(lease.keys[0])
        eventually(lambda lease=lease: lease.lost)  # type: ignore[misc]
    backend.extend = exit_in_store
    db_lock("third", backend="memory", ttl=1).acquire()
    failed.wait(5)
    fourth = db_lock("fourth", backend="memory", ttl=1).acquire()
    deadline = fourth.deadline
    with suppress(AssertionError):
        eventually(lambda: fourth.deadline > deadline, within=2)
    return {"called": called.wait(2), "renewed": fourth.deadline > deadline}


def renew_after_the_renewer_ended() -> bool:
    """Whether a lease is renewed that is taken when the renewer's thread had ended."""

    def runs() -> bool:
        return any(thread.name == "distlocks-renewer" for thread in threading.enumerate())

    # It ends as soon as there is nothing to renew.
    renewal.LINGER, renewal.IDLE_AFTER = 0.01, 0.0
    db_lock("key", backend="memory", ttl=1).acquire().release()
    eventually(lambda: not runs())
    lease = db_lock("key", backend="memory", ttl=1).acquire()
    first = lease.deadline
    with suppress(AssertionError):
        eventually(lambda: lease.deadline > first, within=2)
    return lease.deadline > first


def close_while_used(alias: str, key: str) -> dict[str, Any]:
    """Close the connections of a backend again and again while threads use it."""
    turns, inside, most = 0, 0, 0
    held = db_lock(f"{key}:held", backend=alias, timeout=0).acquire()

    def work() -> None:
        nonlocal turns, inside, most
        for _ in range(10):
            with db_lock(key, backend=alias, timeout=30):
                inside += 1
                most = max(most, inside)
                turns += 1
                inside -= 1

    workers = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        locks[alias].close()
    held.extend()
    return {"turns": turns, "most at once": most, "kept": held.release()}
