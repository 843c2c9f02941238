"""The locks among the admin's models: which pages they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import URLPattern

from ..handler import locks
from ..models import Lock
from .addresses import from_address, url_of
from .force import ForceRelease
from .live import LiveLocks
from .one import OneLock
from .parts import ReadOnly

if TYPE_CHECKING:
    LocksAdmin = admin.ModelAdmin[Lock]
else:
    LocksAdmin = admin.ModelAdmin


@admin.register(Lock)
class LockAdmin(ReadOnly, LocksAdmin):
    """Who has which lock now, in every store. The rows of the model are only one of them."""

    def get_urls(self) -> list[URLPattern]:
        return [
            OneLock.at(
                "of/<distlocks_alias:alias>/<distlocks_key:name>/", self, "distlocks_lock_one"
            ),
            ForceRelease.at("force-release/", self, "distlocks_lock_force_release"),
            *super().get_urls(),
        ]

    def changelist_view(  # type: ignore[override]
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponseBase:
        return LiveLocks.as_view(model_admin=self)(request)

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Where the admin's log of what has been done leads."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        try:
            alias, name = from_address(unquote(object_id))
        except ValueError:
            alias = name = ""
        if alias not in locks:
            return redirect(url_of(request, "lock_changelist"))
        return redirect(url_of(request, "lock_one", alias, name))

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        return self.change_view(request, object_id)
