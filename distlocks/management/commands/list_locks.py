"""manage.py list_locks: who holds which lock since when, and who waits for it."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ... import facts
from ...claims import INTENTION
from ...keys import key_of
from ...live.waiters import Waiting
from ..arguments import add_backends, chosen_aliases, whole_number
from ..listing import Listed, Listing, listing
from ..shown import age, length, process, table, until

HEAD = ("KEY", "BACKEND", "MODE", "HELD BY", "LABEL", "FOR", "TIME LEFT")


class Command(BaseCommand):
    """Looks and changes nothing. A store that does not answer does not hide the others."""

    help = (
        "List who holds which lock, since when and for how long unless it is extended, over all "
        "backends. Exit status 1 if one of them could not be asked; the others are listed."
    )
    # Whoever looks for what is wrong must not be stopped by it.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "prefix",
            nargs="?",
            default="",
            metavar="PREFIX",
            help="Only keys that begin with this: of a tree key, its root.",
        )
        add_backends(parser, "all")
        parser.add_argument(
            "--waiters",
            action="store_true",
            help="Also list who waits for each key, since when, until when, and what it holds "
            "meanwhile; and who waits for each other. Some stores know who waits; elsewhere it is "
            "known of those who have waited for a second, if their history is kept.",
        )
        parser.add_argument(
            "--limit",
            type=whole_number("holders", 1, 1_000_000),
            default=1000,
            metavar="N",
            help="List at most so many holders of each backend. Default: 1000.",
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        found = listing(
            chosen_aliases(options["backend"]),
            options["prefix"],
            limit=options["limit"],
            with_waiters=options["waiters"],
        )
        if options["json"]:
            self.stdout.write(json.dumps(document(found), indent=2, ensure_ascii=False))
        else:
            self._show(found, options)
        errors = errors_in(found)
        for what, why in errors.items():
            self.stderr.write(self.style.ERROR(f"{what}: {why}"))
        if errors:
            raise CommandError(f"Could not be asked: {', '.join(errors)}.")

    def _show(self, found: Listing, options: dict[str, Any]) -> None:
        if found.locks:
            head, *lines = table([HEAD, *map(cells, found.locks)])
            self.stdout.write(self.style.MIGRATE_HEADING(head))
            for one, line in zip(found.locks, lines, strict=True):
                self.stdout.write(line)
                for waiting in one.waiters:
                    self.stdout.write(f"    waits: {in_words(waiting)}")
        elif not errors_in(found):
            self.stdout.write("No lock is held.")
        for alias in found.more:
            self.stdout.write(
                f"{alias}: there are more than {options['limit']} (--limit lists more)."
            )
        for _, who in found.circles:
            self.stdout.write(
                self.style.WARNING(f"They wait for each other, and none can go on: {who}.")
            )


def errors_in(found: Listing) -> dict[str, str]:
    """Why what could not be asked could not."""
    history = {f"who waits ({name})": why for name, why in found.history_errors.items()}
    return found.errors | history


def cells(one: Listed) -> tuple[str, ...]:
    """One line of the table."""
    start = (facts.shown(one.name), ", ".join(one.aliases))
    holder = one.holder
    if holder is None:
        return (*start, "free", "", "", "", "")
    who = process(holder.host, holder.pid, holder.thread)
    left = length(holder.remaining)
    if holder.cooling_down:
        return (*start, "cooling down", who, holder.label, length(age(holder.since)), left)
    mode = "further down" if holder.mode == INTENTION else holder.mode
    return (*start, mode, who, holder.label, length(age(holder.since)), left)


def in_words(waiting: Waiting) -> str:
    """Who waits, for how long, until when, and what it holds."""
    label = f" ({waiting.label})" if waiting.label else ""
    who = f"{process(waiting.host, waiting.pid, waiting.thread)}{label}"
    words = [f"{who}, {waiting.mode}, for {length(age(waiting.since))}"]
    if waiting.has_told:
        words.append(
            "for ever"
            if waiting.gives_up is None
            else f"gives up in {length(until(waiting.gives_up))}"
        )
    if waiting.holds:
        held = ", ".join(f"{facts.shown(name)!r} ({alias})" for alias, name in waiting.holds)
        words.append(f"holds {held}")
    return ", ".join(words)


def document(found: Listing) -> dict[str, Any]:
    """The same for programs: moments are ISO 8601 in UTC, lengths of time are seconds."""
    return {
        "locks": [_lock(one) for one in found.locks],
        "circles": [{"owner_ids": owners, "description": who} for owners, who in found.circles],
        "errors": errors_in(found),
        "more": found.more,
    }


def _lock(one: Listed) -> dict[str, Any]:
    told: dict[str, Any] = {"key": key_of(one.name), "backends": one.aliases, "holder": None}
    holder = one.holder
    if holder is not None:
        told["holder"] = {
            "mode": holder.mode,
            "cooling_down": holder.cooling_down,
            "owner_id": holder.owner_id,
            "fencing_token": holder.fencing_token,
            "since": holder.since.isoformat(),
            "age": round(age(holder.since), 3),
            "remaining": round(holder.remaining, 3),
            "host": holder.host,
            "pid": holder.pid,
            "thread": holder.thread,
            "label": holder.label,
            "metadata": dict(holder.metadata),
        }
    told["waiters"] = [_waiter(waiting) for waiting in one.waiters]
    return told


def _waiter(waiting: Waiting) -> dict[str, Any]:
    told: dict[str, Any] = {
        "backend": waiting.alias,
        "owner_id": waiting.owner_id,
        "mode": waiting.mode,
        "since": waiting.since.isoformat(),
        "age": round(age(waiting.since), 3),
        "host": waiting.host,
        "pid": waiting.pid,
        "thread": waiting.thread,
        "label": waiting.label,
        "metadata": dict(waiting.metadata),
    }
    if waiting.has_told:
        told["gives_up"] = waiting.gives_up and waiting.gives_up.isoformat()
        told["holds"] = [{"backend": alias, "key": key_of(name)} for alias, name in waiting.holds]
    return told
