"""What a client is told when the lock that its request needs cannot be had."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import wraps
from inspect import iscoroutine
from typing import Any, TypeVar, cast, overload

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.conf import settings
from django.db import connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist
from django.template.loader import select_template
from django.utils.cache import patch_vary_headers
from django.utils.functional import LazyObject, empty
from django.utils.translation import gettext, ngettext

from . import logs
from .claims import PERMIT, Holder
from .exceptions import BackendUnavailable, LockTimeout
from .facts import shown
from .history.holds import holds
from .http_settings import STATUSES, Answers, answers, seconds_to_wait
from .keys import check_key
from .transactions import testcase_depth

V = TypeVar("V", bound=Callable[..., Any])
LockError = LockTimeout | BackendUnavailable
RetryAfter = float | timedelta | Callable[[LockError], float]

# Seconds after which to try again when the store could not tell who has the key, and when it did
# not answer at all.
UNKNOWN = 1.0
STORE_DOWN = 5.0
# As many holders are shown to those who may know.
SHOWN_HOLDERS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What there is to say about a lock that could not be had."""

    # "locked", "cooling_down" or "locks_unavailable".
    error: str
    status: int
    # Whole seconds.
    retry_after: int
    title: str
    detail: str
    # Only for those who may know: the error's text, keys, and who has them as text and numbers.
    reason: str = ""
    keys: tuple[str, ...] = ()
    holders: tuple[dict[str, Any], ...] = ()


@overload
def answers_lock_errors(view: V) -> V: ...


@overload
def answers_lock_errors(
    *,
    status: int | None = None,
    retry_after: RetryAfter | None = None,
    unavailable: bool | None = None,
) -> Callable[[V], V]: ...


def answers_lock_errors(
    view: V | None = None,
    *,
    status: int | None = None,
    retry_after: RetryAfter | None = None,
    unavailable: bool | None = None,
) -> V | Callable[[V], V]:
    """Answer in place of a view, sync or async, that has raised LockTimeout, or BackendUnavailable.

    `status` is that of a LockTimeout (409, 423, 429 or 503), `retry_after` a length of time or a
    callable that gets the error and returns seconds; with `unavailable=False` a BackendUnavailable
    is left to others. What is not given is as in DISTLOCKS_HTTP. Open transactions around the view
    (ATOMIC_REQUESTS) are rolled back, as they would be by the error. For methods use
    method_decorator().
    """
    if view is not None:
        return _answering(view, {})
    if status is not None and status not in STATUSES:
        raise ValueError(f"status={status!r} is not allowed: use one of {STATUSES}.")
    if unavailable is not None and not isinstance(unavailable, bool):
        raise TypeError(f"unavailable must be True or False, not {unavailable!r}.")
    if retry_after is not None and not callable(retry_after):
        retry_after = seconds_to_wait(retry_after, "retry_after")
    given = {"status": status, "retry_after": retry_after, "unavailable": unavailable}
    wanted = {name: value for name, value in given.items() if value is not None}
    return lambda view: _answering(view, wanted)


def _answering(view: V, wanted: dict[str, Any]) -> V:
    def answered(error: LockError, args: tuple[Any, ...]) -> HttpResponse:
        request = next((arg for arg in args if isinstance(arg, HttpRequest)), None)
        if request is None:
            raise TypeError(
                "answers_lock_errors() is for views, which get an HttpRequest by position. Put it "
                "around a class-based view's dispatch() with method_decorator()."
            ) from error
        response = answer(request, error, replace(answers(), **wanted))
        if response is None:
            raise error
        return response

    async def awaited(response: Awaitable[Any], args: tuple[Any, ...]) -> Any:
        try:
            return await response
        except (LockTimeout, BackendUnavailable) as error:
            # Templates and their context processors may use the database.
            return await sync_to_async(answered)(error, args)

    @wraps(view)
    async def async_view(*args: Any, **kwargs: Any) -> Any:
        return await awaited(view(*args, **kwargs), args)

    @wraps(view)
    def sync_view(*args: Any, **kwargs: Any) -> Any:
        try:
            response = view(*args, **kwargs)
        except (LockTimeout, BackendUnavailable) as error:
            response = answered(error, args)
            _roll_back()
            return response
        # dispatch() of an asynchronous class-based view.
        return awaited(response, args) if iscoroutine(response) else response

    return cast("V", async_view if iscoroutinefunction(view) else sync_view)


def _roll_back() -> None:
    """Have open transactions of this thread rolled back, as if the error had gone through them."""
    for connection in connections.all(initialized_only=True):
        if len(connection.atomic_blocks) > testcase_depth(connection):
            connection.set_rollback(True)


