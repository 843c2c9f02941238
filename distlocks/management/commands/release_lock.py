"""manage.py release_lock: free a key over its holder's head."""

from __future__ import annotations

import os
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error as DatabaseFault

from ... import facts
from ...backends.base import BaseBackend
from ...claims import INTENTION, Holder
from ...conf import DEFAULT_ALIAS
from ...exceptions import DistlocksError
from ...force import force_release
from ...handler import locks
from ...keys import SEPARATOR, check_key
from ...recording import recorder
from ..arguments import add_key, checked_alias, key_of
from ..shown import length

# Exit status.
FREE = 3
# Holders named one by one; the rest is counted.
NAMED = 20


class Command(BaseCommand):
    """Frees nobody's key but those of the holders that the operator has seen."""

    help = (
        "Free a lock that somebody holds; first show who that is, and ask. For a holder that is "
        "dead or hangs, and whose lease goes on or is long: others end by themselves. Exit status: "
        f"0 if it was freed, {FREE} if it was free, 1 if it could not be freed or you said no."
    )

    # An operator in a hurry must not be stopped by what is wrong elsewhere.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        add_key(parser)
        parser.add_argument(
            "--backend", default=DEFAULT_ALIAS, metavar="ALIAS", help="An alias of DISTLOCKS."
        )
        parser.add_argument(
            "--reason",
            default="",
            metavar="TEXT",
            help="Why: kept in the history of locks, and in the log, beside your name.",
        )
        parser.add_argument(
            "--yes",
            "--noinput",
            "--no-input",
            action="store_false",
            dest="interactive",
            help="Do not ask.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        key = key_of(options)
        alias = checked_alias(options["backend"])
        shown = facts.shown(key)
        try:
            backend = locks[alias]
            if options["interactive"]:
                self._ask(backend, check_key(key), shown)
            held = force_release(key, backend=alias, reason=options["reason"], by=operator())
        except DatabaseFault as error:
            if released := getattr(error, "released", None):
                self._name(released)
                raise CommandError(
                    f"{shown!r} was freed ({alias}), but it had changed hands, and the guard could "
                    f"not be raised against its last holder, which may still write. {error}"
                ) from error
            raise CommandError(
                f"{shown!r} stays held: a guard could not be raised, and without it its holder "
                f"could still write. Try again. {error}"
            ) from error
        except (DistlocksError, ImproperlyConfigured) as error:
            raise CommandError(f"{alias}: {error}") from error
        finally:
            recorder.flush()
        if not held:
            raise CommandError(f"{shown!r} was free ({alias}).", returncode=FREE)
        self._name(held)
        self.stdout.write(self.style.SUCCESS(f"Freed {shown!r} ({alias})."))

    def _ask(self, backend: BaseBackend, name: str, shown: str) -> None:
        """Return once the operator has agreed to free the key from those who hold it now."""
        agreed: set[tuple[str, int]] = set()
        while True:
            held = holders_of(backend, name)
            if not held:
                raise CommandError(f"{shown!r} is free ({backend.alias}).", returncode=FREE)
            if {(holder.owner_id, holder.fencing_token) for holder in held} <= agreed:
                return
            if agreed:
                self.stdout.write("Meanwhile it has changed hands.")
            self._name(held)
            self.stdout.write(consequences(backend, held))
            try:
                answer = input(f"Type 'yes' to free {shown!r}: ")
            except EOFError:
                raise CommandError(
                    "Nobody is there to be asked, so nothing was freed: use --yes."
                ) from None
            if answer != "yes":
                raise CommandError("Nothing was freed.")
            agreed |= {(holder.owner_id, holder.fencing_token) for holder in held}

    def _name(self, held: list[Holder]) -> None:
        for holder in held[:NAMED]:
            self.stdout.write(f"  {holder}")
        if len(held) > NAMED:
            self.stdout.write(f"  … and {len(held) - NAMED} more.")


def holders_of(backend: BaseBackend, name: str) -> list[Holder]:
    """Who has the key of this name, or one below it."""
    return [
        holder
        for holder in backend.holders(name)
        # That one below is held, its own line says.
        if holder.mode != INTENTION
        and (check_key(holder.key) + SEPARATOR).startswith(name + SEPARATOR)
    ]


def consequences(backend: BaseBackend, held: list[Holder]) -> str:
    """What the operator should know before."""
    if all(holder.cooling_down for holder in held):
        return (
            "Nobody works under it any more: it is only kept for its minimum hold, which keeps a "
            "job from running twice."
        )
    databases = ", ".join(map(repr, backend.params.guard_databases))
    guards = (
        f"The guards in {databases} are raised: what they write there under lease.atomic() is "
        f"refused from now on."
        if databases
        else "No guard keeps out what they still write: GUARD_DATABASES names no database."
    )
    soon = length(backend.params.max_ttl / 3)
    return (
        f"Others may have it at once. Who holds it, if it still runs, learns that within {soon}, "
        f"and may go on as if it had it until then. {guards}"
    )


def operator() -> str:
    """Who runs this, as the system knows them; who has become another user, by their own name."""
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # Nobody the system has a name for, as in many containers.
        user = f"user {os.getuid()}" if hasattr(os, "getuid") else "unknown"
    before = os.environ.get("SUDO_USER", "")
    return f"{before} as {user}" if before and before != user else user
