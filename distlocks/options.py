"""What db_lock() may be given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, cast

from .claims import EXCLUSIVE, PERMIT, SHARED
from .conf import LONGEST_TTL, MIN_TTL, seconds
from .exceptions import LockTimeout
from .keys import check_characters
from .lease import OnLost

Seconds = float | timedelta
OnHeld = Literal["raise", "skip"] | Callable[[LockTimeout], Any]


class FromSettings:
    """The option is not given: the alias' setting counts."""

    def __repr__(self) -> str:
        return "<from settings>"


FROM_SETTINGS = FromSettings()

MAX_LABEL = 200
# Every try counts the holders.
MAX_LIMIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Options:
    """What db_lock() was given, checked as far as that is possible without settings."""

    # Of the claims on the keys: EXCLUSIVE, SHARED or PERMIT; the latter with a limit.
    mode: str
    limit: int
    ttl: float | None
    timeout: float | FromSettings | None
    renew: bool
    max_hold: float | None
    min_hold: float
    on_held: OnHeld
    on_lost: OnLost | None
    until_commit: bool
    label: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    alias: str


def options_of(*given: Any) -> Options:
    """See check_options(): remembers what it has found good, as long as it is plain values."""
    *_, on_held, on_lost, _, _, metadata, _ = given
    if metadata is None and on_lost is None and on_held == "raise":
        try:
            return _remembered(*given)
        except TypeError:
            # One that cannot be looked up: what is wrong with it, the check says.
            pass
    return check_options(*given)


def check_options(
    shared: object,
    limit: object,
    ttl: Any,
    timeout: object,
    renew: object,
    max_hold: object,
    min_hold: object,
    on_held: object,
    on_lost: object,
    until_commit: object,
    label: object,
    metadata: object,
    backend: object,
) -> Options:
    """The options, if they are such; else TypeError or ValueError, with the way out."""
    shared = _flag(shared, "shared")
    if shared and limit is not None:
        raise TypeError(
            "db_lock() takes shared=True or limit=…, not both: shared is without a limit, and "
            "keeps permits out."
        )
    return Options(
        mode=SHARED if shared else EXCLUSIVE if limit is None else PERMIT,
        limit=_limit(limit),
        ttl=None if isinstance(ttl, FromSettings) else seconds(ttl, "ttl"),
        timeout=timeout if isinstance(timeout, FromSettings) else _timeout(timeout),
        renew=_flag(renew, "renew"),
        max_hold=None if max_hold is None else _span(max_hold, "max_hold", MIN_TTL),
        min_hold=_span(min_hold, "min_hold", 0.0),
        on_held=_on_held(on_held),
        on_lost=_on_lost(on_lost),
        until_commit=_flag(until_commit, "until_commit"),
        label=_label(label),
        metadata=checked_metadata(metadata),
        alias=_alias(backend),
    )


# By type too: 1 is not True here.
_remembered = lru_cache(maxsize=512, typed=True)(check_options)


def _limit(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"limit must be an int, not {type(value).__name__} ({value!r}).")
    if not 1 <= value <= MAX_LIMIT:
        raise ValueError(
            f"limit={value} is not allowed: from 1 to {MAX_LIMIT} holders may be let in at once."
        )
    return value


def _timeout(value: object) -> float | None:
    return None if value is None else _span(value, "timeout", 0.0)


def _span(value: object, name: str, least: float) -> float:
    span = seconds(value, name)
    if not least <= span <= LONGEST_TTL:
        raise ValueError(
            f"{name}={span:g} s is not allowed: it must be from {least:g} to {LONGEST_TTL:g} s."
        )
    return span


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}.")
    return value


def _on_held(value: object) -> OnHeld:
    if value not in ("raise", "skip") and not callable(value):
        raise ValueError(f"on_held must be 'raise', 'skip' or a callable, not {value!r}.")
    return cast("OnHeld", value)


def _on_lost(value: object) -> OnLost | None:
    if value is not None and not callable(value):
        raise TypeError(f"on_lost must be a callable that gets the lease, not {value!r}.")
    return cast("OnLost | None", value)


def _label(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"label must be a str, not {type(value).__name__} ({value!r}).")
    if len(value) > MAX_LABEL:
        raise ValueError(f"label has {len(value)} characters; at most {MAX_LABEL} are allowed.")
    check_characters(value, f"label {value!r}")
    return value


def checked_metadata(value: object) -> Mapping[str, Any]:
    """The metadata as a store will give it back, if it can; else TypeError or ValueError."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"metadata must be a dict of JSON values, not {type(value).__name__}.")
    import json

    try:
        # A copy, as the store will give it back: later changes to the caller's do not show.
        copy: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
        for text in _texts(copy):
            check_characters(text, f"metadata text {text!r}", allowed="\t\n\r")
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"metadata must hold what JSON can express (text, numbers, lists, dicts): {error}"
        ) from error
    return copy


def _texts(value: object) -> Iterator[str]:
    """All text in a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _alias(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"backend must be an alias of DISTLOCKS, not {value!r}.")
    return value
