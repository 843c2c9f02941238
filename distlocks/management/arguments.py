"""What commands take: lengths of time, numbers, keys and backends, each checked in one place."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from django.core.management.base import CommandError, CommandParser

from ..backends.base import BaseBackend
from ..conf import LONGEST_TTL
from ..handler import locks
from ..keys import Key, check_key

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LEAST_AGE = 3600.0
# What argparse ends a process with that was called with wrong arguments.
ARGPARSE_STATUS = 2


# Values: argparse calls these with the text, and shows what they raise


def duration(text: str) -> float:
    """Seconds in `text`, which may end in a unit; more than none."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    try:
        value = float(number) * UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 < value < 1e10:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no length of time: give seconds, or a number with a unit as in 90m, 12h, "
            f"7d."
        )
    return value


def duration_or_none(text: str) -> float:
    """The same, and 0 for none at all."""
    return 0.0 if text in ("0", *[f"0{unit}" for unit in UNITS]) else duration(text)


def patience(text: str) -> float | None:
    """For how many seconds to wait; None for ever."""
    if text == "forever":
        return None
    try:
        value = duration_or_none(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} Or 'forever'.") from None
    if value > LONGEST_TTL:
        raise argparse.ArgumentTypeError(f"{text!r} is more than a year: write 'forever'.")
    return value


def age(text: str) -> float:
    """An age at which rows may be deleted; seconds."""
    value = duration(text)
    if value < LEAST_AGE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too short: at least 1h, so that a fencing token is never issued twice "
            f"even if the server's clock is set back."
        )
    return value


def whole_number(of: str, least: int, most: int) -> Callable[[str], int]:
    """What reads a whole number of something in these bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number of {of} from {least} to {most}."
            )
        return value

    return read


# Backends


def add_backends(parser: CommandParser, default: str) -> None:
    """The option --backend, which may be repeated; `default` says what goes without it."""
    parser.add_argument(
        "--backend",
        action="append",
        metavar="ALIAS",
        help=f"An alias of DISTLOCKS; may be repeated. Default: {default}.",
    )


def checked_alias(alias: str, status: int = 1) -> str:
    """The alias, if it is one of DISTLOCKS; else an error that ends the process with `status`."""
    if alias not in list(locks):
        raise CommandError(
            f"There is no lock backend {alias!r}. Configured are: {', '.join(locks)}.",
            returncode=status,
        )
    return alias


def chosen_aliases(named: Sequence[str] | None, status: int = 1) -> list[str]:
    """The aliases that were named, each once, or all there are."""
    return [checked_alias(alias, status) for alias in dict.fromkeys(named or locks)]


def chosen_backends(
    named: Sequence[str] | None,
    able: Callable[[BaseBackend], bool],
    *,
    not_able: Callable[[str], str],
    none_able: str,
) -> list[Any]:
    """The backends that were named, or all that are able to do what the command is about.

    One that was named and is not able is an error, `not_able` of its alias; so it is, `none_able`,
    when there is none.
    """
    backends = [locks[alias] for alias in chosen_aliases(named)]
    if named:
        for backend in backends:
            if not able(backend):
                raise CommandError(not_able(backend.alias))
    chosen = [backend for backend in backends if able(backend)]
    if not chosen:
        raise CommandError(none_able)
    return chosen


# Keys


def add_key(parser: CommandParser) -> None:
    """The key, and the parts of a tree key below it."""
    parser.add_argument("key", metavar="KEY", help="The key.")
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="NAME",
        help="The key is a tree key: KEY is its root, and this the part below; may be repeated, to "
        'go further down. \'customer:7 --part order:42\' is ("customer:7", "order:42").',
    )


def key_of(options: dict[str, Any], status: int = 1) -> Key:
    """The key that was asked for; what is no key ends the process with `status`."""
    parts = (options["key"], *options["part"])
    key: Key = parts if len(parts) > 1 else parts[0]
    try:
        check_key(key)
    except ValueError as error:
        raise CommandError(str(error), returncode=status) from error
    return key


# Exit statuses


def exit_when_misused(parser: CommandParser, status: int) -> None:
    """Have wrong arguments end the process with `status`, where argparse's own means something
    else."""
    ends = parser.exit

    def end(code: int = 0, message: str | None = None) -> NoReturn:
        ends(status if code == ARGPARSE_STATUS else code, message)

    parser.exit = end  # type: ignore[method-assign, assignment]
