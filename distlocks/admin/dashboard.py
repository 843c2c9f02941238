"""The dashboard: what happens to locks, in numbers over time, and how the backends are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern
from django.utils import formats, timezone
from django.utils.translation import gettext as _t
from django.utils.translation import gettext_lazy as _

from .. import conf, facts
from ..claims import MICROSECOND
from ..history import places
from ..history.figures import RANGES, Figures, Summary, Window, summary
from ..models import PHASES, LockRollup
from ..patterns import OTHERS
from . import wording
from .addresses import url_of
from .asked import State, as_name, as_text, local
from .charts import Chart, charts
from .health import Health, questions
from .parts import AdminPage, ReadOnly

if TYPE_CHECKING:
    RollupsAdmin = admin.ModelAdmin[LockRollup]
else:
    RollupsAdmin = admin.ModelAdmin

DEFAULT_RANGE = "1h"
RANGE_NAMES = {
    "15m": _("15 minutes"),
    "1h": _("1 hour"),
    "6h": _("6 hours"),
    "24h": _("24 hours"),
    "7d": _("7 days"),
    "30d": _("30 days"),
}
# Seconds between two looks of an open page, by how long a point of its charts is.
REFRESH = {60: 10, 300: 30, 3600: 60}
LONGEST_REFRESH = 120

# The counters, and as what their events are in the history. Of grants, it has those that waited.
COUNTERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "acquired": (_("Acquired"), (facts.ACQUIRED,)),
    "contended": (_("Found taken"), (facts.CONTENDED,)),
    "timed_out": (_("Timed out"), (facts.TIMED_OUT,)),
    "lost": (_("Lost"), (facts.LOST,)),
    "expired": (_("Expired"), (facts.EXPIRED, facts.TAKEN_OVER)),
    "errors": (_("Store errors"), (facts.ERROR,)),
    "forced": (_("Force-released"), (facts.FORCED,)),
}
# Not a thing that an operator has to look after when it is not 0.
ORDINARY = ("acquired", "contended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number, and where its rows are."""

    name: str
    label: Any
    value: str
    link: str = ""
    note: str = ""
    is_bad: bool = False


class DashboardPage(AdminPage):
    """What has happened in one of RANGES until now."""

    title = _("Lock statistics")
    template_name = "admin/distlocks/lockrollup/dashboard.html"

    def get(self, request: HttpRequest) -> HttpResponse:
        answers = questions.ask()
        name = request.GET.get("range", "")
        self.range = name if name in RANGES else DEFAULT_RANGE
        self.backend = as_name(request.GET.get("backend", ""))
        self.pattern = as_name(request.GET.get("pattern", ""))
        asked = {"range": self.range, "backend": self.backend, "pattern": self.pattern}
        self.state = State({key: [value] for key, value in asked.items() if value})
        self.window = Window.back_from(time.time(), self.range)
        self.history, self.when = self._history()
        found = summary(places.databases(), self.window, backend=self.backend, pattern=self.pattern)
        total = found.total
        days = {alias: kept for one in places.kept_days().values() for alias, kept in one.items()}
        return self.page(
            found=found,
            total=total,
            is_kept=bool(places.databases()),
            numbers=list(self._numbers(total)),
            dropped=wording.count(total.counts["dropped"]) if total.counts["dropped"] else "",
            charts=(drawn := charts(found)),
            drawn=self._drawn(found, drawn),
            patterns=[self._pattern(*item) for item in found.patterns.items()],
            backends=[_backend_row(one, days.get(one.alias, 0)) for one in answers()],
            ranges=[(key, RANGE_NAMES[key], self.state.link(range=key)) for key in RANGES],
            range=self.range,
            aliases=list(conf.aliases()),
            backend=self.backend,
            pattern=facts.shown(self.pattern),
            without_pattern=self.state.link(pattern=None),
            without_filters=self.state.link(pattern=None, backend=None),
            since=local(self.window.since * MICROSECOND),
            until=local(self.window.until * MICROSECOND),
            refresh_seconds=REFRESH.get(self.window.step, LONGEST_REFRESH),
            all_events=self._events(),
        )

    def _history(self) -> tuple[str, str]:
        """The address of the history, if the user may see it, and what asks it for this time."""
        if not self.request.user.has_perm("distlocks.view_lockevent"):
            return "", ""
        since, until = (as_text(at * MICROSECOND) for at in (self.window.since, self.window.until))
        when = State({"since": [since], "until": [until]}).link()
        return url_of(self.request, "lockevent_changelist"), when.removeprefix("?")

    def _events(self, kinds: tuple[str, ...] = (), pattern: str = "") -> str:
        """The address of what was counted, in the history."""
        pattern = pattern or self.pattern
        # What is counted as others is there by its own pattern.
        if not self.history or pattern == OTHERS:
            return ""
        values = {"kind": kinds, "backend": [self.backend], "pattern": [pattern]}
        state = State({key: value for key, value in values.items() if any(value)})
        return f"{self.history}{state.link()}&{self.when}".replace("?&", "?")

    def _numbers(self, total: Figures, pattern: str = "") -> Iterator[Number]:
        length = self.window.until - self.window.since
        for name, (label, kinds) in COUNTERS.items():
            value = total.counts[name]
            note = ""
            if name == "acquired":
                note = _t("%(rate)s a minute") % {"rate": wording.rate(value * 60 / length)}
            elif name == "contended" and total.counts["acquired"]:
                share = value * 100 / total.counts["acquired"]
                note = _t("%(number)s of 100 acquired") % {"number": wording.rate(share)}
            yield Number(
                name=name,
                label=label,
                value=wording.count(value),
                link=self._events(kinds, pattern) if value else "",
                note=note,
                is_bad=bool(value) and name not in ORDINARY,
            )

    def _pattern(self, name: str, figures: Figures) -> dict[str, Any]:
        acquired = figures.counts["acquired"]
        return {
            "name": facts.shown(name),
            "link": self.state.link(pattern=name),
            "numbers": list(self._numbers(figures, name)),
            "waited": wording.seconds(figures.wait_seconds / acquired if acquired else None),
            "held": wording.seconds(figures.hold_seconds / acquired if acquired else None),
        }

    def _drawn(self, found: Summary, drawn: list[Chart]) -> dict[str, Any]:
        """What the script draws."""
        return {
            "x": [point.at for point in found.points],
            "since": self.window.since,
            "until": self.window.until,
            "when": _t("When"),
            "timeZone": timezone.get_current_timezone_name(),
            "charts": {chart.name: chart.drawn() for chart in drawn},
        }


def _backend_row(health: Health, days: float) -> dict[str, Any]:
    authority = health.authority
    return {
        "health": health,
        "label": STATES[health.state],
        "took": wording.seconds(health.seconds),
        "quarantine": wording.seconds(health.quarantine) if health.quarantine else "",
        "phase": PHASES.get(authority.phase, authority.phase) if authority else "",
        "days": formats.number_format(days),
        "is_kept": days > 0,
    }


STATES = {
    "up": _("up"),
    "slow": _("slow"),
    "down": _("down"),
    "silent": _("no answer"),
    "wrong": _("wrongly configured"),
}


@admin.register(LockRollup)
class LockRollupAdmin(ReadOnly, RollupsAdmin):
    """Shown as a dashboard; its rows by themselves tell nobody anything."""

    def get_urls(self) -> list[URLPattern]:
        return [DashboardPage.at("", self, "distlocks_lockrollup_changelist")]
