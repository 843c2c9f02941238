"""How the backends are: all asked at once, and none waited for longer than a moment."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from django.core.checks import ERROR, WARNING
from django.core.exceptions import ImproperlyConfigured

from .. import conf
from ..backends.base import BaseBackend
from ..backends.phases import DATABASE, REDIS
from ..claims import from_us
from ..exceptions import DistlocksError
from ..handler import locks
from ..live.asking import Answer, NoAnswer

# Seconds that a page waits for the answers, and after which one is slow.
PATIENCE = 2.0
SLOW = 0.5

UP, SLOWLY, DOWN, SILENT, WRONG = "up", "slow", "down", "silent", "wrong"
# That somebody else grants is told apart: see Authority.
_TOLD_APART = "distlocks.W013"


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Which store of a fast path grants."""

    phase: str
    since: datetime
    why: str
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What is known of one backend now."""

    alias: str
    state: str
    # The class; empty if it could not be made.
    kind: str = ""
    # How long it took to answer, or has not answered for.
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # Seconds until it grants again.
    quarantine: float = 0.0
    authority: Authority | None = None


class Questions:
    """Who is being asked in this process.

    Who does not answer is not asked again meanwhile: a page that is reloaded beside a store that
    hangs would leave a thread behind each time.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._mutex = threading.Lock()
        # By alias: since when it has been asked, on the monotonic clock, and its answer.
        self._asked: dict[str, tuple[float, Answer[Health]]] = {}

    def ask(self) -> Callable[[], list[Health]]:
        """Ask all of them; what is returned waits for their answers."""
        until = time.monotonic() + PATIENCE
        asked = [(alias, *self._question(alias)) for alias in conf.aliases()]
        return lambda: [_said(alias, since, answer, until) for alias, since, answer in asked]

    def _question(self, alias: str) -> tuple[float, Answer[Health]]:
        with self._mutex:
            asked = self._asked.get(alias)
            if asked is None or asked[1].is_there:
                since = time.monotonic()
                answer = Answer(f"health-{alias}", partial(_health, alias, since))
                asked = self._asked[alias] = since, answer.start()
            return asked


def _said(alias: str, since: float, answer: Answer[Health], until: float) -> Health:
    """What it has said by then."""
    try:
        return answer.result(until)
    except NoAnswer:
        return Health(alias=alias, state=SILENT, seconds=time.monotonic() - since)
    except Exception as error:
        return Health(alias=alias, state=DOWN, errors=[f"{type(error).__name__}: {error}"])


def _health(alias: str, asked_at: float) -> Health:
    try:
        backend = locks[alias]
    except ImproperlyConfigured as fault:
        return Health(alias=alias, state=WRONG, errors=[str(fault)])
    messages = [one for one in backend.check_store() if one.id != _TOLD_APART]
    errors = [str(one.msg) for one in messages if one.level >= ERROR]
    authority = _authority(backend)
    # While the database grants, Redis may well be down: that is what it is for.
    grants = authority.phase in (REDIS, DATABASE) if authority else not errors
    if errors and authority is not None and authority.phase == REDIS:
        grants = False
    seconds = time.monotonic() - asked_at
    return Health(
        alias=alias,
        kind=type(backend).__name__,
        state=DOWN if not grants else SLOWLY if seconds > SLOW else UP,
        seconds=seconds,
        errors=errors,
        warnings=[str(one.msg) for one in messages if WARNING <= one.level < ERROR],
        quarantine=0.0 if errors else _quarantine(backend),
        authority=authority,
    )


def _quarantine(backend: BaseBackend) -> float:
    try:
        return backend.quarantine() if backend.supports_quarantine else 0.0
    except DistlocksError:
        return 0.0


def _authority(backend: Any) -> Authority | None:
    try:
        row = backend.authority.peek() if backend.supports_authority else None
    except DistlocksError:
        # The backend has said so itself.
        return None
    if row is None:
        return None
    return Authority(
        phase=row.phase, since=from_us(row.since_us), why=row.why, is_pinned=row.pinned
    )


questions = Questions()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=questions.reset)
