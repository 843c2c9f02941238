"""manage.py sweep_locks: clear expired locks, report them, and delete rows that nobody needs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error as DatabaseFault
from django.db import connections

from ... import facts
from ...backends.base import BaseBackend
from ...claims import Holder
from ...exceptions import BackendUnavailable
from ...fences import sweep_guards
from ...history.journal import journal
from ...history.places import Unreadable
from ...history.pruning import prune
from ...recording import recorder
from ...signals import locks_expired
from ..arguments import UNITS, add_backends, age, chosen_backends, duration, whole_number

# Expired locks named one by one; the rest is counted.
NAMED = 20


class Command(BaseCommand):
    """Works through the tables in batches and never touches, nor waits for, a live lock."""

    help = (
        "Clear locks whose lease has expired, report who left them behind, and delete rows of "
        "free locks that have not been used for a day. Live locks are never touched."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add_backends(parser, "all whose store needs it")
        parser.add_argument(
            "--older-than",
            type=age,
            default=UNITS["d"],
            metavar="AGE",
            help="Delete free rows last acquired longer ago than this: seconds, or with a unit as "
            "in 90m, 12h, 7d. At least 1h. Default: 1d.",
        )
        parser.add_argument(
            "--batch-size",
            type=whole_number("rows", 1, 100_000),
            default=1000,
            metavar="N",
            help="Rows looked at per statement. Default: 1000.",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Say what would be done, and change nothing."
        )
        parser.add_argument(
            "--interval",
            type=duration,
            metavar="TIME",
            help="Go on as a service: sweep again this long after each sweep, until SIGTERM or "
            "SIGINT. Seconds, or with a unit.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        backends = self._backends(options["backend"])
        if options["interval"] is None:
            for backend in backends:
                self._sweep(backend, options, lambda: False)
            self._sweep_guards(backends, options)
            self._prune_history(options)
            recorder.flush()
            return
        with stop_on_signal() as stopped:
            while not stopped.is_set():
                steps: list[Callable[[], None]] = [
                    partial(self._sweep, backend, options, stopped.is_set) for backend in backends
                ]
                steps.append(partial(self._sweep_guards, backends, options))
                steps.append(partial(self._prune_history, options))
                for step in steps:
                    try:
                        step()
                    except CommandError as error:
                        # A service outlives its database's restart, and sweeps the others.
                        self.stderr.write(self.style.ERROR(str(error)))
                connections.close_all()
                stopped.wait(options["interval"])
        recorder.flush()
        self.stdout.write("Stopped.")

    def _backends(self, aliases: list[str] | None) -> list[BaseBackend]:
        backends = chosen_backends(
            aliases,
            lambda backend: backend.supports_sweep,
            not_able=lambda alias: (
                f"The backend {alias!r} has nothing to sweep: its store forgets expired locks by "
                f"itself."
            ),
            none_able="No configured lock backend has anything to sweep.",
        )
        # Several aliases may share one table.
        chosen: dict[object, BaseBackend] = {}
        for backend in backends:
            chosen.setdefault(backend.sweep_scope, backend)
        return list(chosen.values())

    def _sweep(
        self, backend: BaseBackend, options: dict[str, Any], stopped: Callable[[], bool]
    ) -> None:
        began = time.monotonic()
        examined = deleted = expired = 0
        dry_run = options["dry_run"]
        try:
            with progress(self, backend.alias, options["verbosity"]) as advance:
                for batch in backend.sweep(
                    older_than=options["older_than"],
                    batch_size=options["batch_size"],
                    dry_run=dry_run,
                ):
                    examined += batch.examined
                    deleted += batch.deleted
                    for holder in batch.expired:
                        expired += 1
                        if expired <= NAMED or options["verbosity"] > 1:
                            self._report(holder)
                    if batch.expired and not dry_run:
                        journal.note_expired(facts.EXPIRED, backend, batch.expired, None)
                        recorder.send(
                            locks_expired,
                            type(backend),
                            alias=backend.alias,
                            keys=tuple(holder.key for holder in batch.expired),
                            holders=batch.expired,
                        )
                    advance(batch.examined)
                    if stopped():
                        break
        except BackendUnavailable as error:
            raise CommandError(
                f"{backend.alias}: {error} What was swept before stays swept."
            ) from error
        if expired > NAMED and options["verbosity"] <= 1:
            self.stdout.write(f"  … and {expired - NAMED} more (-v 2 names all).")
        verbs = ("would clear", "would delete") if dry_run else ("cleared", "deleted")
        self.stdout.write(
            f"{backend.alias}: examined {examined} rows, {verbs[0]} {expired} expired, {verbs[1]} "
            f"{deleted} free, in {time.monotonic() - began:.1f} s."
        )

    def _sweep_guards(self, backends: list[BaseBackend], options: dict[str, Any]) -> None:
        databases = {alias for backend in backends for alias in backend.params.guard_databases}
        for alias in sorted(databases):
            try:
                deleted = sweep_guards(
                    alias, batch_size=options["batch_size"], dry_run=options["dry_run"]
                )
            except DatabaseFault as error:
                raise CommandError(f"The guards on the database {alias!r}: {error}") from error
            verb = "would delete" if options["dry_run"] else "deleted"
            self.stdout.write(f"guards on {alias}: {verb} {deleted}.")

    def _prune_history(self, options: dict[str, Any]) -> None:
        verb = "would delete" if options["dry_run"] else "deleted"
        try:
            for pruned in prune(
                options["backend"], batch_size=options["batch_size"], dry_run=options["dry_run"]
            ):
                self.stdout.write(f"history on {pruned.database}: {verb} {pruned}.")
        except Unreadable as error:
            raise CommandError(f"The history of locks: {error}") from error

    def _report(self, holder: Holder) -> None:
        label = f" ({holder.label})" if holder.label else ""
        self.stdout.write(
            f"  expired: {holder.key!r}, held by {holder.host} pid {holder.pid} thread "
            f"{holder.thread}{label} since {holder.since:%Y-%m-%d %H:%M:%S} UTC, ran out "
            f"{-holder.remaining:.0f} s ago"
        )


@contextmanager
def progress(command: Command, alias: str, verbosity: int) -> Iterator[Callable[[int], None]]:
    """A progress display on a terminal, if rich is installed (distlocks[cli])."""
    if verbosity == 0 or not getattr(command.stdout, "isatty", lambda: False)():
        yield lambda rows: None
        return
    try:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda rows: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,.0f} rows"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, transient=True) as display:
        task = display.add_task(f"Sweeping {alias}", total=None)
        yield lambda rows: display.advance(task, rows)


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, instead of ending the process in mid-batch."""
    stopped = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: stopped.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
