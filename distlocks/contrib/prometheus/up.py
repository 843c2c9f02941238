"""Whether each store answers: asked when Prometheus asks, and never for longer than a moment."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...backends.base import BaseBackend
from ...conf import under_test_runner
from ...handler import locks

# Seconds for which an answer is good, so that many scrapes are few questions.
GOOD_FOR = 10.0
# Seconds for which a question is waited for, by whichever scrapes. Who takes longer counts as down.
PATIENCE = 2.0
# A key that nobody has.
NOBODYS = "distlocks:is-it-up"


@dataclass(slots=True, eq=False)
class _Question:
    """One question to one store."""

    asked_at: float
    up: bool = False
    answered: threading.Event = field(default_factory=threading.Event)


class Stores:
    """Asks the store of each alias for something small, in a thread of its own.

    A store that hangs keeps its thread, and is asked nothing more until that has come back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._reset()

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._questions: dict[str, _Question] = {}

    def states(self, patience: float = PATIENCE) -> dict[str, bool]:
        """By alias, whether its store answers. Takes `patience` seconds at the longest."""
        questions: dict[str, _Question] = {}
        for alias in locks:
            try:
                questions[alias] = self._asked(alias, locks[alias])
            except ImproperlyConfigured:
                # That it cannot work, the system checks tell.
                continue
        # All that is still open was asked now, or by a scrape that has waited for it already.
        return {
            alias: question.answered.wait(max(question.asked_at + patience - self._now(), 0.0))
            and question.up
            for alias, question in questions.items()
        }

    def _asked(self, alias: str, backend: BaseBackend) -> _Question:
        with self._mutex:
            last = self._questions.get(alias)
            if last is not None and (
                not last.answered.is_set() or self._now() - last.asked_at < GOOD_FOR
            ):
                return last
            question = self._questions[alias] = _Question(self._now())
        if under_test_runner():
            # No thread speaks to databases beside a test.
            _ask(backend, question)
        else:
            threading.Thread(
                target=_ask_and_go,
                args=(backend, question),
                name=f"distlocks-up-{alias}",
                daemon=True,
            ).start()
        return question


def _ask(backend: BaseBackend, question: _Question) -> None:
    try:
        # Stores with queues find one key at once, and would have to look through all for a prefix.
        if backend.supports_waiters:
            backend.waiters(NOBODYS)
        else:
            backend.holders(NOBODYS, limit=1)
        question.up = True
    except Exception:
        # Of whatever kind: it has not answered.
        question.up = False
    finally:
        question.answered.set()


def _ask_and_go(backend: BaseBackend, question: _Question) -> None:
    try:
        _ask(backend, question)
    finally:
        connections.close_all()


stores = Stores()
if hasattr(os, "register_at_fork"):
    # The threads of the process that forked us answer nothing here.
    os.register_at_fork(after_in_child=stores._reset)


class BackendUpCollector(Collector):
    """`distlocks_backend_up`: 1 for each alias whose store answers, 0 for each that does not."""

    def describe(self) -> Iterator[Metric]:
        """What there will be, without asking."""
        yield _family()

    def collect(self) -> Iterator[Metric]:
        """What there is now."""
        family = _family()
        for alias, up in stores.states().items():
            family.add_metric([alias], float(up))
        yield family


def _family() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "distlocks_backend_up", "Whether the store of an alias answers", labels=["backend"]
    )
