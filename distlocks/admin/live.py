"""The list of all locks that are held now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext_lazy as _

from ..claims import EXCLUSIVE, INTENTION, PERMIT, SHARED
from ..handler import locks
from ..live import COOLING, Entry, Listing, StoreState, Wanted, listing
from ..live.entries import MAX_LISTED, SORTS
from .addresses import address
from .parts import AdminPage

STATES = {
    EXCLUSIVE: _("held"),
    SHARED: _("shared"),
    PERMIT: _("permit"),
    INTENTION: _("held further down"),
    COOLING: _("cooling down"),
}
# Seconds, and how they are called.
LONGER = {
    "10": _("Longer than 10 s"),
    "60": _("Longer than 1 min"),
    "600": _("Longer than 10 min"),
    "3600": _("Longer than 1 h"),
}
COLUMNS = (
    ("key", _("key"), True),
    ("state", _("state"), False),
    ("holder", _("held by"), False),
    ("age", _("for"), True),
    ("left", _("time left"), True),
    ("waiters", _("waiting"), True),
)
# Descending at the first click: who looks for these looks for the most.
MOST_FIRST = ("age", "waiters")
# Seconds between two updates.
EVERY = 3


def wanted_by(query: Any) -> Wanted:
    """What a URL asks for; what it cannot mean is passed over."""
    sort = query.get("o", "")
    longer = query.get("longer", "")
    # int() refuses thousands of digits; so many are past the last page anyway.
    page = query.get("p", "")[:9]
    size = Wanted().size
    return Wanted(
        backend=query.get("backend", "") if query.get("backend") in locks else "",
        mode=query.get("state", "") if query.get("state") in STATES else "",
        longer_than=float(longer) if longer in LONGER else 0.0,
        waited_for=query.get("waited") == "1",
        search=query.get("q", "").replace("\0", "")[:300],
        sort=sort.removeprefix("-") if sort.removeprefix("-") in SORTS else "key",
        descending=sort.startswith("-") and sort[1:] in SORTS,
        page=min(int(page), MAX_LISTED // size) if page.isdecimal() and int(page) else 1,
    )


class Query:
    """The list's URL with one thing changed."""

    def __init__(self, request: HttpRequest, wanted: Wanted) -> None:
        said = {
            "q": wanted.search,
            "backend": wanted.backend,
            "state": wanted.mode,
            "waited": "1" if wanted.waited_for else "",
            "longer": f"{wanted.longer_than:g}" if wanted.longer_than else "",
            "o": ("-" if wanted.descending else "") + wanted.sort,
        }
        if said["o"] == "key":
            said["o"] = ""
        self.said = {name: value for name, value in said.items() if value}

    def but(self, **changes: str) -> str:
        """The query with these changes, from the first page on."""
        said = {name: value for name, value in (self.said | changes).items() if value}
        return "?" + urlencode(said)

    def filters(self) -> Iterator[dict[str, Any]]:
        """As the admin's own template of a filter wants them."""
        yield self._filter(_("backend"), "backend", {alias: alias for alias in locks})
        yield self._filter(_("state"), "state", STATES)
        yield self._filter(_("waiters"), "waited", {"1": _("Somebody waits")})
        yield self._filter(_("time held"), "longer", LONGER)

    def _filter(self, title: Any, name: str, choices: dict[str, Any]) -> dict[str, Any]:
        chosen = self.said.get(name, "")
        return {
            "title": title,
            "choices": [
                {
                    "display": display,
                    "selected": value == chosen,
                    "query_string": self.but(**{name: value}),
                }
                for value, display in {"": _("All"), **choices}.items()
            ],
        }

    @property
    def is_filtered(self) -> bool:
        return bool(self.said.keys() - {"o"})

    def headers(self, wanted: Wanted) -> Iterator[dict[str, Any]]:
        """The columns, and what a click on each asks for."""
        for name, title, sortable in COLUMNS:
            is_sorted = name == wanted.sort
            descending = not wanted.descending if is_sorted else name in MOST_FIRST
            yield {
                "name": name,
                "title": title,
                "url": self.but(o=("-" if descending else "") + name) if sortable else "",
                "sorted": is_sorted and ("descending" if wanted.descending else "ascending"),
            }


class LiveLocks(AdminPage):
    """Who has which lock now, over all backends."""

    title = _("Locks that are held now")
    template_name = "admin/distlocks/lock/live.html"
    results_template_name: ClassVar[str] = "admin/distlocks/lock/live_results.html"

    def get(self, request: HttpRequest) -> HttpResponse:
        wanted = wanted_by(request.GET)
        query = Query(request, wanted)
        found = listing(wanted)
        context: dict[str, Any] = {
            "found": found,
            "rows": [row(entry) for entry in found.entries],
            "stores": list(map(store, found.stores)),
            "headers": list(query.headers(wanted)),
            "pages": list(_pages(found, query)),
            "query": query,
            "all_url": query.but(**dict.fromkeys(query.said.keys() - {"o"}, "")),
            "may_force": self.may("force_release"),
            "complete": all(one.found is not None for one in found.stores),
        }
        if "_results" in request.GET:
            return TemplateResponse(request, self.results_template_name, context)
        return self.page(
            **context,
            filters=list(query.filters()),
            every=EVERY,
            results_url=query.but(_results="1", p=str(wanted.page)),
        )


def row(entry: Entry) -> dict[str, Any]:
    """One lock, as the template wants it."""
    return {
        "entry": entry,
        "address": address(entry.alias, entry.name),
        "state": STATES[entry.mode],
        "more": entry.count - len(entry.holders),
    }


def store(state: StoreState) -> dict[str, Any]:
    """How it stands with one backend, as the template wants it."""
    found = state.found
    return {
        "state": state,
        "names": ", ".join([state.alias, *state.also]),
        "as_of": found.as_of if found and found.as_of >= 1 else None,
    }


def _pages(found: Listing, query: Query) -> Iterable[dict[str, Any]]:
    for number in range(1, found.pages + 1) if found.pages > 1 else ():
        yield {
            "number": number,
            "url": query.but(p=str(number)),
            "current": number == found.wanted.page,
        }
