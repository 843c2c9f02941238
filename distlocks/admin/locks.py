"""Who has which lock now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..claims import EXCLUSIVE
from ..keys import SEPARATOR
from ..models import Lock, LockHolder, StoreClock
from .parts import ReadOnly, database_of_locks, to_the_second

# Of a key that several have, so many are named.
SHOWN_HOLDERS = 3


def _who(claim: Lock | LockHolder) -> str:
    if not claim.host:
        return "-"
    label = f" ({claim.label})" if isinstance(claim, LockHolder) and claim.label else ""
    return f"{claim.host}, pid {claim.pid}, {claim.thread}{label}"


if TYPE_CHECKING:
    LocksAdmin = admin.ModelAdmin[Lock]
else:
    LocksAdmin = admin.ModelAdmin


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
