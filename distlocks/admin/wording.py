"""How numbers are written for people."""

from __future__ import annotations

from functools import lru_cache

from django.utils import formats
from django.utils.translation import get_language, gettext, ngettext

NOTHING = "\u2013"


def seconds(value: float | None) -> str:
    """A length of time, in the unit in which it is a short number."""
    if value is None:
        return NOTHING
    if value < 0.9995:
        return gettext("%(number)s ms") % {"number": _short(value * 1000)}
    if value < 60:
        return gettext("%(number)s s") % {"number": _short(value)}
    whole = round(value)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return gettext("%(minutes)d min %(seconds)d s") % {"minutes": minutes, "seconds": rest}
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return gettext("%(hours)d h %(minutes)d min") % {"hours": hours, "minutes": minutes}
    days = round(hours / 24)
    return ngettext("%(days)d day", "%(days)d days", days) % {"days": days}


def count(value: float) -> str:
    """How many."""
    return _localized(f"{int(value):,}")


def rate(value: float | None) -> str:
    """How many in a minute."""
    return NOTHING if value is None else _short(value)


def _short(value: float) -> str:
    digits = 0 if value >= 100 or value == 0 else 1 if value >= 10 else 2
    text = f"{value:,.{digits}f}"
    return _localized(text.rstrip("0").rstrip(".") if digits else text)


def _localized(text: str) -> str:
    # Django's own way takes as long as all the rest of a page with thousands of numbers.
    decimal, thousand = _separators(get_language())
    if (decimal, thousand) == (".", ","):
        return text
    return text.translate({ord("."): decimal, ord(","): thousand})


@lru_cache
def _separators(language: str | None) -> tuple[str, str]:
    decimal = formats.get_format("DECIMAL_SEPARATOR", lang=language)
    return decimal, formats.get_format("THOUSAND_SEPARATOR", lang=language)
