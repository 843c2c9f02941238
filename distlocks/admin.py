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
from .handler import locks
from .models import Lock


def to_the_second(moment: datetime) -> str:
    """`moment` in the current time zone; leases are too short for minutes."""
    return formats.date_format(timezone.localtime(moment), "Y-m-d H:i:s")


def database_of_locks() -> str:
    """The database whose locks are listed: the default backend's, else the first one's."""
    backends = [backend for backend in locks.all() if isinstance(backend, DatabaseBackend)]
    backends.sort(key=lambda backend: backend.alias != "default")
    return backends[0].using if backends else "default"


if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Lock]
else:
    ModelAdmin = admin.ModelAdmin


@admin.register(Lock)
class LockAdmin(ModelAdmin):
    """Who has which lock now, by the clock of the database server. Read-only."""

    list_display = (
        "key",
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
        (None, {"fields": ("key", "state", "since", "until", "fencing_token")}),
        (_("Holder"), {"fields": ("holder", "label", "owner_id", "metadata")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Lock]:
        return Lock.objects.using(database_of_locks()).taken()

    @admin.display(description=_("state"), ordering="owner_id")
    def state(self, lock: Lock) -> Any:
        return _("cooling down") if lock.cooling_down else _("held")

    @admin.display(description=_("holder"), ordering="host")
    def holder(self, lock: Lock) -> str:
        return f"{lock.host}, pid {lock.pid}, {lock.thread}" if lock.host else "-"

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
