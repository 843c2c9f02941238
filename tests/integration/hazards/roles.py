"""What the processes beside a test do: for the `spawn` fixture."""

import asyncio
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from django.conf import settings
from django.test.utils import override_settings

from distlocks import Lease, db_lock, locks, renewal
from distlocks.backends.base import BaseBackend
from distlocks.renewal import renewer
from distlocks.testing import fake_clock
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
                say("told" if lost else "not told")
            case "end":
                return


def take_with_a_halt(alias: str, *keys: str) -> None:
    """Take several keys, with a halt between the first and the second until told to go on."""
    dialect = locks[alias].dialect  # type: ignore[attr-defined]
    real = dialect.acquire

    def acquire(session: Any, key: str, *args: Any) -> Any:
        taken = real(session, key, *args)
        if key == keys[0]:
            dialect.acquire = real
            say("has the first")
            input()
        return taken

    dialect.acquire = acquire
    lease = db_lock(*keys, backend=alias, timeout=0).try_acquire()
    say("denied" if lease is None else "had them")


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


def be_interrupted(alias: str, held: str, free: str) -> None:
    """Wait for a key that is held, and ask for one that is free; be interrupted (SIGINT) in the
    wait, and when the store has granted the other and the answer is on its way.

    Then end, while the store takes its time to take the grant back.
    """
    backend: Any = locks[alias]
    really_wait, really_try, really_abandon = backend.wait, backend.try_acquire, backend.abandon

    def wait(*args: Any) -> None:
        say("ready")
        # However often it looks meanwhile.
        backend.wait = really_wait
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
        renewer.releases.settle()
        say("stopped")
    input()


def be_interrupted_on_loop(alias: str, held: str, free: str) -> None:
    """See be_interrupted(): the same with asyncio.run(), which turns SIGINT into a cancellation."""
    backend: Any = locks[alias]
    really_wait, really_try = backend.await_, backend.try_acquire
    really_try_on_loop = backend.atry_acquire

    async def wait(*args: Any) -> None:
        say("ready")
        backend.await_ = really_wait
        await really_wait(*args)

    def try_acquire(*args: Any) -> Any:
        # In a thread beside the event loop: the answer comes when the loop has been interrupted.
        answer = really_try(*args)
        say("ready")
        threading.Event().wait(0.2)
        return answer

    async def atry_acquire(*args: Any) -> Any:
        answer = await really_try_on_loop(*args)
        say("ready")
        await asyncio.sleep(20)
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
    if type(backend).atry_acquire is BaseBackend.atry_acquire:
        backend.try_acquire = try_acquire
    else:
        backend.atry_acquire = atry_acquire
    ask(free)


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
    db_lock("third", backend="memory", ttl=2).acquire()
    failed.wait(5)
    fourth = db_lock("fourth", backend="memory", ttl=4).acquire()
    deadline = fourth.deadline
    with suppress(AssertionError):
        eventually(lambda: fourth.deadline > deadline, within=4)
    return {"called": called.wait(5), "renewed": fourth.deadline > deadline}


def renew_after_the_renewer_ended() -> bool:
    """Whether a lease is renewed that is taken when the renewer's thread had ended."""

    def runs() -> bool:
        return any(thread.name == "distlocks-renewer" for thread in threading.enumerate())

    # It ends as soon as there is nothing to renew.
    renewal.LINGER, renewal.IDLE_AFTER = 0.01, 0.0
    db_lock("key", backend="memory", ttl=1).acquire().release()
    eventually(lambda: not runs())
    lease = db_lock("key", backend="memory", ttl=4).acquire()
    first = lease.deadline
    with suppress(AssertionError):
        eventually(lambda: lease.deadline > first, within=4)
    return lease.deadline > first


def close_while_used(alias: str, key: str) -> dict[str, Any]:
    """Close the connections of a backend again and again while threads use it."""
    turns, inside, most = 0, 0, 0
    held = db_lock(f"{key}:held", backend=alias, timeout=0).acquire()

    def work() -> None:
        nonlocal turns, inside, most
        for _ in range(4):
            with db_lock(key, backend=alias, timeout=30):
                inside += 1
                most = max(most, inside)
                turns += 1
                inside -= 1

    workers = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        locks[alias].close()
    held.extend()
    return {"turns": turns, "most at once": most, "kept": held.release()}


def threads_after_changes(alias: str, key: str) -> int:
    """How many threads are left that talk to the store, after several changes of DISTLOCKS."""

    def left() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith(("distlocks-worker", "distlocks-data"))]

    for _ in range(6):
        with override_settings(DISTLOCKS=dict(settings.DISTLOCKS)), fake_clock() as clock:
            lease = db_lock(key, backend=alias, ttl=10, timeout=0).acquire()
            clock.advance(10)
            lease.release()
    locks.close_all()
    with suppress(AssertionError):
        eventually(lambda: len(left()) <= 2, within=2)
    return len(left())
