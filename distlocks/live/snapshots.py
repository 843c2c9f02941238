"""The locks of a store without order, as this process last read them all."""

from __future__ import annotations

import heapq
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from django.db import connections

from ..backends.base import BaseBackend
from ..claims import Holder
from ..keys import SEPARATOR, check_key
from .asking import NoAnswer
from .entries import MAX_LISTED, NAMED, SORTS, Entry, Found, Wanted, mode_of

# Seconds for which a snapshot is as good as new. One that takes long to read is read again only
# after ten times as long, so that looking takes no more than a tenth of the process's time.
FRESH = 2.0
SPARING = 10
# A page waits so long for one that is about to be there.
GRACE = 0.3
# Seconds without anybody looking after which it is forgotten.
KEPT = 60.0
# Seconds after which one that is being read counts as down, if it is not known to take long.
SILENT = 10.0
# More holders than this are not read: they would fill the memory.
MAX_READ = 100_000


class Snapshot:
    """What was read, by key."""

    def __init__(self, alias: str, holders: Iterable[Holder]) -> None:
        self.taken = time.monotonic()
        self.cut = False
        first: dict[str, list[Holder]] = {}
        counts: dict[str, int] = {}
        now = time.time()
        # Most are of few hosts and threads: one copy of each will do.
        known: dict[str, str] = {}
        for number, holder in enumerate(holders):
            if number >= MAX_READ:
                self.cut = True
                break
            name = check_key(holder.key)
            counts[name] = counts.get(name, 0) + 1
            named = first.setdefault(name, [])
            if len(named) < NAMED:
                host = known.setdefault(holder.host, holder.host)
                thread = known.setdefault(holder.thread, holder.thread)
                named.append(replace(holder, host=host, thread=thread))
        self.entries = [
            _entry(alias, name, first[name], counts[name], now) for name in sorted(first)
        ]
        self.took = time.monotonic() - self.taken
        self._orders: dict[tuple[str, bool], Sequence[Entry]] = {("key", False): self.entries}
        self._texts: dict[str, str] | None = None

    def find(self, wanted: Wanted, waited: Mapping[str, int] | None) -> Found:
        """The first of what is wanted."""
        chosen = self._matching(wanted, waited or {})
        if chosen is None:
            count, ordered = len(self.entries), self._ordered(wanted, waited or {})
        else:
            count, ordered = len(chosen), _sorted(chosen, wanted, waited or {})
        passed = time.monotonic() - self.taken
        return Found(
            entries=[
                replace(
                    entry,
                    age=entry.age + passed,
                    left=entry.left - passed,
                    waiters=None if waited is None else waited.get(entry.name, 0),
                )
                for entry in islice(ordered, wanted.until)
            ],
            count=min(count, MAX_LISTED),
            more=count > MAX_LISTED,
            as_of=passed,
            cut=self.cut,
        )

    def _ordered(self, wanted: Wanted, waited: Mapping[str, int]) -> Iterable[Entry]:
        if wanted.sort == "waiters":
            return _by_waiters(self.entries, wanted, waited)
        order = (wanted.sort, wanted.descending)
        if order not in self._orders:
            self._orders[order] = list(_sorted(self.entries, wanted, waited))
        return self._orders[order]

    def _matching(self, wanted: Wanted, waited: Mapping[str, int]) -> list[Entry] | None:
        """Those that pass the filters; None if there are none."""
        found: list[Entry] | None = None
        if wanted.below:
            below = wanted.below + SEPARATOR
            found = [one for one in self.entries if one.name.startswith(below)]
        if wanted.waited_for:
            source = self.entries if found is None else found
            found = [one for one in source if one.name in waited]
        if wanted.mode:
            source = self.entries if found is None else found
            found = [one for one in source if one.mode == wanted.mode]
        if wanted.longer_than:
            source = self.entries if found is None else found
            least = wanted.longer_than - (time.monotonic() - self.taken)
            found = [one for one in source if one.age > least]
        for word in map(str.lower, wanted.words):
            source = self.entries if found is None else found
            texts = self._searched()
            found = [one for one in source if word in texts[one.name]]
        return found

    def _searched(self) -> dict[str, str]:
        if self._texts is None:
            self._texts = {entry.name: _text(entry) for entry in self.entries}
        return self._texts


def _entry(alias: str, name: str, holders: list[Holder], count: int, now: float) -> Entry:
    return Entry(
        alias=alias,
        name=name,
        mode=mode_of(holders[0]),
        holders=tuple(holders),
        count=count,
        age=max(now - min(one.since.timestamp() for one in holders), 0.0),
        left=max(one.remaining for one in holders),
    )


