"""manage.py with_lock: run a command while a lock is held, as flock(1) does."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from ... import facts
from ...conf import DEFAULT_ALIAS
from ...exceptions import (
    BackendUnavailable,
    DistlocksError,
    LeaseLost,
    LockTimeout,
    NotSupported,
)
from ...handler import locks
from ...lease import Lease, check_ttl
from ...lock import db_lock
from ...options import FROM_SETTINGS, MAX_LIMIT
from ...recording import recorder
from ..arguments import (
    add_key,
    checked_alias,
    duration,
    exit_when_misused,
    key_of,
    patience,
    whole_number,
)
from ..kept import Ended, KeeperGone, Kept, Signals, passing_on

# Exit statuses, beside the command's own. Where sysexits.h has one for the case, it is that.
HELD = 1
MISUSED, UNAVAILABLE, NO_KEEPER, LOST, MISCONFIGURED = 64, 69, 71, 75, 78
# As shells tell it of a command that cannot be started.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
# Which part of a lease is left to the command to clean up when it cannot be extended.
GRACE = 1 / 6
# How often the deadline is looked at that renewals move on: every so many parts of a ttl, and at
# least once in so many seconds.
LOOKS, LOOK_EVERY = 20, 1.0


class Command(BaseCommand):
    """Its exit status must be the command's: nothing else may speak up with one of its own."""

    help = (
        "Run a command while a lock is held. It is stopped before the lease ends, if that cannot "
        "be renewed. Exit status: the command's (128 and the number of the signal that killed "
        f"it); {HELD} if the lock was not to be had (see -E), {MISUSED} for wrong arguments, "
        f"{UNAVAILABLE} if the store of the locks does not answer, {LOST} if the lease was lost, "
        f"{MISCONFIGURED} for wrong settings, {NOT_EXECUTABLE} or {NOT_FOUND} if the command "
        "cannot be started."
    )
    # An error that they find would look as if the lock were held.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        exit_when_misused(parser, MISUSED)
        add_key(parser)
        parser.add_argument(
            "command",
            # All that follows the command's name is the command's, also what looks like an option.
            nargs=argparse.PARSER,
            metavar="-- COMMAND",
            help="What to run, and its arguments. No shell reads it: sh -c '…' has one do so.",
        )
        parser.add_argument(
            "--backend", default=DEFAULT_ALIAS, metavar="ALIAS", help="An alias of DISTLOCKS."
        )
        waiting = parser.add_mutually_exclusive_group()
        waiting.add_argument(
            "-w",
            "--timeout",
            "--wait",
            type=patience,
            default=FROM_SETTINGS,
            metavar="TIME",
            help="For how long to wait for the lock: seconds, or with a unit as in 5m, or "
            "'forever'. Default: the alias' TIMEOUT.",
        )
        waiting.add_argument(
            "-n",
            "--nonblock",
            action="store_const",
            dest="timeout",
            const=0.0,
            help="Do not wait.",
        )
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument(
            "-s",
            "--shared",
            action="store_true",
            help="Others may hold the lock at the same time, if they share it too.",
        )
        mode.add_argument(
            "--limit",
            type=whole_number("holders", 1, MAX_LIMIT),
            metavar="N",
            help="A permit: up to N hold the lock at the same time.",
        )
        parser.add_argument(
            "--ttl",
            type=duration,
            metavar="TIME",
            help="How long a lease lasts that is not renewed; so long is the lock taken after this "
            "machine has died. Default: the alias' TTL.",
        )
        parser.add_argument(
            "--min-hold",
            type=duration,
            default=0,
            metavar="TIME",
            help="Keep the lock taken for at least so long from its beginning, also when the "
            "command ends earlier or fails.",
        )
        parser.add_argument(
            "--max-hold",
            type=duration,
            metavar="TIME",
            help="Have the lease end, and the command stopped, so long after its beginning.",
        )
        parser.add_argument(
            "--grace",
            type=duration,
            metavar="TIME",
            help="How long before the end of a lease that cannot be renewed the command gets "
            "SIGTERM; just before its end it gets SIGKILL. Less than half of the ttl; default: a "
            "sixth.",
        )
        parser.add_argument(
            "--label", default="", metavar="TEXT", help="Shown to operators beside the holder."
        )
        parser.add_argument(
            "-E",
            "--conflict-exit-code",
            type=whole_number("an exit status", 0, 255),
            default=HELD,
            metavar="N",
            help=f"The exit status if the lock was not to be had in time. Default: {HELD}.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            self._run(options)
        except LockTimeout as error:
            if not options["verbosity"]:
                raise SystemExit(options["conflict_exit_code"]) from None
            raise CommandError(str(error), returncode=options["conflict_exit_code"]) from error
        except LeaseLost as error:
            raise CommandError(str(error), returncode=LOST) from error
        except BackendUnavailable as error:
            raise CommandError(str(error), returncode=UNAVAILABLE) from error
        except NotSupported as error:
            raise CommandError(str(error), returncode=MISUSED) from error
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=MISCONFIGURED) from error
        finally:
            recorder.flush()

    def _run(self, options: dict[str, Any]) -> None:
        command = options["command"]
        if command[0] == "--":
            # Some versions of argparse leave it there.
            command = command[1:]
        if not command:
            raise CommandError("Give the command after '--'.", returncode=MISUSED)
        alias = checked_alias(options["backend"], MISUSED)
        lock, grace = self._lock(alias, options)
        with passing_on() as signals, lock as lease:
            signals.is_waiting = False
            ended = self._run_under(lease, signals, command, grace)
            if ended.was_cut:
                why = why_over(lease) or (
                    f"The --max-hold of {options['max_hold']:g} s is over"
                    if options["max_hold"]
                    else "The lease could not be extended in time"
                )
                raise CommandError(
                    f"{why.rstrip('.')}. The command was stopped, and ended with status "
                    f"{ended.status}.",
                    returncode=LOST,
                )
            if ended.status:
                # What the command has to say counts more than that the lease was lost, too.
                raise SystemExit(ended.status)

    def _lock(self, alias: str, options: dict[str, Any]) -> tuple[db_lock, float]:
        """The lock, and the grace in seconds."""
        ttl = options["ttl"] or locks[alias].params.ttl
        try:
            lock = db_lock(
                key_of(options, MISUSED),
                backend=alias,
                timeout=options["timeout"],
                shared=options["shared"],
                limit=options["limit"],
                ttl=check_ttl(ttl, locks[alias]),
                min_hold=options["min_hold"],
                max_hold=options["max_hold"],
                label=options["label"],
                until_commit=False,
            )
        except (TypeError, ValueError) as error:
            raise CommandError(str(error), returncode=MISUSED) from error
        ttl = min(ttl, options["max_hold"] or ttl)
        grace = options["grace"] or ttl * GRACE
        if grace >= ttl / 2:
            raise CommandError(
                f"--grace {grace:g} s is too long for a lease of {ttl:g} s, which is renewed after "
                f"a third of that, and tried again if need be: give less than {ttl / 2:g} s, or a "
                f"longer --ttl.",
                returncode=MISUSED,
            )
        return lock, grace

    def _run_under(self, lease: Lease, signals: Signals, command: list[str], grace: float) -> Ended:
        try:
            with Kept(command, env=environment(lease), until=lease.deadline, grace=grace) as kept:
                signals.go_to(kept)
                return follow(kept, lease)
        except KeeperGone as error:
            raise CommandError(str(error), returncode=NO_KEEPER) from error
        except OSError as error:
            is_there = not isinstance(error, FileNotFoundError)
            raise CommandError(
                f"The command cannot be started: {error.strerror}: {command[0]!r}.",
                returncode=NOT_EXECUTABLE if is_there else NOT_FOUND,
            ) from error


def environment(lease: Lease) -> Mapping[str, str | bytes]:
    """This process's, and what the command may want to know of the lock: its token above all."""
    (key,) = lease.keys
    return {
        **os.environ,
        # In the encoding that keys are compared in, whatever the locale.
        "DISTLOCKS_KEY": facts.shown(key).encode(),
        "DISTLOCKS_TOKEN": str(lease.fencing_token),
        "DISTLOCKS_OWNER_ID": lease.owner_id,
        "DISTLOCKS_BACKEND": lease.backend.alias,
    }


def follow(kept: Kept, lease: Lease) -> Ended:
    """Tell the keeper what becomes of the lease until the command has ended, and how it has."""
    pause = min(lease.ttl / LOOKS, LOOK_EVERY)
    is_lost = False
    while True:
        if not is_lost and (is_lost := lease.lost):
            kept.stop()
        kept.keep_until(lease.deadline)
        ended = kept.wait(pause)
        if ended is not None:
            return ended


def why_over(lease: Lease) -> str:
    """Why the lease is lost, or cannot be extended any more; '' if it can."""
    try:
        lease.check()
    except DistlocksError as error:
        return str(error)
    return lease.ending
