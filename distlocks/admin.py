"""Admin pages."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import formats, timezone
from django.utils.translation import gettext_lazy as _

from .backends.database import DatabaseBackend
from .claims import EXCLUSIVE
from .handler import locks
from .keys import SEPARATOR
from .models import Lock, LockHolder, StoreClock

# Of a key that several have, so many are named.
SHOWN_HOLDERS = 3


def to_the_second(moment: datetime) -> str:
    """`moment` in the current time zone; leases are too short for minutes."""
    return formats.date_format(timezone.localtime(moment), "Y-m-d H:i:s")


def database_of_locks() -> str:
    """The database whose locks are listed: the default backend's, else the first one's."""
    backends = [backend for backend in locks.all() if isinstance(backend, DatabaseBackend)]
    backends.sort(key=lambda backend: backend.alias != "default")
    return backends[0].using if backends else "default"


def _who(claim: Lock | LockHolder) -> str:
    if not claim.host:
        return "-"
    label = f" ({claim.label})" if isinstance(claim, LockHolder) and claim.label else ""
    return f"{claim.host}, pid {claim.pid}, {claim.thread}{label}"


if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Lock]
else:
    ModelAdmin = admin.ModelAdmin


@admin.register(Lock)
class LockAdmin(ModelAdmin):
    """Who has which lock now, by the clock of the database server. Read-only."""

    list_display = (
        "path",
        "state",
        "holder",
        "label",
        "since",
        "until",
        "fencing_token",
    )
    search_fields = ("key", "label", "host", "owner_id", "thread")
    search_help_text = _("Search by key, label, host, thread or owner id")
    ordering = ("key",)
    list_per_page = 100
    show_full_result_count = False
    fieldsets = (
        (None, {"fields": ("path", "state", "since", "until", "fencing_token")}),
        (_("Holder"), {"fields": ("holder", "label", "owner_id", "metadata")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Lock]:
        return Lock.objects.using(database_of_locks()).taken()

    @admin.display(description=_("key"), ordering="key")
    def path(self, lock: Lock) -> str:
        return " → ".join(lock.key.split(SEPARATOR))

    @admin.display(description=_("state"), ordering="mode")
    def state(self, lock: Lock) -> Any:
        if lock.mode != EXCLUSIVE:
            return lock.get_mode_display()
        return _("cooling down") if lock.cooling_down else _("held")

    @admin.display(description=_("holder"))
    def holder(self, lock: Lock) -> str:
        if lock.mode == EXCLUSIVE:
            return _who(lock)
        claims = LockHolder.objects.using(lock._state.db).filter(
            key=lock.key, expires_at__gt=StoreClock()
        )
        shown = "; ".join(map(_who, claims[:SHOWN_HOLDERS]))
        more = claims.count() - SHOWN_HOLDERS
        return shown + (f"; {_('and %d more') % more}" if more > 0 else "")

    @admin.display(description=_("since"), ordering="acquired_at")
    def since(self, lock: Lock) -> Any:
        return to_the_second(lock.acquired)

    @admin.display(description=_("until, unless extended"), ordering="expires_at")
    def until(self, lock: Lock) -> Any:
        return to_the_second(lock.expires) if lock.expires else None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Lock | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Lock | None = None) -> bool:
        # A deleted row would take its fencing token along: the next one could be lower.
        return False
