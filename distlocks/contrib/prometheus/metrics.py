"""Counters and histograms, fed from the journal's thread: locks pay nothing for them."""

from __future__ import annotations

import os
import threading
from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.values import ValueClass

from ... import facts
from ...histogram import BOUNDS
from ...history.journal import Entry, journal, patterns_in
from ...history.waits import waits
from ...patterns import OTHERS, pattern_of
from ...renewal import renewer
from .settings import max_patterns
from .up import BackendUpCollector

# By the kind of a fact: the counter, and what it says.
COUNTED = {
    facts.CONTENDED: ("contended", "Acquires that found a key taken, whatever came of it"),
    facts.TIMED_OUT: ("timeouts", "Acquires that waited for as long as they might, in vain"),
    facts.LOST: ("lost", "Keys whose lease ended before its holder was done"),
    facts.EXPIRED: ("expired", "Keys found with a lease that was never released"),
    facts.TAKEN_OVER: ("expired", ""),
    facts.FORCED: ("forced", "Keys that an operator freed from a holder"),
    facts.CYCLE: ("cycles", "Circles of processes that waited for each other"),
}
BY_PATTERN = ("backend", "pattern")


class Metrics:
    """The metrics of this process's locks, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.acquires = Counter(
            "distlocks_acquires", "Leases granted", BY_PATTERN, registry=registry
        )
        self.counters = {
            name: Counter(f"distlocks_{name}", said, BY_PATTERN, registry=registry)
            for name, said in COUNTED.values()
            if said
        }
        self.errors = Counter(
            "distlocks_errors",
            "Acquires, renewals and releases that a store did not answer",
            ["backend"],
            registry=registry,
        )
        self.dropped = Counter(
            "distlocks_history_dropped",
            "Events that were counted and not written to the history",
            ["backend"],
            registry=registry,
        )
        self.wait = Histogram(
            "distlocks_wait_seconds",
            "From the call to the grant",
            BY_PATTERN,
            buckets=BOUNDS,
            registry=registry,
        )
        self.hold = Histogram(
            "distlocks_hold_seconds",
            "From the grant to the release",
            BY_PATTERN,
            buckets=BOUNDS,
            registry=registry,
        )
        self.held = Gauge(
            "distlocks_leases_held",
            "Leases that are held",
            ["backend"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.waiting = Gauge(
            "distlocks_acquires_waiting",
            "Acquires that wait",
            ["backend"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        registry.register(BackendUpCollector())
        # Held while metrics change, and during a fork: the child would never see their own locks
        # released otherwise.
        self.mutex = threading.RLock()
        self._patterns: set[str] = set()
        self._prepared: set[tuple[str, str]] = set()
        self._seen_dropped: Tally[str] = Tally()

    def start(self) -> None:
        """Count from now on."""
        journal.observers.append(self.observe)
        journal.chores.append(self.look)

    def stop(self) -> None:
        """Count no more, and leave the registry."""
        journal.observers.remove(self.observe)
        journal.chores.remove(self.look)

    def observe(self, entries: Sequence[Entry]) -> None:
        """Count what has happened. Called by the journal."""
        patterns = [_patterns_of(entry) for entry in entries]
        with self.mutex:
            self._tell_apart(Tally([one for several in patterns for one in several]))
            for entry, several in zip(entries, patterns, strict=True):
                alias = entry[0].alias
                for pattern in {self._label(one) for one in several}:
                    self._prepare(alias, pattern)
                    if len(entry) == 2:
                        self._count(alias, pattern, entry[1].kind)
                    elif entry[4]:
                        self.hold.labels(alias, pattern).observe(entry[3])
                    else:
                        self.acquires.labels(alias, pattern).inc()
                        self.wait.labels(alias, pattern).observe(entry[3])

    def _count(self, alias: str, pattern: str, kind: str) -> None:
        if kind == facts.ERROR:
            self.errors.labels(alias).inc()
        elif kind in COUNTED:
            self.counters[COUNTED[kind][0]].labels(alias, pattern).inc()

    def _tell_apart(self, found: Tally[str]) -> None:
        """Of patterns not met before, the most frequent ones get what places there are left."""
        left = max_patterns() - len(self._patterns)
        if left > 0 and not found.keys() <= self._patterns:
            for pattern, _ in found.most_common():
                if left and pattern and pattern not in self._patterns:
                    self._patterns.add(pattern)
                    left -= 1

    def _label(self, pattern: str) -> str:
        # Without one: it is about a backend as a whole.
        return pattern if not pattern or pattern in self._patterns else OTHERS

    def _prepare(self, alias: str, pattern: str) -> None:
        """Have all counters begin at 0: Prometheus does not see the first event of one that is
        not there before."""
        if (alias, pattern) not in self._prepared:
            self._prepared.add((alias, pattern))
            for counter in (self.acquires, *self.counters.values()):
                counter.labels(alias, pattern)
            self.errors.labels(alias)
            self.dropped.labels(alias)

    def look(self, now: float) -> bool:
        """Count what there is at the moment. Called by the journal, every second while anything
        happens and for some time after."""
        held = Tally([lease.backend.alias for lease in renewer.leases()])
        held.update([lease.backend.alias for lease in list(waits.in_transactions.values())])
        waiting = Tally([one.backend.alias for one in list(waits._current)])
        with self.mutex:
            for gauge, numbers in ((self.held, held), (self.waiting, waiting)):
                for alias in {*numbers, *(alias for alias, _ in self._prepared)}:
                    gauge.labels(alias).set(numbers[alias])
            for alias, count in list(journal.dropped.items()):
                self.dropped.labels(alias).inc(count - self._seen_dropped[alias])
                self._seen_dropped[alias] = count
        return False


def _patterns_of(entry: Entry) -> set[str]:
    if len(entry) == 2:
        fact = entry[1]
        return {fact.pattern or pattern_of(fact.name)}
    return set(patterns_in(entry))


_metrics: Metrics | None = None


def install(registry: CollectorRegistry = REGISTRY) -> Metrics:
    """Count what happens to the locks of this process, and of those forked from it; idempotent."""
    global _metrics
    if _metrics is None:
        _metrics = Metrics(registry)
        _metrics.start()
        if hasattr(os, "register_at_fork"):
            mutex = _metrics.mutex
            os.register_at_fork(
                before=mutex.acquire, after_in_parent=mutex.release, after_in_child=mutex.release
            )
    return _metrics


def several_processes() -> bool:
    """Whether processes share their metrics: PROMETHEUS_MULTIPROC_DIR was set in time."""
    return bool(getattr(ValueClass, "_multiprocess", False))
