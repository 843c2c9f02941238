"""manage.py lock_quarantine: whether Redis servers grant locks, and if not, when they will."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ...backends.base import BaseBackend
from ...exceptions import BackendUnavailable
from ..arguments import add_backends, chosen_backends


class Command(BaseCommand):
    """Ends a quarantine only for who confirms that no process holds a lease from before."""

    help = (
        "Tell for how long a store whose memory of locks is new (after a restart, a failover, a "
        "flush or an eviction) grants none yet; with --end, have it grant them now."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add_backends(parser, "all that know quarantines")
        parser.add_argument(
            "--end",
            action="store_true",
            help="End it now. Only safe if every process that used the store before has ended, or "
            "has no lease any more.",
        )
        parser.add_argument(
            "--noinput", "--no-input", action="store_false", dest="interactive", help="Do not ask."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        for backend in self._backends(options["backend"]):
            try:
                left = backend.quarantine()
                if left and options["end"] and self._is_sure(backend, left, options):
                    backend.quarantine(end=True)
                    self.stdout.write(f"{backend.alias}: quarantine ended, locks are granted.")
                elif left:
                    self.stdout.write(
                        f"{backend.alias}: in quarantine, grants locks again in {left:.1f} s."
                    )
                else:
                    self.stdout.write(f"{backend.alias}: grants locks.")
            except BackendUnavailable as error:
                raise CommandError(f"{backend.alias}: {error}") from error

    def _backends(self, aliases: list[str] | None) -> list[Any]:
        return chosen_backends(
            aliases,
            lambda backend: backend.supports_quarantine,
            not_able=lambda alias: f"The backend {alias!r} knows no quarantine.",
            none_able="No configured lock backend knows a quarantine.",
        )

    def _is_sure(self, backend: BaseBackend, left: float, options: dict[str, Any]) -> bool:
        if not options["interactive"]:
            return True
        self.stdout.write(
            f"{backend.alias} is in quarantine for another {left:.1f} s, because leases from "
            f"before may still be held.\nWhoever holds one then does not know of the next holder."
        )
        return input("End it? Type 'yes' if no process holds a lease from before: ") == "yes"
