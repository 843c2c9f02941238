"""What goes on in the demo while nobody clicks: work of a small shop that contends for its locks.

Beside the ordinary there is what an operator has to know when it happens: work that takes too long,
processes that die with a lock, two that wait for each other.
"""

from __future__ import annotations

import io
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from django.core.management import call_command
from django.db import connections

from distlocks import DistlocksError, db_lock

logger = logging.getLogger(__name__)

BASE_DIR = Path(__file__).resolve().parent.parent
# Of each process: how many of them work.
THREADS = 6
# Seconds between two of the troubles, about; and between two sweeps.
TROUBLE_EVERY = 40.0
SWEEP_EVERY = 20.0
CUSTOMERS, ORDERS, ARTICLES = 4, 12, 3

Work = Callable[[], object]


def _takes(low: float, high: float) -> None:
    time.sleep(random.uniform(low, high))


@db_lock("order:{number}", timeout=3, label="charge the order")
def charge(number: int) -> None:
    """Short, and nearly always free."""
    _takes(0.05, 0.4)


@db_lock("stock:{article}", timeout=8, label="book the stock")
def book(article: int) -> None:
    """Few keys for many: who comes waits."""
    _takes(0.2, 1.2)


@db_lock("prices", on_held="skip", timeout=0, min_hold=2, label="refresh the prices")
def refresh_prices() -> None:
    """By one, and not too often: the others skip it."""
    _takes(0.1, 0.5)


def read_report() -> None:
    """Beside other readers."""
    with db_lock("report:daily", shared=True, timeout=10, label="read the report"):
        _takes(0.5, 2)


def write_report() -> None:
    """Alone: readers that come later wait."""
    with db_lock("report:daily", timeout=15, label="write the report"):
        _takes(0.5, 1.5)


def export() -> None:
    """By two at a time."""
    with db_lock("export", limit=2, timeout=6, backend="turns", label="export"):
        _takes(1, 3)


def ship() -> None:
    """An order of a customer's: others of the same customer go on."""
    customer, order = random.randrange(CUSTOMERS), random.randrange(ORDERS)
    with db_lock((f"customer:{customer}", f"order:{order}"), timeout=5, label="ship the order"):
        _takes(0.2, 0.8)


def merge_customer() -> None:
    """A customer as a whole."""
    with db_lock(f"customer:{random.randrange(CUSTOMERS)}", timeout=10, label="merge customers"):
        _takes(0.5, 2)


def transfer() -> None:
    """Two keys at once, in whatever order: nobody waits for each other."""
    first, second = random.sample(range(5), 2)
    with db_lock(f"account:{first}", f"account:{second}", timeout=5, label="transfer"):
        _takes(0.1, 0.6)


ORDINARY: tuple[tuple[int, Work], ...] = (
    (30, lambda: charge(random.randrange(ORDERS))),
    (20, lambda: book(random.randrange(ARTICLES))),
    (10, refresh_prices),
    (12, read_report),
    (4, write_report),
    (8, export),
    (10, ship),
    (3, merge_customer),
    (10, transfer),
)


def import_catalogue() -> None:
    """For much too long, while others want the stock."""
    with db_lock(*[f"stock:{article}" for article in range(ARTICLES)], timeout=30, label="import"):
        _takes(10, 18)


def die_with_a_lock() -> None:
    """A process ends with the lock in its hands: it comes free with its lease."""
    subprocess.run(
        [sys.executable, "manage.py", "workload", "--die-with", f"batch:{random.randrange(3)}"],
        cwd=BASE_DIR,
        env={**os.environ, "DEMO_SERVER_NAME": "batch"},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def settle_crosswise() -> None:
    """Two that take two locks one after the other, each in its own order."""
    together = threading.Barrier(2)

    def settle(first: str, second: str, timeout: float) -> None:
        try:
            with db_lock(first, timeout=10, label="settle"):
                together.wait(10)
                with db_lock(second, timeout=timeout, label="settle"):
                    _takes(0.1, 0.2)
        except (DistlocksError, threading.BrokenBarrierError):
            together.abort()

    threads = [
        threading.Thread(target=settle, args=("ledger:a", "ledger:b", 12), name="settle a"),
        threading.Thread(target=settle, args=("ledger:b", "ledger:a", 25), name="settle b"),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def overslept() -> None:
    """A lease that is not renewed, and work that takes longer."""
    with db_lock(f"order:{random.randrange(ORDERS)}", ttl=1, renew=False, label="overslept"):
        _takes(1.2, 2)


TROUBLE: tuple[Work, ...] = (import_catalogue, die_with_a_lock, settle_crosswise, overslept)


class Workload:
    """Threads that work until they are told to stop."""

    def __init__(self, *, with_trouble: bool) -> None:
        self.stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"worker {number}", daemon=True)
            for number in range(1, THREADS + 1)
        ]
        if with_trouble:
            self._threads.append(
                threading.Thread(target=self._make_trouble, name="trouble", daemon=True)
            )
            self._threads.append(threading.Thread(target=self._sweep, name="sweep", daemon=True))

    def run(self) -> None:
        """Work until `stopped` is set."""
        for thread in self._threads:
            thread.start()
        self.stopped.wait()

    def _work(self) -> None:
        weights, works = zip(*ORDINARY, strict=True)
        while not self.stopped.is_set():
            self._do(random.choices(works, weights)[0])
            self.stopped.wait(random.uniform(0.1, 1.0))

    def _make_trouble(self) -> None:
        turn = 0
        # Not for long after the start: a newcomer looks at once.
        self.stopped.wait(5)
        while not self.stopped.is_set():
            self._do(TROUBLE[turn % len(TROUBLE)])
            turn += 1
            self.stopped.wait(TROUBLE_EVERY * random.uniform(0.5, 1.0))

    def _sweep(self) -> None:
        while not self.stopped.wait(SWEEP_EVERY):
            self._do(lambda: call_command("sweep_locks", verbosity=0, stdout=io.StringIO()))

    def _do(self, work: Work) -> None:
        try:
            work()
        except DistlocksError as error:
            # What has become of it stands in the history.
            logger.debug("%s", error)
        except Exception:
            logger.exception("workload.failed")
        finally:
            connections.close_all()
