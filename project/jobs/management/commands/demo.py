"""`manage.py demo`: shows on two real server processes what the locks do, and checks it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.db import connection
from rich.console import Console
from rich.markup import escape

from project.demo.checks import Record, check_all
from project.demo.logs import read_events
from project.demo.report import show_log, show_round, show_summary
from project.demo.scenario import LEASE_SECONDS, LIMIT, Round, play
from project.jobs.models import JobRun
from project.lock_store import lock_store
from project.servers import ServerFailed, orderly_exit, running_servers


class Command(BaseCommand):
    help = "Starts two servers on a fresh database, contends for jobs and checks what they did."

    def handle(self, *args: Any, **options: Any) -> None:
        console = Console(
            file=cast("IO[str]", self.stdout), no_color=options["no_color"], highlight=False
        )
        if not console.is_terminal:
            # Nobody's window: wide enough for the tables.
            console = Console(file=console.file, width=100, highlight=False)
        try:
            with orderly_exit(), tempfile.TemporaryDirectory(prefix="distlocks-demo-") as folder:
                held = self._run(console, Path(folder))
        except KeyboardInterrupt:
            console.print("Interrupted. The servers are stopped.")
            raise SystemExit(130) from None
        except ServerFailed as error:
            console.print(f"[bold red]The demo could not run:[/] {escape(str(error))}")
            raise SystemExit(1) from error
        if not held:
            raise SystemExit(1)

    def _run(self, console: Console, folder: Path) -> bool:
        began = time.monotonic()
        database = folder / "demo.sqlite3"
        with _default_database(database), lock_store(console.print) as store:
            call_command("migrate", verbosity=0)
            with running_servers(
                {"alpha": 0, "beta": 0},
                database,
                log_dir=folder,
                environment={
                    "DEMO_LEASE_SECONDS": str(LEASE_SECONDS),
                    "DEMO_JOB_LIMIT": str(LIMIT),
                    **store.environment,
                },
            ) as servers:
                where = " and ".join(f"{server.name} on {server.url}" for server in servers)
                locks = f", locks in {store.where}" if store.where else ""
                console.print(f"Two servers, one database{locks}: {where}\n")
                shown: list[Round] = []

                def show(played: Round) -> None:
                    shown.append(played)
                    show_round(console, len(shown), played)

                rounds = play(servers, show)
                log = read_events(folder.glob("*.log"))
            records = [_record(run) for run in JobRun.objects.all()]
        answers = [answer for played in rounds for answer in played.answers]
        checks = [played.check for played in rounds] + check_all(records, answers, log, LIMIT)
        show_log(console, log)
        show_summary(console, checks, time.monotonic() - began)
        return all(check.held for check in checks)


@contextlib.contextmanager
def _default_database(path: Path) -> Iterator[None]:
    """Points this process' default connection elsewhere, as Django's own test runner does."""
    former = connection.settings_dict["NAME"]
    connection.close()
    connection.settings_dict["NAME"] = str(path)
    try:
        yield
    finally:
        connection.close()
        connection.settings_dict["NAME"] = former


def _record(run: JobRun) -> Record:
    return Record(
        run=str(run.id),
        job=run.job,
        server=run.server,
        fencing_token=run.fencing_token,
        started_at=run.started_at,
        finished_at=run.finished_at,
        outcome=run.outcome,
    )
