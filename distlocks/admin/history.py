"""The history: what has happened to locks, event by event, searched and exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, QueryDict
from django.urls import URLPattern
from django.utils.translation import gettext as _t
from django.utils.translation import gettext_lazy as _

from .. import conf, facts
from ..history import places
from ..history.events import Cursor, Wanted, every, page
from ..models import EVENT_KINDS, LockEvent
from . import wording
from .addresses import url_of
from .asked import EVER, STAR, NotAMoment, State, as_name, local, moment_us, of_key, without_nul
from .export import FORMATS, LIMIT, download
from .parts import AdminPage, ReadOnly

if TYPE_CHECKING:
    EventsAdmin = admin.ModelAdmin[LockEvent]
else:
    EventsAdmin = admin.ModelAdmin

PAGE_SIZE = 50
DEFAULT_SINCE = "24h"
QUICK = {
    "1h": _("1 hour"),
    "24h": _("24 hours"),
    "7d": _("7 days"),
    "30d": _("30 days"),
    EVER: _("all"),
}
NAMES = ("key", "kind", "backend", "pattern", "owner", "since", "until")


@dataclass(slots=True)
class Asked:
    """What the address asks for, and what it asks in vain."""

    state: State
    wanted: Wanted
    # As the form shows them.
    shown: dict[str, Any]
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, query: QueryDict) -> Asked:
        """From the parameters; what is wrong is told, and left out."""
        # Links to a key that reads like others of the form's say so.
        is_exact = query.get("exact") == "1"
        read = without_nul if is_exact else as_name
        values = {name: [read(one) for one in query.getlist(name) if one] for name in NAMES}
        one = {name: found[-1] if found else "" for name, found in values.items()}
        errors: dict[str, str] = {}
        kinds = tuple(dict.fromkeys(kind for kind in values["kind"] if kind in EVENT_KINDS))
        if one["owner"] and not one["key"]:
            errors["owner"] = _t("An owner id is looked for among the events of one key: name it.")
        since_text = one["since"] or ("" if one["until"] else DEFAULT_SINCE)
        since = None if since_text in ("", EVER) else _moment("since", since_text, errors)
        if "since" in errors:
            since = moment_us(DEFAULT_SINCE)
        until = _moment("until", one["until"], errors) if one["until"] else None
        key = one["key"]
        is_beginning = key.endswith(STAR) and not is_exact
        if is_exact:
            values["exact"] = ["1"]
        shown = {**one, "since": since_text, "kind": kinds}
        shown |= {name: facts.shown(one[name]) for name in ("key", "pattern")}
        return cls(
            state=State({name: found for name, found in values.items() if found}),
            wanted=Wanted(
                key=key.removesuffix(STAR) if is_beginning else key,
                is_beginning=is_beginning,
                kinds=kinds,
                backend=one["backend"],
                pattern=one["pattern"],
                owner_id="" if "owner" in errors else one["owner"],
                since=since,
                until=until,
            ),
            shown=shown,
            errors=errors,
        )

    @property
    def is_filtered(self) -> bool:
        """Whether anything but the time is asked about."""
        return any(name not in ("since", "until", "exact") for name in self.state.values)


def _moment(name: str, text: str, errors: dict[str, str]) -> int | None:
    try:
        return moment_us(text)
    except NotAMoment:
        errors[name] = (
            _t("“%s” is no moment: write 90m, 24h or 7d for so long ago, or 2026-01-31 18:00.")
            % text[:50]
        )
        return None


class HistoryPage(AdminPage):
    """The newest events of those that are asked for."""

    title = _("Lock history")
    template_name = "admin/distlocks/lockevent/history.html"

    def get(self, request: HttpRequest) -> HttpResponse:
        asked = Asked.read(request.GET)
        databases = places.databases()
        found = page(
            databases,
            asked.wanted,
            size=PAGE_SIZE,
            older_than=Cursor.read(request.GET.get("older", "")),
            newer_than=Cursor.read(request.GET.get("newer", "")),
        )
        state = asked.state
        aliases = list(conf.aliases())
        may_see_locks = request.user.has_perm("distlocks.view_lock")
        links = Links(request, state, frozenset(aliases if may_see_locks else ()))
        return self.page(
            rows=[links.row(event) for event in found.events],
            troubles=found.troubles,
            is_kept=bool(databases),
            asked=asked.shown,
            errors=asked.errors,
            is_filtered=asked.is_filtered,
            older=state.link(older=str(found.older)) if found.older else "",
            newer=state.link(newer=str(found.newer)) if found.newer else "",
            is_first="older" not in request.GET and "newer" not in request.GET,
            newest=state.link(),
            quick=[
                (label, state.link(since=name, until=None), asked.shown["since"] == name)
                for name, label in QUICK.items()
            ],
            look_back=[
                (label, state.link(since=name, until=None))
                for name, label in QUICK.items()
                if name in ("7d", "30d", EVER)
            ],
            clear=State({}).link(since=asked.state.values.get("since")),
            kinds=[
                (kind, label, kind in asked.wanted.kinds) for kind, label in EVENT_KINDS.items()
            ],
            several_kinds=len(asked.wanted.kinds) > 1,
            kinds_joined=", ".join(str(EVENT_KINDS[kind]) for kind in asked.wanted.kinds),
            aliases=sorted({*aliases, *filter(None, [asked.wanted.backend])}),
            exports=[(one, f"export/{one}/{state.link()}") for one in FORMATS],
            limit=wording.count(LIMIT),
            dashboard=_dashboard(request),
        )


class ExportPage(AdminPage):
    """The same as a file."""

    def get(self, request: HttpRequest, extension: str) -> HttpResponseBase:
        if extension not in FORMATS:
            raise Http404
        wanted = Asked.read(request.GET).wanted
        return download(request, extension, every(places.databases(), wanted, limit=LIMIT))


@dataclass(frozen=True, slots=True)
class Links:
    """Events as rows, with where they lead."""

    request: HttpRequest
    state: State
    # Of which backends there are pages of one lock that the user may see.
    backends: frozenset[str]

    def row(self, event: LockEvent) -> dict[str, Any]:
        other: Mapping[str, Any] = event.other if isinstance(event.other, dict) else {}
        return {
            "event": event,
            "at": local_of(event),
            "key": facts.shown(event.key),
            "lock": self._lock(event),
            "who": _who(event.host, event.pid, event.thread),
            "other": other,
            "other_who": _who(other.get("host"), other.get("pid"), other.get("thread")),
            "metadata": _pairs(event.metadata),
            "other_metadata": _pairs(other.get("metadata")),
            "pattern": facts.shown(event.pattern),
            "waited": wording.seconds(event.waited) if event.waited is not None else "",
            "held": wording.seconds(event.held) if event.held is not None else "",
            "same_key": self.state.link(**of_key(event.key)) if event.key else "",
            "same_pattern": self.state.link(pattern=event.pattern) if event.pattern else "",
            "same_owner": self._owner(event.key, event.owner_id),
            "other_owner": self._owner(event.key, str(other.get("owner_id") or "")),
        }

    def _owner(self, key: str, owner_id: str) -> str:
        if not (key and owner_id):
            return ""
        return self.state.link(**of_key(key), owner=owner_id, kind=None)

    def _lock(self, event: LockEvent) -> str:
        if not event.key or event.backend not in self.backends:
            return ""
        return url_of(self.request, "lock_one", event.backend, event.key)


def _pairs(metadata: object) -> list[tuple[str, object]]:
    return list(metadata.items()) if isinstance(metadata, dict) else []


def local_of(event: LockEvent) -> Any:
    """When it happened, in the current time zone."""
    return local(round(event.at.timestamp() * 1_000_000))


def _who(host: object, pid: object, thread: object) -> str:
    if not host:
        return ""
    return _t("%(host)s, pid %(pid)s, %(thread)s") % {"host": host, "pid": pid, "thread": thread}


def _dashboard(request: HttpRequest) -> str:
    may = request.user.has_perm("distlocks.view_lockrollup")
    return url_of(request, "lockrollup_changelist") if may else ""


@admin.register(LockEvent)
class LockEventAdmin(ReadOnly, EventsAdmin):
    """Searched and exported; nobody adds, changes or deletes what has happened."""

    def get_urls(self) -> list[URLPattern]:
        return [
            HistoryPage.at("", self, "distlocks_lockevent_changelist"),
            ExportPage.at("export/<str:extension>/", self, "distlocks_lockevent_export"),
        ]
