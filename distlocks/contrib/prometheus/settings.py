"""What the DISTLOCKS_PROMETHEUS setting says, read when it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error

from ...conf import InvalidSetting

DEFAULT_PATTERNS = 50
# Each is some forty time series for each backend and process.
MOST_PATTERNS = 1_000


def max_patterns() -> int:
    """How many key patterns are told apart; the default if the setting is wrong, which its system
    check tells."""
    if any(faults()):
        return DEFAULT_PATTERNS
    wanted: int = getattr(settings, "DISTLOCKS_PROMETHEUS", {}).get(
        "MAX_PATTERNS", DEFAULT_PATTERNS
    )
    return wanted


def faults() -> Iterator[InvalidSetting]:
    """Everything that is wrong with DISTLOCKS_PROMETHEUS."""
    given = getattr(settings, "DISTLOCKS_PROMETHEUS", {})
    if not isinstance(given, Mapping):
        yield InvalidSetting(
            65,
            f"DISTLOCKS_PROMETHEUS must be a dict, not {type(given).__name__}.",
            "For instance {'MAX_PATTERNS': 20}.",
        )
        return
    for name in given:
        if name != "MAX_PATTERNS":
            yield InvalidSetting(
                65, f"DISTLOCKS_PROMETHEUS has an unknown entry {name!r}.", "Known is MAX_PATTERNS."
            )
    most = given.get("MAX_PATTERNS", DEFAULT_PATTERNS)
    if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= MOST_PATTERNS:
        yield InvalidSetting(
            65,
            f"DISTLOCKS_PROMETHEUS['MAX_PATTERNS'] must be a whole number, not {most!r}.",
            f"From 0, which tells no patterns apart, to {MOST_PATTERNS}.",
        )


def check_prometheus(app_configs: Sequence[Any] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """System check of DISTLOCKS_PROMETHEUS."""
    return [Error(fault.message, hint=fault.hint, id=fault.check_id) for fault in faults()]
