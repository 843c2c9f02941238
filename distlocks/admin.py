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
from .claims import EXCLUSIVE, MICROSECOND, from_us
from .handler import locks
from .keys import SEPARATOR
from .models import Lock, LockAuthority, LockHolder, StoreClock

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


def database_of_authorities() -> str:
    """The database in which fast paths agree on who grants: the first one's."""
    backends: list[Any] = [backend for backend in locks.all() if backend.supports_authority]
    return backends[0].database.using if backends else database_of_locks()


def _who(claim: Lock | LockHolder) -> str:
    if not claim.host:
        return "-"
    label = f" ({claim.label})" if isinstance(claim, LockHolder) and claim.label else ""
    return f"{claim.host}, pid {claim.pid}, {claim.thread}{label}"


if TYPE_CHECKING:
    LocksAdmin = admin.ModelAdmin[Lock]
    AuthoritiesAdmin = admin.ModelAdmin[LockAuthority]
else:
    LocksAdmin = AuthoritiesAdmin = admin.ModelAdmin


class ReadOnly:
    """Rows that only the locks themselves may write: a deleted or changed one would break what they
    promise."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Lock)
class LockAdmin(ReadOnly, LocksAdmin):
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


@admin.register(LockAuthority)
class LockAuthorityAdmin(ReadOnly, AuthoritiesAdmin):
    """Which store grants the locks of each fast path. Changed by `manage.py lock_authority`."""

    list_display = ("name", "phase", "epoch", "since_when", "why", "pinned")
    ordering = ("name",)
    fieldsets = (
        (None, {"fields": ("name", "phase", "epoch", "since_when", "why", "pinned")}),
        (_("Return to Redis"), {"fields": ("healthy_for", "unhealthy_when", "ends_leases")}),
        (_("Terms"), {"fields": ("mode_lease_s", "max_ttl_s")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[LockAuthority]:
        return LockAuthority.objects.using(database_of_authorities())

    @admin.display(description=_("since"), ordering="since")
    def since_when(self, authority: LockAuthority) -> str:
        return to_the_second(from_us(authority.since))

    @admin.display(description=_("after so many seconds of health"))
    def healthy_for(self, authority: LockAuthority) -> float:
        return authority.patience / MICROSECOND

    @admin.display(description=_("Redis last seen unhealthy"))
    def unhealthy_when(self, authority: LockAuthority) -> str | None:
        at = authority.unhealthy_at
        return to_the_second(from_us(at)) if at else None

    @admin.display(description=_("mode lease (s)"))
    def mode_lease_s(self, authority: LockAuthority) -> float:
        return authority.mode_lease / MICROSECOND

    @admin.display(description=_("longest lease (s)"))
    def max_ttl_s(self, authority: LockAuthority) -> float:
        return authority.max_ttl / MICROSECOND
