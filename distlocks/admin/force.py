"""Freeing locks over their holders' heads: asked twice, with a reason, and written down."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import Error as AnyDatabaseError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .. import live
from ..claims import EXCLUSIVE, Holder
from ..exceptions import BackendUnavailable, DistlocksError
from ..facts import shown
from ..force import force_release
from ..handler import locks
from ..keys import key_of
from ..live.together import told
from .addresses import from_address, url_of
from .live import STATES
from .parts import AdminPage

logger = logging.getLogger("distlocks")

# Freed at once. And seconds after which no further one is begun: servers give requests up.
MAX_LOCKS = 200
PATIENCE = 20.0
NAMED = 5


class Reason(forms.Form):
    """What is asked of who frees a lock."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=400,
        widget=forms.Textarea({"rows": 2, "cols": 60}),
        help_text=gettext_lazy("Kept in the history of the lock and in the admin's log."),
    )


@dataclass(kw_only=True)
class Target:
    """A lock that is to be freed."""

    address: str
    alias: str
    name: str
    # Who has it, by what it was last known to be; and that in one word.
    holders: Sequence[Holder] = ()
    seen: str = ""
    # It has changed hands since the user was asked.
    changed: bool = False
    # Why it could not be looked at, or freed.
    error: str = ""

    def look(self) -> None:
        """See who has it now."""
        self.holders = locks[self.alias].holders_of(self.name, limit=NAMED + 1)
        self.seen = fingerprint(self.holders)

    @property
    def named(self) -> Sequence[Holder]:
        return self.holders[:NAMED]

    @property
    def state(self) -> Any:
        return STATES[live.mode_of(self.holders[0])] if self.holders else ""

    @property
    def third(self) -> float:
        """Seconds in which its holder learns of it."""
        return locks[self.alias].params.max_ttl / 3


def fingerprint(holders: Sequence[Holder]) -> str:
    """What changes when a key changes hands. Those who have it together come and go."""
    if not holders:
        return "free"
    first = holders[0]
    return f"{first.fencing_token}" if first.mode == EXCLUSIVE else first.mode


