"""What a project adds to MIDDLEWARE: answers to lock errors, and whom a request's locks are for."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from .context import asked_by
from .exceptions import BackendUnavailable, LockTimeout
from .http import answer, loaded_user

# Characters of what is told.
MAX_METHOD, MAX_PATH, MAX_NAME = 20, 200, 150
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
# Version, trace id, parent id and flags; the second is of all that one request brings about.
_TRACE = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Response = HttpResponseBase | Awaitable[HttpResponseBase]


class _Middleware:
    """For requests on an event loop, and for those in threads."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(cast("Any", self))


class LockErrorsMiddleware(_Middleware):
    """Answers in place of views that have raised LockTimeout, or BackendUnavailable.

    As the setting DISTLOCKS_HTTP says: see distlocks.http. What a middleware raises, and what a
    streaming response does, is not covered.
    """

    def __call__(self, request: HttpRequest) -> Response:
        response: Response = self.get_response(request)
        return response

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Called by Django in a thread, also for asynchronous views, after their transaction."""
        if isinstance(exception, LockTimeout | BackendUnavailable):
            return answer(request, exception)
        return None


class WorkingForMiddleware(_Middleware):
    """Tells with each lock that a view asks for whom and what it is for.

    Into the locks' metadata go `method`, `path` (without its query, cut at 200 characters),
    `request_id` if the request brings one, and `user` (the primary key) and `username` if the user
    has been loaded by then: that is never brought about here. For more or less, override about().
    What a streaming response does after the view has returned is not covered.
    """

    def __call__(self, request: HttpRequest) -> Response:
        if self.is_async:
            return self._acall(request)
        with asked_by(lambda: self.about(request)):
            response: HttpResponseBase = self.get_response(request)
            return response

    async def _acall(self, request: HttpRequest) -> HttpResponseBase:
        with asked_by(lambda: self.about(request)):
            response: HttpResponseBase = await self.get_response(request)
            return response

    def about(self, request: HttpRequest) -> Mapping[str, Any]:
        """What to tell of the request. Called whenever a lock is asked for; must not block."""
        about: dict[str, Any] = {
            "method": _shown(request.method or "", MAX_METHOD),
            "path": _shown(request.path, MAX_PATH),
        }
        if request_id := request_id_of(request):
            about["request_id"] = request_id
        user = loaded_user(request)
        if user is not None and user.is_authenticated:
            about["user"] = user.pk if type(user.pk) is int else _shown(str(user.pk), MAX_NAME)
            about["username"] = _shown(str(user.get_username()), MAX_NAME)
        return about


def request_id_of(request: HttpRequest) -> str:
    """The request's X-Request-ID, or the trace id of its traceparent; '' if neither looks right."""
    given = request.META.get("HTTP_X_REQUEST_ID", "")
    if _REQUEST_ID.fullmatch(given):
        return str(given)
    trace = _TRACE.fullmatch(request.META.get("HTTP_TRACEPARENT", ""))
    return trace[1] if trace else ""


def _shown(text: str, limit: int) -> str:
    """Text from outside as every store can keep it."""
    text = text[:limit]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)[:limit]
    return text
