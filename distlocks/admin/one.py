"""The page of one lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext_lazy as _

from .. import live
from ..backends.base import BaseBackend
from ..backends.database import DatabaseBackend
from ..claims import INTENTION, Holder
from ..handler import locks
from ..keys import ancestors, check_key, key_of
from ..live.asking import TIME
from ..live.together import told
from ..live.waiters import Waiting, in_queue
from .addresses import address, url_of
from .asked import EVER, State, of_key
from .live import STATES
from .parts import AdminPage
from .past import Past, past, ring
from .queue import queue

# Of those who have a key together, so many are shown; and of the keys below one.
SHOWN_HOLDERS = 100
SHOWN_BELOW = 20
EVERY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What the store says of a key."""

    holders: list[Holder]
    # None where the store keeps no queue.
    waiters: list[Waiting] | None


def now(backend: BaseBackend, name: str) -> Now:
    """Who has the key of this name, and who waits for it."""
    return Now(
        holders=backend.holders_of(name, limit=SHOWN_HOLDERS + 1),
        waiters=in_queue(backend, name),
    )


class OneLock(AdminPage):
    """Who has one lock and who waits for it, what happened to it lately, and what it promises."""

    template_name = "admin/distlocks/lock/one.html"
    results_template_name: ClassVar[str] = "admin/distlocks/lock/one_results.html"

    def get(self, request: HttpRequest, alias: str, name: str) -> HttpResponse:
        context: dict[str, Any] = {"alias": alias, "name": name, "parts": key_of(name)}
        backend, context["problem"] = _backend(alias, name)
        if backend is not None:
            context |= self._known(backend, name)
        if "_results" in request.GET:
            return TemplateResponse(request, self.results_template_name, context)
        return self.page(
            **context,
            status=404 if backend is None else 200,
            title=_("Lock"),
            every=EVERY,
            results_url="?_results=1",
            aliases=list(locks),
        )

    def _known(self, backend: BaseBackend, name: str) -> dict[str, Any]:
        until = time.monotonic() + TIME
        using = backend.using if isinstance(backend, DatabaseBackend) else ""
        questions: dict[str, tuple[str, Callable[[], Any]]] = {
            f"one lock of {backend.alias}": (using, partial(now, backend, name))
        }
        if backend.recorded:
            database = backend.params.history_database
            questions[f"history in {database}"] = (database, partial(past, backend, name))
        answers = list(live.ask(questions).values())
        context: dict[str, Any] = {
            "backend": backend,
            "kind": type(backend).__name__.removesuffix("Backend"),
            "address": address(backend.alias, name),
            "may_force": self.may("force_release"),
            "above": ancestors(name),
            "may_see_history": self.request.user.has_perm("distlocks.view_lockevent"),
            "history_url": self._history(backend.alias, name),
        }
        present: Now | None = None
        before: Past | None = None
        try:
            present = answers[0].result(until)
        except Exception as error:
            context["silent"] = told(error)
        try:
            before = answers[1].result(until) if len(answers) > 1 else None
        except Exception as error:
            context["forgotten"] = told(error)
        if present is not None:
            context |= _present(backend, name, present)
        if before is not None:
            context["circles"] = [
                list(zip(circle, ring(circle), strict=True)) for circle in before.circles
            ]
        holders = present.holders if present else []
        return context | {
            "past": before,
            "queue": queue(holders, present.waiters if present else None, before),
        }

    def _history(self, alias: str, name: str) -> str:
        """Where all of the lock's events are."""
        page = url_of(self.request, "lockevent_changelist")
        asked = State({}).link(**of_key(name), backend=alias, since=EVER)
        return page and page + asked


def _backend(alias: str, name: str) -> tuple[BaseBackend | None, str]:
    """The backend; or why there is none, or no such lock."""
    if alias not in locks:
        return None, "backend"
    try:
        check_key(key_of(name))
    except ValueError as error:
        return None, str(error)
    try:
        return locks[alias], ""
    except Exception as error:
        return None, told(error)


def _present(backend: BaseBackend, name: str, present: Now) -> dict[str, Any]:
    at = time.time()
    holders = present.holders
    modes = {live.mode_of(holder) for holder in holders}
    below = None
    if INTENTION in modes:
        below = live.listing(live.Wanted(backend=backend.alias, below=name, size=SHOWN_BELOW))
    return {
        "present": present,
        "mode": STATES[live.mode_of(holders[0])] if holders else "",
        "holders": [
            {
                "who": holder,
                "state": STATES[live.mode_of(holder)],
                "age": max(at - holder.since.timestamp(), 0.0),
            }
            for holder in holders[:SHOWN_HOLDERS]
        ],
        "more_holders": len(holders) > SHOWN_HOLDERS,
        "below": below,
    }
