"""How what happens gets from the threads that lock to the tables: collected, counted, written.

Whoever locks puts an entry on a list and goes on. One thread per process looks at the list once a
second. What it cannot write, because the database is down or too much happens, is counted.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from django.db import connections

from .. import facts, logs
from ..claims import Holder
from ..conf import under_test_runner
from ..facts import Fact
from ..keys import SEPARATOR, Key
from ..patterns import pattern_of
from .ledger import Ledger
from .rollups import Tally

if TYPE_CHECKING:
    from ..backends.base import BaseBackend

# Seconds between two looks at the list.
LOOK_EVERY = 1.0
# Seconds without anything to do after which the thread ends.
LINGER = 10.0
# Entries that wait for the thread's look.
MAX_ENTRIES = 50_000
# Seconds for what is left to be written when the interpreter exits.
AT_EXIT = 2.0

# What most entries are: the backend, the keys, their patterns where these are known better than
# from the keys, seconds, and whether it is a lease that was released after having been held for so
# long (or one that was granted after having been waited for).
Passed = tuple["BaseBackend", tuple[Key, ...], "tuple[str, ...] | None", float, bool]
Noted = tuple["BaseBackend", Fact]
Entry = Passed | Noted
# Called from the journal's thread with the entries that have come since the last call.
Observer = Callable[[Sequence[Entry]], None]


def names_of(keys: tuple[Key, ...]) -> list[str]:
    """The keys' names, as stores and tables know them."""
    return [SEPARATOR.join(key) if isinstance(key, tuple) else key for key in keys]


def patterns_in(entry: Passed) -> Iterable[str]:
    """The patterns of the keys of an entry, each once."""
    _, keys, patterns, _, _ = entry
    if patterns is not None:
        return patterns if len(patterns) == 1 else set(patterns)
    if len(keys) == 1:
        key = keys[0]
        return (pattern_of(key if isinstance(key, str) else SEPARATOR.join(key)),)
    return set(map(pattern_of, names_of(keys)))


