"""`manage.py serve`: two server processes on a database that stays, until Ctrl-C."""

from __future__ import annotations

import secrets
import time
from argparse import ArgumentParser
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connection
from django.urls import reverse

from project.kept import kept
from project.lock_store import LockStore, lock_store
from project.servers import (
    Server,
    ServerFailed,
    orderly_exit,
    running_servers,
    running_workload,
)

USERNAME = "admin"


class Command(BaseCommand):
    help = "Serves the job board and the admin on two server processes, on loopback only."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--ports",
            nargs=2,
            type=int,
            default=[8001, 8002],
            metavar="PORT",
            help="where to listen; a port that is taken is replaced by the next free one",
        )
        parser.add_argument(
            "--quiet",
            action="store_true",
            help="only serve: without the processes that take locks, so that there is something "
            "to be seen",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        database = Path(settings.DATABASE)
        call_command("migrate", verbosity=0)
        log_in = _log_in(database.parent / "admin-password")
        connection.close()
        ports = dict(zip(("alpha", "beta"), options["ports"], strict=True))
        try:
            with (
                orderly_exit(),
                lock_store(self._say) as store,
                running_servers(ports, database, environment=store.environment) as servers,
                nullcontext()
                if options["quiet"]
                else running_workload(database, environment=store.environment),
            ):
                self._show(servers, store, database, log_in)
                self._until_stopped(servers)
        except (KeyboardInterrupt, SystemExit):
            self.stdout.write("\nBoth servers are stopped.")
        except ServerFailed as error:
            raise CommandError(str(error)) from error

    def _show(self, servers: list[Server], store: LockStore, database: Path, log_in: str) -> None:
        admin = servers[0].url + reverse("admin:index")
        locks = servers[0].url + reverse("admin:distlocks_lock_changelist")
        charts = servers[0].url + reverse("admin:distlocks_lockrollup_changelist")
        lines = [
            *(f"{server.name:<6} {server.url}/" for server in servers),
            f"admin  {admin}",
            f"locks  {locks}",
            f"charts {charts}",
            *([f"store  {store.where}"] if store.where else []),
            f"log-in {log_in}",
            f"data   {database}",
            "Stop with Ctrl-C. What the servers log follows.",
        ]
        self._say("\n".join(lines))

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()

    def _until_stopped(self, servers: list[Server]) -> None:
        while True:
            for server in servers:
                server.check_alive()
            time.sleep(0.5)


def _log_in(password_file: Path) -> str:
    """How to log in as an administrator; makes the account when there is none."""
    users = get_user_model()._default_manager
    administrators = users.filter(is_superuser=True, is_active=True).order_by("pk")
    administrator = administrators.first()
    if administrator is None:
        password = kept(password_file, lambda: secrets.token_urlsafe(12))
        users.create_superuser(USERNAME, password=password)
        return f"{USERNAME} / {password}"
    name = administrator.get_username()
    if password_file.exists():
        password = password_file.read_text(encoding="utf-8").strip()
        if administrator.check_password(password):
            return f"{name} / {password}"
    return f"{name}, with the password that was set for it"
