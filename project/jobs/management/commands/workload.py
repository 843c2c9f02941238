"""`manage.py workload`: work that contends for locks, so that there is something to be seen."""

from __future__ import annotations

import os
import signal
import sys
import threading
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from distlocks import DistlocksError, db_lock
from project.workload import Workload


class Command(BaseCommand):
    help = "Takes and releases locks, some of them for too long, until it is stopped."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--trouble",
            action="store_true",
            help="bring about what an operator has to see: dead holders, lost leases, circles",
        )
        parser.add_argument(
            "--die-with", metavar="KEY", help="take this lock and end without releasing it"
        )
        parser.add_argument(
            "--lifeline",
            action="store_true",
            help="stop when the standard input ends: when whoever has started it is gone",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["die_with"]:
            _die_with(options["die_with"])
        workload = Workload(with_trouble=options["trouble"])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: workload.stopped.set())
        if options["lifeline"]:
            threading.Thread(target=_await_end, args=[workload], daemon=True).start()
        workload.run()


def _await_end(workload: Workload) -> None:
    # Not through sys.stdin: its lock, held by this thread, would abort the exit.
    while os.read(0, 1):
        pass
    workload.stopped.set()


def _die_with(key: str) -> None:
    try:
        db_lock(key, ttl=5, timeout=5, label="batch").acquire()
    except DistlocksError as error:
        sys.exit(str(error))
    os.kill(os.getpid(), signal.SIGKILL)