def answer(
    request: HttpRequest, error: LockError, wanted: Answers | None = None
) -> HttpResponse | None:
    """The response that says so; None if such errors are left to others.

    HTML for those who prefer it, which browsers do, else JSON. Keys, hosts and process ids are
    told to staff only, and to everybody with DEBUG.
    """
    wanted = wanted or answers()
    if isinstance(error, BackendUnavailable):
        if not wanted.unavailable:
            return None
        # Django logs only the status of what is answered.
        logs.event(
            logging.ERROR,
            "unavailable",
            "",
            error.keys,
            "A request was answered with 503: %s",
            error,
            path=request.path,
            error=str(error),
        )
    refusal = _refusal(error, wanted)
    if settings.DEBUG or _is_staff(request):
        refusal = replace(
            refusal,
            reason=str(error),
            keys=tuple(map(shown, error.keys)),
            holders=tuple(map(_described, getattr(error, "holders", ())[:SHOWN_HOLDERS])),
        )
    response = None
    if request.get_preferred_type(["application/json", "text/html"]) == "text/html":
        response = _as_html(request, refusal)
    if response is None:
        response = _as_json(refusal)
    response.headers["Retry-After"] = str(refusal.retry_after)
    response.headers["Cache-Control"] = "no-store"
    patch_vary_headers(response, ["Accept"])
    return response


def _refusal(error: LockError, wanted: Answers) -> Refusal:
    holders = error.holders if isinstance(error, LockTimeout) else ()
    if callable(wanted.retry_after):
        wait = wanted.retry_after(error)
    elif wanted.retry_after is not None:
        wait = wanted.retry_after
    elif isinstance(error, BackendUnavailable):
        wait = STORE_DOWN
    else:
        wait = _until_free(holders)
    seconds = max(math.ceil(min(wait, wanted.max_retry_after)), 1)
    again = ngettext(
        "Please try again in %(seconds)d second.",
        "Please try again in %(seconds)d seconds.",
        seconds,
    ) % {"seconds": seconds}
    if isinstance(error, BackendUnavailable):
        kind, status = "locks_unavailable", 503
        title = gettext("Temporarily unavailable")
        why = gettext("A part of this service does not answer, so nothing was done.")
    elif holders and all(holder.cooling_down for holder in holders):
        kind, status = "cooling_down", wanted.status
        title = gettext("Done a moment ago")
        why = gettext("This was done a moment ago and cannot be done again so soon.")
    else:
        kind, status = "locked", wanted.status
        title = gettext("In use at the moment")
        why = gettext("What this needs is being worked on elsewhere.")
    return Refusal(
        error=kind, status=status, retry_after=seconds, title=title, detail=f"{why} {again}"
    )


def _until_free(holders: tuple[Holder, ...]) -> float:
    """Seconds until the key is likely to be free; of permits, until one is."""
    holds.start()
    if not holders:
        return UNKNOWN
    soonest_is_enough = all(holder.mode == PERMIT for holder in holders)
    return (min if soonest_is_enough else max)(map(_rest, holders))


def _rest(holder: Holder) -> float:
    """Not later than the lease's end, after which a dead holder's key is free; sooner if others
    have been so."""
    if holder.cooling_down:
        return holder.remaining
    held = time.time() - holder.since.timestamp()
    likely = holds.rest(check_key(holder.key), held)
    return holder.remaining if likely is None else min(likely, holder.remaining)


def _described(holder: Holder) -> dict[str, Any]:
    return {
        "key": shown(holder.key),
        "mode": holder.mode,
        "cooling_down": holder.cooling_down,
        "label": holder.label,
        "host": holder.host,
        "pid": holder.pid,
        "thread": holder.thread,
        "since": holder.since,
        # JSON knows no infinity: a lock that ends with its transaction has no end that is known.
        "remaining": round(max(holder.remaining, 0.0), 3) if holder.remaining < math.inf else None,
        "metadata": dict(holder.metadata),
    }


def _as_json(refusal: Refusal) -> HttpResponse:
    body: dict[str, Any] = {
        "error": refusal.error,
        "detail": refusal.detail,
        "retry_after": refusal.retry_after,
    }
    if refusal.reason:
        body |= {"reason": refusal.reason, "keys": refusal.keys, "holders": refusal.holders}
    return JsonResponse(body, status=refusal.status)


def _as_html(request: HttpRequest, refusal: Refusal) -> HttpResponse | None:
    """None if the project's template engines do not find ours."""
    try:
        template = select_template([f"distlocks/{refusal.status}.html", "distlocks/409.html"])
    except TemplateDoesNotExist:
        return None
    # As Django's own pages for 404 and 500: context processors may need what is down.
    content = template.render({"refusal": refusal}, request if refusal.status < 500 else None)
    return HttpResponse(content, status=refusal.status)


def _is_staff(request: HttpRequest) -> bool:
    user = loaded_user(request)
    return bool(user and user.is_active and getattr(user, "is_staff", False))


def loaded_user(request: HttpRequest) -> Any | None:
    """The request's user, if somebody has asked for it before: no query, on no account."""
    user = request.__dict__.get("user")
    if isinstance(user, LazyObject) and user.__dict__.get("_wrapped", empty) is empty:
        # What request.auser() has found.
        return request.__dict__.get("_acached_user")
    return user