def _text(entry: Entry) -> str:
    parts = [entry.name]
    for holder in entry.holders:
        parts += (holder.label, holder.host, holder.thread, holder.owner_id)
    return "\n".join(parts).lower()


def _sorted(entries: Sequence[Entry], wanted: Wanted, waited: Mapping[str, int]) -> Iterable[Entry]:
    """In the wanted order, of entries in that of their names."""
    if wanted.sort == "waiters":
        return _by_waiters(entries, wanted, waited)
    value = SORTS[wanted.sort]
    if len(entries) > 10 * MAX_LISTED:
        # Nobody pages to the others.
        pick = heapq.nlargest if wanted.descending else heapq.nsmallest
        return pick(MAX_LISTED + 1, entries, key=value)
    return sorted(entries, key=value, reverse=wanted.descending)


def _by_waiters(
    entries: Sequence[Entry], wanted: Wanted, waited: Mapping[str, int]
) -> Iterator[Entry]:
    first = [one for one in entries if one.name in waited] if waited else []
    first.sort(key=lambda one: waited[one.name], reverse=wanted.descending)
    rest = (one for one in entries if one.name not in waited)
    yield from (
        (*first, *islice(rest, MAX_LISTED + 1))
        if wanted.descending
        else (
            *islice(rest, MAX_LISTED + 1),
            *first,
        )
    )


class Watch:
    """One backend, for as long as somebody looks at its locks."""

    def __init__(self, backend: BaseBackend) -> None:
        self._backend = weakref.ref(backend)
        self._alias = backend.alias
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._error: Exception | None = None
        # On the monotonic clock: when the reading that is under way began, when the last one ended,
        # and when somebody last looked.
        self._began: float | None = None
        self._ended = 0.0
        self._looked = 0.0
        self._expired = False

    def start(self) -> None:
        """Have it read again if that is due."""
        with self._condition:
            self._looked = time.monotonic()
            if self._began is None and self._is_due():
                self._began = self._looked
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name=f"distlocks-look-{self._alias}", daemon=True
                    )
                    self._thread.start()
                self._condition.notify_all()

    def _is_due(self) -> bool:
        took = self._snapshot.took if self._snapshot else 0.0
        return time.monotonic() >= self._ended + max(FRESH, SPARING * took)

    def expire(self) -> None:
        """What is known, and what is being read, is not true any more."""
        with self._condition:
            self._expired = self._began is not None
            self._ended = 0.0
            self._snapshot = self._error = None

    def latest(self, until: float) -> Snapshot | None:
        """The last one; the first one is waited for until then on the monotonic clock. None if it
        is being read; raises what went wrong, or NoAnswer."""
        now = time.monotonic()
        with self._condition:
            known = self._snapshot is not None or self._error is not None
            patience = min(until, now + GRACE) if known else until
            self._condition.wait_for(lambda: self._began is None, max(patience - now, 0.0))
            if self._error is not None:
                raise self._error
            if self._began is not None:
                took = self._snapshot.took if self._snapshot else 0.0
                silent = time.monotonic() - self._began
                if silent > max(SPARING * took, SILENT):
                    raise NoAnswer(f"no answer for {silent:.0f} s")
            return self._snapshot

    def _run(self) -> None:
        while True:
            self._read()
            with self._condition:
                while self._began is None:
                    idle = time.monotonic() - self._looked
                    if idle >= KEPT:
                        # Gives the memory back.
                        self._snapshot = self._error = self._thread = None
                        return
                    self._condition.wait(KEPT - idle)

    def _read(self) -> None:
        snapshot: Snapshot | None = None
        error: Exception | None = None
        backend = self._backend()
        try:
            if backend is not None:
                snapshot = Snapshot(self._alias, backend.scan())
        except Exception as raised:
            error = raised
        finally:
            # Of this thread's, if the store is a database.
            connections.close_all()
            with self._condition:
                if self._expired:
                    self._expired = False
                    self._began = time.monotonic()
                else:
                    self._snapshot, self._error = snapshot, error
                    self._began, self._ended = None, time.monotonic()
                    self._condition.notify_all()


_watches: weakref.WeakKeyDictionary[BaseBackend, Watch] = weakref.WeakKeyDictionary()
_mutex = threading.Lock()


def watch(backend: BaseBackend) -> Watch:
    """This process's watch of a backend."""
    with _mutex:
        found = _watches.get(backend)
        if found is None:
            found = _watches[backend] = Watch(backend)
        return found


def _after_fork() -> None:
    global _mutex
    _mutex = threading.Lock()
    _watches.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