class ForceRelease(AdminPage):
    """Asks, and frees."""

    title = gettext_lazy("Force-release locks")
    template_name = "admin/distlocks/lock/force_release.html"
    # It shows who has them, too.
    permissions = ("view", "force_release")
    # Its rollback would take back the guards and not the release.
    atomic: ClassVar[bool] = False

    def get(self, request: HttpRequest) -> HttpResponse:
        return redirect(url_of(request, "lock_changelist"))

    def post(self, request: HttpRequest) -> HttpResponse:
        targets = _targets(request.POST.getlist("lock"))
        if not targets:
            messages.warning(request, _("No lock was selected: nothing has been freed."))
            return redirect(url_of(request, "lock_changelist"))
        # Of the whole request: the server that waits for it does not ask for what it takes long.
        give_up = time.monotonic() + PATIENCE
        _look(targets, give_up)
        if request.POST.get("post") != "yes":
            return self._ask(targets, Reason())
        form = Reason(request.POST)
        seen = dict(zip(request.POST.getlist("lock"), request.POST.getlist("seen"), strict=False))
        free = [target for target in targets if not target.error and target.seen == "free"]
        there = [target for target in targets if target not in free]
        for target in there:
            target.changed = not target.error and seen.get(target.address) != target.seen
        if not form.is_valid() or any(target.changed for target in there):
            return self._ask(targets, form)
        if free:
            messages.info(request, _("Free already: %s.") % _names(free))
        freed, failed = self._free(there, form.cleaned_data["reason"], give_up)
        if freed:
            count = len(freed)
            messages.success(
                request,
                ngettext(
                    "Freed %(count)d lock: %(names)s. Its holder learns of it when it next extends "
                    "its lease.",
                    "Freed %(count)d locks: %(names)s. Their holders learn of it when they next "
                    "extend their leases.",
                    count,
                )
                % {"count": count, "names": _names(freed)},
            )
        if failed:
            # What was typed is not lost, and one click tries again.
            return self._ask(failed, form)
        if len(targets) == 1:
            return redirect(url_of(request, "lock_one", targets[0].alias, targets[0].name))
        return redirect(url_of(request, "lock_changelist"))

    def _ask(self, targets: Sequence[Target], form: Reason) -> HttpResponse:
        return self.page(
            targets=targets,
            form=form,
            any_there=any(target.holders for target in targets),
            any_changed=any(target.changed for target in targets),
            any_failed=any(target.error for target in targets),
            longest=max((target.third for target in targets if not target.error), default=0.0),
        )

    def _free(
        self, targets: Iterable[Target], reason: str, give_up: float
    ) -> tuple[list[Target], list[Target]]:
        """Free them one after the other; which have been, and which have not."""
        freed: list[Target] = []
        failed: list[Target] = []
        down: dict[str, str] = {}
        for target in targets:
            target.error = target.error or _why_not(target, down, give_up)
            if not target.error:
                self._free_one(target, reason, down)
            (failed if target.error else freed).append(target)
        for alias in {target.alias for target in freed}:
            live.refresh(alias)
        return freed, failed

    def _free_one(self, target: Target, reason: str, down: dict[str, str]) -> None:
        by = self.request.user.get_username()
        try:
            held = force_release(key_of(target.name), backend=target.alias, reason=reason, by=by)
        except BackendUnavailable as error:
            target.error = down[target.alias] = told(error)
            if error.in_doubt:
                target.error += " " + _("It may have been freed nevertheless: look again.")
                self._log(target, target.holders, reason, is_certain=False)
            return
        except (DistlocksError, AnyDatabaseError) as error:
            released: list[Holder] | None = getattr(error, "released", None)
            if released is None:
                target.error = told(error)
                return
            held = released
            messages.warning(
                self.request,
                _(
                    "%(key)s has been freed, but its last holder is not refused everywhere: "
                    "%(error)s"
                )
                % {"key": shown(target.name), "error": told(error)},
            )
        if held and fingerprint(held) != target.seen:
            messages.warning(
                self.request,
                _("%(key)s changed hands in the same moment; it was taken from: %(who)s.")
                % {"key": shown(target.name), "who": "; ".join(map(str, held[:NAMED]))},
            )
        self._log(target, held, reason)

    def _log(
        self, target: Target, held: Sequence[Holder], reason: str, *, is_certain: bool = True
    ) -> None:
        who = "; ".join(map(str, held[:NAMED])) or _("nobody any more")
        if is_certain:
            text = _("Force-released on %(alias)s: %(reason)s. Taken from: %(who)s.")
        else:
            text = _(
                "Force-released on %(alias)s, which is not certain, as no answer came: %(reason)s. "
                "Before, it was had by: %(who)s."
            )
        try:
            LogEntry.objects.create(
                user=self.request.user,  # type: ignore[misc]
                content_type=ContentType.objects.get_for_model(self.model_admin.model),
                object_id=target.address,
                object_repr=shown(target.name)[:200],
                action_flag=CHANGE,
                change_message=text % {"alias": target.alias, "reason": reason, "who": who},
            )
        except AnyDatabaseError as error:
            logger.error("A forced release could not be written to the admin's log: %s", error)
            if is_certain:
                text = _(
                    "%(key)s has been freed, but this could not be written to the admin's log."
                )
            else:
                text = _(
                    "That %(key)s may have been freed could not be written to the admin's log."
                )
            messages.warning(self.request, text % {"key": shown(target.name)})


def _targets(addresses: Iterable[str]) -> list[Target]:
    """The locks of these addresses; what is none is passed over."""
    found: dict[str, Target] = {}
    for text in addresses:
        try:
            alias, name = from_address(text)
        except ValueError:
            continue
        if alias in locks and len(found) < MAX_LOCKS:
            found[text] = Target(address=text, alias=alias, name=name)
    return list(found.values())


def _look(targets: Iterable[Target], give_up: float) -> None:
    """See who has them, as far as their stores say so in time."""
    down: dict[str, str] = {}
    for target in targets:
        target.error = _why_not(target, down, give_up)
        if target.error:
            continue
        try:
            target.look()
        except Exception as error:
            target.error = told(error)
            if isinstance(error, BackendUnavailable):
                down[target.alias] = target.error


def _why_not(target: Target, down: dict[str, str], give_up: float) -> str:
    """Why its store is not asked: it did not answer the last time, or there is no time left."""
    if target.alias in down:
        return down[target.alias]
    late = time.monotonic() > give_up
    return _("Not tried: the others took too long. Try again.") if late else ""


def _names(targets: Sequence[Target]) -> str:
    names = [shown(target.name) for target in targets]
    more = len(names) - NAMED
    text = ", ".join(names[:NAMED])
    return text + (" " + _("and %d more") % more if more > 0 else "")
