"""What the admin's pages share."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib.admin import ModelAdmin
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import formats, timezone
from django.views import View

from ..backends.base import BaseBackend
from ..backends.database import DatabaseBackend
from ..handler import locks

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise


def to_the_second(moment: datetime) -> str:
    """`moment` in the current time zone; leases are too short for minutes."""
    return formats.date_format(timezone.localtime(moment), "Y-m-d H:i:s")


def usable() -> Iterator[BaseBackend]:
    """The backends, without those that are wrongly configured: other pages tell of these."""
    for alias in locks:
        try:
            yield locks[alias]
        except Exception:
            continue


def database_of_locks() -> str:
    """The database whose locks are listed: the default backend's, else the first one's."""
    backends = [backend for backend in usable() if isinstance(backend, DatabaseBackend)]
    backends.sort(key=lambda backend: backend.alias != "default")
    return backends[0].using if backends else "default"


class ReadOnly:
    """Rows that only the locks themselves may write: a deleted or changed one would break what they
    promise."""

    opts: Any

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # Django lets those look too who may change, which is nobody here.
        return request.user.has_perm(f"{self.opts.app_label}.view_{self.opts.model_name}")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class AdminPage(View):
    """A page of ours within the admin: who is not logged in is sent to do so, and who may not see
    the model's rows gets a 403."""

    title: ClassVar[str | _StrPromise] = ""
    template_name: ClassVar[str] = ""
    # Which of the model's permissions the page asks for.
    permissions: ClassVar[tuple[str, ...]] = ("view",)
    # Does it run in a transaction under ATOMIC_REQUESTS?
    atomic: ClassVar[bool] = True
    # Set by at().
    model_admin: ModelAdmin[Any] = None  # type: ignore[assignment]

    @classmethod
    def at(cls, route: str, model_admin: ModelAdmin[Any], name: str) -> URLPattern:
        """The page's place among the URLs of `model_admin`, by the name "admin:" + `name`."""
        view = cls.as_view(model_admin=model_admin)
        if not cls.atomic:
            for database in connections:
                view = transaction.non_atomic_requests(using=database)(view)
        return path(route, model_admin.admin_site.admin_view(view), name=name)

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        # The site's own wrapper has asked only whether it is staff.
        if not all(map(self.may, self.permissions)):
            raise PermissionDenied
        return super().dispatch(request, *args, **kwargs)

    def may(self, action: str) -> bool:
        """Whether the user may do this with the model's rows: "view", "force_release"."""
        opts = self.model_admin.opts
        return self.request.user.has_perm(f"{opts.app_label}.{action}_{opts.model_name}")

    def page(self, *, status: int = 200, **context: Any) -> TemplateResponse:
        """The answer: the template within the admin's frame."""
        opts = self.model_admin.opts
        return TemplateResponse(
            self.request,
            self.template_name,
            {
                **self.model_admin.admin_site.each_context(self.request),
                "title": self.title,
                "opts": opts,
                "app_label": opts.app_label,
                **context,
            },
            status=status,
        )
