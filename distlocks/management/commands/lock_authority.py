"""manage.py lock_authority: which store grants the locks of a fast path, and changes by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ...backends.phases import SAID
from ...claims import MICROSECOND, from_us
from ...clock import Clock
from ...exceptions import BackendUnavailable
from ..arguments import add_backends, chosen_backends

if TYPE_CHECKING:
    from ...backends.fastpath import FastPathBackend
    from ...backends.fastpath.changes import Mode

# Seconds between two looks while a change is followed.
PAUSE = 0.5


class Command(BaseCommand):
    """A change by hand is confirmed, and followed to its end: no other process may be under way."""

    help = (
        "Tell which store grants the locks of a fast path, since when and why; take the authority "
        "from Redis (--drain) or let it return there (--return)."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add_backends(parser, "every fast path")
        change = parser.add_mutually_exclusive_group()
        change.add_argument(
            "--drain",
            action="store_true",
            help="Have the database take over from Redis, and keep it so until --return: before "
            "work on Redis, for instance. Nobody is granted a lock until the leases from Redis "
            "have ended.",
        )
        change.add_argument(
            "--return",
            action="store_true",
            dest="back",
            help="Let Redis grant again as soon as it is healthy and the leases of the database "
            "have ended.",
        )
        parser.add_argument(
            "--end-leases",
            action="store_true",
            help="With --return: do not wait for long leases of the database to be released. They "
            "are no longer extended, and end within MAX_TTL.",
        )
        parser.add_argument(
            "--why", default="", metavar="TEXT", help="What the others are told as the reason."
        )
        parser.add_argument(
            "--no-follow",
            action="store_false",
            dest="follow",
            help="Do not wait for the end of the change: processes that use the locks carry it on.",
        )
        parser.add_argument(
            "--noinput", "--no-input", action="store_false", dest="interactive", help="Do not ask."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["end_leases"] and not options["back"]:
            raise CommandError("--end-leases goes with --return.")
        for backend in self._backends(options["backend"]):
            try:
                self._handle(backend, options)
            except BackendUnavailable as error:
                raise CommandError(f"{backend.alias}: {error}") from error

    def _handle(self, backend: FastPathBackend, options: dict[str, Any]) -> None:
        authority = backend.authority
        mode = authority.look()
        self._tell(backend, mode)
        if options["drain"] and self._is_sure(backend, mode, "drain", options):
            mode = authority.drain(options["why"] or "Taken from Redis by an operator.")
            self._follow(backend, mode, "db", options)
        elif options["back"] and self._is_sure(backend, mode, "return", options):
            mode = authority.resume(
                options["why"] or "Returned to Redis by an operator.",
                end_leases=options["end_leases"],
            )
            self._follow(backend, mode, "redis", options)

    def _backends(self, aliases: list[str] | None) -> list[FastPathBackend]:
        return chosen_backends(
            aliases,
            lambda backend: backend.supports_authority,
            not_able=lambda alias: f"The backend {alias!r} is no fast path: it has one store only.",
            none_able="No configured lock backend is a fast path.",
        )

    def _tell(self, backend: FastPathBackend, mode: Mode) -> None:
        row = mode.row
        since = (row.now_us - row.since_us) / MICROSECOND
        pinned = ", pinned until --return" if row.pinned else ""
        self.stdout.write(
            f"{backend.alias}: {SAID[row.phase]} (epoch {row.epoch}, for {since:.0f} s, since "
            f"{from_us(row.since_us):%Y-%m-%d %H:%M:%S} UTC{pinned}). {row.why}"
        )
        if backend.authority.ailment:
            self.stdout.write(f"{backend.alias}: {backend.authority.ailment}")

    def _is_sure(
        self, backend: FastPathBackend, mode: Mode, what: str, options: dict[str, Any]
    ) -> bool:
        if not options["interactive"]:
            return True
        if what == "drain":
            last = backend.settings.terms.drained_after(mode.row)
            price = f"For {last:.1f} s nobody is granted a lock; then the database grants."
        else:
            longest = mode.row.max_ttl_us / MICROSECOND
            price = f"For up to {longest:.1f} s, as a rule, nobody is granted a lock; then Redis "
            price += "grants."
            if options["end_leases"]:
                price += " Leases of the database are no longer extended: their holders lose them."
        self.stdout.write(
            f"{backend.alias}: {price} Leases that are held run to their deadlines and are not "
            f"extended."
        )
        return input(f"Type '{what}' to do it: ") == what

    def _follow(
        self, backend: FastPathBackend, mode: Mode, phase: str, options: dict[str, Any]
    ) -> None:
        self._tell(backend, mode)
        told = mode, backend.authority.ailment
        while options["follow"] and mode.phase != phase:
            backend.authority.wait_for_change(mode, Clock().now() + PAUSE)
            mode = backend.authority.look()
            news = mode, backend.authority.ailment
            if (news[0].epoch, news[0].phase, news[1]) != (told[0].epoch, told[0].phase, told[1]):
                self._tell(backend, mode)
                told = news
