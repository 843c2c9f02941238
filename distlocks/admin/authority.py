"""Which store grants the locks of a fast path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..claims import MICROSECOND, from_us
from ..models import LockAuthority
from .parts import ReadOnly, database_of_locks, to_the_second, usable

if TYPE_CHECKING:
    AuthoritiesAdmin = admin.ModelAdmin[LockAuthority]
else:
    AuthoritiesAdmin = admin.ModelAdmin


def database_of_authorities() -> str:
    """The database in which fast paths agree on who grants: the first one's."""
    backends: list[Any] = [backend for backend in usable() if backend.supports_authority]
    return backends[0].database.using if backends else database_of_locks()


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
