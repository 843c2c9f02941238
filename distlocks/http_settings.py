"""What the DISTLOCKS_HTTP setting says, read when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error

from .conf import InvalidSetting, seconds

# Conflict, Locked, Too Many Requests, Service Unavailable.
STATUSES = (409, 423, 429, 503)
# A day: nobody waits for longer before trying again.
LONGEST_RETRY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How lock errors are answered. Durations are seconds."""

    # Of a LockTimeout.
    status: int = 409
    # None: until the key is likely to be free, at the latest when the holder's lease ends.
    retry_after: float | Callable[[Any], float] | None = None
    max_retry_after: float = 60.0
    # Is a BackendUnavailable answered too, with 503?
    unavailable: bool = True


NAMES = {
    "STATUS": "status",
    "RETRY_AFTER": "retry_after",
    "MAX_RETRY_AFTER": "max_retry_after",
    "UNAVAILABLE": "unavailable",
}


def answers() -> Answers:
    """The setting, with defaults filled in; InvalidSetting (an ImproperlyConfigured) if wrong."""
    for fault in faults():
        raise fault
    given = getattr(settings, "DISTLOCKS_HTTP", {})
    wanted = {NAMES[name]: value for name, value in given.items()}
    for name in ("retry_after", "max_retry_after"):
        if wanted.get(name) is not None:
            wanted[name] = seconds(wanted[name], name)
    return Answers(**wanted)


def faults() -> Iterator[InvalidSetting]:
    """Everything that is wrong with DISTLOCKS_HTTP."""
    given = getattr(settings, "DISTLOCKS_HTTP", {})
    if not isinstance(given, Mapping):
        yield InvalidSetting(
            61,
            f"DISTLOCKS_HTTP must be a dict, not {type(given).__name__}.",
            "For instance {'STATUS': 423}.",
        )
        return
    for name in given:
        if name not in NAMES:
            yield InvalidSetting(
                61,
                f"DISTLOCKS_HTTP has an unknown entry {name!r}.",
                f"Known are {', '.join(NAMES)}.",
            )
    status = given.get("STATUS", 409)
    if isinstance(status, bool) or status not in STATUSES:
        yield InvalidSetting(
            62,
            f"DISTLOCKS_HTTP['STATUS'] is {status!r}.",
            f"Use one of {', '.join(map(str, STATUSES))}.",
        )
    for name in ("RETRY_AFTER", "MAX_RETRY_AFTER"):
        if name not in given or (name == "RETRY_AFTER" and given[name] is None):
            continue
        try:
            seconds_to_wait(given[name], f"DISTLOCKS_HTTP[{name!r}]")
        except (TypeError, ValueError) as error:
            yield InvalidSetting(63, str(error), "Give seconds or a timedelta.")
    unavailable = given.get("UNAVAILABLE", True)
    if not isinstance(unavailable, bool):
        yield InvalidSetting(
            64,
            f"DISTLOCKS_HTTP['UNAVAILABLE'] must be True or False, not {unavailable!r}.",
            "True answers 503 while the store of the locks does not answer.",
        )


def seconds_to_wait(value: object, name: str) -> float:
    """A length of time after which to try again, in seconds; else TypeError or ValueError."""
    wait = seconds(value, name)
    if not 0 < wait <= LONGEST_RETRY:
        raise ValueError(
            f"{name} is {wait:g} s: it must be more than 0 and at most {LONGEST_RETRY:g} s."
        )
    return wait


def check_http(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """System check of DISTLOCKS_HTTP."""
    return [Error(fault.message, hint=fault.hint, id=fault.check_id) for fault in faults()]
