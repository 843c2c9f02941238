"""What the processes of the Redis benchmarks do: many threads that want the same lock."""

import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.environment import Process
from benchmarks.redis.entrants import entrant

MODULE = "benchmarks.redis.waiters"


class Crowd:
    """Threads in processes, and a holder here whom they all find there first."""

    def __init__(self, workers: list[Process], name: str, key: str, threads: int) -> None:
        self.workers = workers
        self.threads = threads
        self._entrant = entrant(name)
        self._name, self._key = name, key
        self._held = self._entrant.hold(key)

    def begin(self, function: str, *args: Any) -> None:
        """Let the threads of all processes run a function that is named below."""
        many, more = divmod(self.threads, len(self.workers))
        for number, worker in enumerate(self.workers):
            count = many + (number < more)
            worker.begin("start", function, self._name, self._key, count, *args)
        for worker in self.workers:
            worker.answer()

    def settle(self) -> None:
        """Until all threads wait, however they do that."""
        time.sleep(0.3 + 0.002 * self.threads)

    def let(self) -> float:
        """Release, and when."""
        at = time.monotonic()
        self._entrant.release(self._held)
        return at

    def finish(self) -> list[Any]:
        """What the threads have returned."""
        for worker in self.workers:
            worker.begin("finish")
        return [answer for worker in self.workers for answer in worker.answer()]

    def clear(self) -> None:
        self._entrant.clear(self._key)


# In the processes

_threads: list[threading.Thread] = []
_found: list[Any] = []
_failed: list[BaseException] = []


def start(function: str, name: str, key: str, count: int, *args: Any) -> None:
    """Run a function in so many threads."""
    _found.clear()
    # Whatever they share is made before they want it at once.
    entrant(name)
    begun = threading.Barrier(count + 1)
    work: Callable[..., Any] = globals()[function]

    def run() -> None:
        begun.wait()
        try:
            _found.append(work(entrant(name), key, *args))
        except BaseException as error:
            _failed.append(error)

    _threads[:] = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in _threads:
        thread.start()
    begun.wait()


def finish() -> list[Any]:
    """What all threads have returned."""
    for thread in _threads:
        thread.join()
    if _failed:
        raise _failed[0]
    return _found


def once(who: Any, key: str) -> float:
    """Wait, have it, and let the next one have it; when that was done."""
    who.release(who.acquire(key))
    return time.monotonic()


def loop(who: Any, key: str, hold: float, until: float) -> int:
    """Have it again and again; how many times until that moment."""
    times = 0
    while time.monotonic() < until:
        held = who.acquire(key)
        if hold:
            time.sleep(hold)
        times += time.monotonic() < until
        who.release(held)
    return times
