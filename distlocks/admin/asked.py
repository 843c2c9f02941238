"""What the address of a page asks for: filters and moments, and links that keep them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from datetime import time as clock_time

from django.conf import settings
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime
from django.utils.http import urlencode

from ..claims import EPOCH, from_us, to_us
from ..keys import MAX_LENGTH, SEPARATOR

ARROW = " → "
# Since when, if since ever.
EVER = "all"
# What stands for anything at the end of a key that is looked for.
STAR = "*"
EARLIEST, LATEST = 1971, 2200
UNITS = {"m": 60, "h": 3600, "d": 86400}
_AGO = re.compile(r"([0-9]{1,6})([mhd])")
_UNQUOTED_PLUS = re.compile(r"(:\d\d(?:\.\d+)?) (\d\d:?\d\d)$")
_SINCE_EPOCH = re.compile(r"[0-9]{9,10}(\.[0-9]{1,6})?")


class NotAMoment(ValueError):
    """No moment can be read from a text."""


def moment_us(text: str) -> int:
    """The moment that a text tells, in µs since the epoch: "24h" is that long ago, "2026-11-30
    19:00" is in the current time zone unless it names its own, digits are seconds since the epoch.
    """
    text = text.strip()
    if ago := _AGO.fullmatch(text):
        return max(to_us(time.time() - int(ago[1]) * UNITS[ago[2]]), 0)
    if _SINCE_EPOCH.fullmatch(text):
        return to_us(float(text))
    try:
        # A plus sign that nobody has quoted arrives as a space.
        moment = parse_datetime(text) or parse_datetime(_UNQUOTED_PLUS.sub(r"\1+\2", text))
        day = None if moment else parse_date(text)
    except ValueError as error:
        raise NotAMoment(text) from error
    if day is not None:
        moment = datetime.combine(day, clock_time())
    if moment is None:
        raise NotAMoment(text)
    # What is far away cannot be told in every time zone, nor to every database.
    if not EARLIEST <= moment.year <= LATEST:
        raise NotAMoment(text)
    if timezone.is_naive(moment):
        zone = timezone.get_current_timezone() if settings.USE_TZ else None
        moment = moment.replace(tzinfo=zone) if zone else moment.astimezone()
    return round((moment - EPOCH) / timedelta(microseconds=1))


def as_name(text: str) -> str:
    """A key, or a pattern, as the tables have it, from how it is shown: see facts.shown()."""
    return without_nul(text).replace(ARROW, SEPARATOR)


def without_nul(text: str) -> str:
    """A text that databases do not refuse, and no longer than any that they have."""
    return text[: 2 * MAX_LENGTH].replace("\0", "")


def of_key(key: str) -> dict[str, str | None]:
    """The parameters that ask the history for this very key, whatever may be read into it."""
    return {"key": key, "exact": "1" if ARROW in key or key.endswith(STAR) else None}


def local(at_us: int) -> datetime:
    """A moment as the page shows it: in the current time zone, without saying so."""
    moment = from_us(at_us)
    return timezone.localtime(moment) if settings.USE_TZ else moment.astimezone()


def as_text(at_us: int) -> str:
    """A moment so that moment_us() understands it, in UTC, to the microsecond."""
    return from_us(at_us).strftime("%Y-%m-%dT%H:%M:%S.%fZ").replace(".000000Z", "Z")


@dataclass(frozen=True, slots=True)
class State:
    """The parameters that a page was asked with, those that it knows and that are not empty."""

    values: Mapping[str, Sequence[str]]

    def link(self, **changes: str | Sequence[str] | None) -> str:
        """The query string of the same page with something else; None takes it out."""
        values = dict(self.values)
        for name, value in changes.items():
            if not value:
                values.pop(name, None)
            else:
                values[name] = [value] if isinstance(value, str) else value
        return "?" + urlencode(values, doseq=True)
