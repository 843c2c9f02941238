"""What the admin's templates need to show locks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django import template
from django.template import RequestContext
from django.utils.translation import gettext_lazy as _

from ..facts import shown

# Of our admin, nothing is imported here: Django loads tags also where there is no admin.
register = template.Library()

# Keys of a holder's metadata that say for whom it works, and how they are called.
ABOUT = (
    (("username", "user"), _("user")),
    (("request_id", "request"), _("request")),
    (("task", "task_id"), _("task")),
)


@register.filter
def key_name(name: str) -> str:
    """A key as operators read it."""
    return shown(name)


@register.filter
def duration(seconds: float | None) -> str:
    """A duration in at most two units, as live.js writes it too."""
    if seconds is None:
        return ""
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


@register.filter
def to_the_second(moment: datetime) -> str:
    """A moment of a store's as operators read it: |date shows it in UTC without USE_TZ."""
    from ..admin import parts

    return parts.to_the_second(moment)


@register.filter
def seconds(value: float) -> str:
    """A duration that has ended, as exact as is worth reading."""
    return duration(value) if value >= 60 else f"{value:.3g} s"


@register.simple_tag(takes_context=True)
def lock_url(context: RequestContext, alias: str, name: str) -> str:
    """The page of one lock."""
    from ..admin.addresses import url_of

    return url_of(context.request, "lock_one", alias, name)


@register.filter
def pairs(values: Any) -> list[tuple[Any, Any]]:
    """The entries of a dict, whatever their names: a template's own way finds one named "items"."""
    return list(values.items()) if isinstance(values, Mapping) else []


@register.filter
def about(metadata: Any) -> list[tuple[str, str]]:
    """For whom a holder works, as far as its metadata say so."""
    if not isinstance(metadata, Mapping):
        return []
    found = []
    for names, called in ABOUT:
        value = next((metadata[name] for name in names if metadata.get(name)), None)
        if value is not None:
            found.append((str(called), str(value)))
    return found