class Journal:
    """The history of this process's locks, on its way to the tables."""

    def __init__(self) -> None:
        # Who else wants to know.
        self.observers: list[Observer] = []
        # What else the thread does, given the time on the monotonic clock; whether there is more.
        self.chores: list[Callable[[float], bool]] = []
        # What was not written, and what no observer has seen: by alias of a backend.
        self.dropped: Counter[str] = Counter()
        self._reset()

    def _reset(self) -> None:
        self._entries: deque[Entry] = deque()
        self._overflow: Counter[BaseBackend] = Counter()
        self._ledgers: dict[str, Ledger] = {}
        self._condition = threading.Condition()
        # One look at a time.
        self._looking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._awake = False
        # How often somebody has asked for everything to be written, and how often that was done.
        self._asked = self._served = 0

    # What is called by who locks

    def put(self, entry: Entry) -> None:
        """Have the entry counted, or written. Never blocks, never raises."""
        if len(self._entries) >= MAX_ENTRIES:
            self._overflow[entry[0]] += 1
            return
        self._entries.append(entry)
        if not self._awake:
            self.wake()

    def note(
        self,
        kind: str,
        backend: BaseBackend,
        keys: tuple[Key, ...],
        patterns: tuple[str, ...] | None = None,
        **about: object,
    ) -> None:
        """Have a fact written, about each of the keys, if the backend's history is kept.

        `patterns` are known better than from the keys; of several, which is whose is not.
        """
        if not self.wants(backend):
            return
        at = time.time()
        if reason := about.get("reason"):
            about["reason"] = facts.shown_text(str(reason))
        pattern = patterns[0] if patterns is not None and len(patterns) == 1 else ""
        for number, name in enumerate(names_of(keys) or [""]):
            fact = Fact(
                kind=kind,
                alias=backend.alias,
                at=at,
                name=name,
                pattern=pattern,
                is_first=not number,
                **about,  # type: ignore[arg-type]
            )
            self.put((backend, fact))

    def wants(self, backend: BaseBackend) -> bool:
        """Whether anybody asks what happens to the backend's locks."""
        return backend.recorded or bool(self.observers)

    def note_expired(
        self, kind: str, backend: BaseBackend, holders: Sequence[Holder], by: facts.Who | None
    ) -> None:
        """Have it written that these leases were found past their expiry, and logged: once for
        each lease."""
        leases: dict[str, list[Holder]] = {}
        for holder in holders:
            leases.setdefault(holder.owner_id, []).append(holder)
        for first, *others in leases.values():
            logs.event(
                logging.WARNING,
                kind,
                backend.alias,
                [holder.key for holder in (first, *others)],
                "A lease was never released, and expired: %s",
                first,
                **logs.of(first),
            )
        for holder in holders:
            self.note(
                kind,
                backend,
                (holder.key,),
                who=facts.Who.of(holder),
                other=by,
                fencing_token=holder.fencing_token,
            )

    # The thread

    def wake(self) -> None:
        """Have the thread look soon."""
        if under_test_runner():
            # There, who asks for it looks: see distlocks.testing.
            return
        with self._condition:
            if self._awake:
                return
            thread = threading.Thread(target=self._run, name="distlocks-history", daemon=True)
            self._thread, before = thread, self._thread
            try:
                thread.start()
            except RuntimeError:
                # At the very end of the interpreter it is too late for new threads.
                self._thread = before
                return
            self._awake = True

    def _run(self) -> None:
        busy_at = time.monotonic()
        while self._thread is threading.current_thread():
            with self._condition:
                if self._asked <= self._served:
                    self._condition.wait(LOOK_EVERY)
                asked = self._asked
            try:
                busy = self.look(all_of_it=asked > self._served)
            except BaseException as error:
                # The next look may go better; without it nothing would be kept any more.
                _log_fault("The history of locks could not be kept", error)
                busy = True
            with self._condition:
                self._served = asked
                self._condition.notify_all()
            now = time.monotonic()
            if busy:
                busy_at = now
            elif now - busy_at >= LINGER and self._may_end():
                break
        connections.close_all()

    def _may_end(self) -> bool:
        with self._condition:
            self._awake = False
            if self._entries:
                # Whoever put it may have seen us awake.
                self._awake = True
            return not self._awake

    def look(self, *, all_of_it: bool = False) -> bool:
        """Do what is due; whether there was or is anything to do."""
        with self._looking:
            now = time.monotonic()
            busy = self._collect()
            for ledger in list(self._ledgers.values()):
                if ledger.owed:
                    busy = True
                    ledger.thin_out()
                    ledger.write(now, all_of_it=all_of_it)
            for chore in self.chores:
                busy |= chore(now)
            return busy

    def _collect(self) -> bool:
        """Take what is on the list, and count it."""
        at = time.time()
        entries = [self._entries.popleft() for _ in range(len(self._entries))]
        # Of these there may be many: first among themselves.
        tallies: dict[tuple[BaseBackend, str, bool, bool], Tally] = {}
        for entry in entries:
            if len(entry) == 2:
                ledger = self._ledger_of(entry[0])
                if ledger is not None:
                    ledger.note(entry[1])
                continue
            backend, _, _, seconds, was_released = entry
            is_first = True
            for pattern in patterns_in(entry):
                of = (backend, pattern, was_released, is_first)
                is_first = False
                tally = tallies.get(of)
                if tally is None:
                    tally = tallies[of] = Tally()
                tally.add(seconds)
        for (backend, pattern, was_released, is_first), tally in tallies.items():
            ledger = self._ledger_of(backend)
            if ledger is not None:
                count = ledger.cells.released if was_released else ledger.cells.granted
                count(backend.alias, pattern, at, tally, in_total=is_first)
        overflow, self._overflow = self._overflow, Counter()
        for backend, count_ in overflow.items():
            ledger = self._ledger_of(backend)
            if ledger is not None:
                ledger.drop(backend.alias, "", at, count_)
            else:
                self.dropped[backend.alias] += count_
        if entries:
            for observer in list(self.observers):
                try:
                    observer(entries)
                except Exception as error:
                    _log_fault("An observer of the history of locks failed", error)
        return bool(entries)

    def _ledger_of(self, backend: BaseBackend) -> Ledger | None:
        if not backend.recorded:
            return None
        database = backend.params.history_database
        ledger = self._ledgers.get(database)
        if ledger is None:
            ledger = self._ledgers[database] = Ledger(database, self.dropped)
        return ledger

    def flush(self) -> bool:
        """Write, in this thread, all that has happened so far; whether that could be done."""
        self.look(all_of_it=True)
        return not any(ledger.owed for ledger in self._ledgers.values())

    def forget(self) -> None:
        """Drop what has not been written."""
        with self._looking:
            self._entries.clear()
            self._overflow.clear()
            self._ledgers.clear()

    def finish(self, timeout: float) -> None:
        """Have the thread write what there is, in so many seconds."""
        with self._condition:
            if self._awake:
                self._asked += 1
                asked = self._asked
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._served >= asked, timeout)


def _log_fault(message: str, error: BaseException) -> None:
    logs.event(logging.ERROR, "history_fault", "", (), message, exc_info=error)


journal = Journal()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=journal._reset)
atexit.register(journal.finish, AT_EXIT)
