"""What one database is still to be told of the history, and how it is told."""

from __future__ import annotations

import logging
from collections import Counter, deque

from django.db import DataError, connections

from .. import facts, logs
from ..facts import Fact
from ..keys import key_of
from ..patterns import pattern_of
from . import tables
from .rollups import COUNTERS, Cells

# Seconds between two additions to the counters in the tables.
ADD_EVERY = 5.0
# Rows that wait for the database, of ordinary events and of others; and rows of ordinary ones that
# are written in one second. What is beyond is counted, and dropped.
MAX_ORDINARY = 5_000
MAX_OTHERS = 5_000
ORDINARY_AT_ONCE = 500
# Seconds until a database that failed is tried again: at first, and at the longest.
RETRY, LONGEST_RETRY = 1.0, 30.0


class Ledger:
    """What one database is owed."""

    def __init__(self, database: str, all_dropped: Counter[str] | None = None) -> None:
        self.database = database
        # By alias of a backend, since the process began.
        self.all_dropped: Counter[str] = Counter() if all_dropped is None else all_dropped
        self.cells = Cells()
        self.ordinary: deque[Fact] = deque()
        self.others: deque[Fact] = deque()
        self.add_at = 0.0
        self.retry_at = 0.0
        self._pause = 0.0
        # Since it has been out of reach.
        self.dropped = 0

    @property
    def owed(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.ordinary or self.others or len(self.cells))

    def drop(self, alias: str, pattern: str, at: float, count: int = 1) -> None:
        """Count what is not going to be written."""
        self.dropped += count
        self.all_dropped[alias] += count
        self.cells.count("dropped", alias, pattern, at, count)

    def note(self, fact: Fact) -> None:
        """Keep a fact until it is written; or only count it."""
        pattern = fact.pattern or pattern_of(fact.name)
        counter = COUNTERS.get(fact.kind)
        if counter is not None:
            self.cells.count(counter, fact.alias, pattern, fact.at, in_total=fact.is_first)
        is_ordinary = fact.kind in facts.ORDINARY
        queue = self.ordinary if is_ordinary else self.others
        if len(queue) >= (MAX_ORDINARY if is_ordinary else MAX_OTHERS):
            self.drop(fact.alias, pattern, fact.at)
        else:
            queue.append(fact)

    def thin_out(self) -> None:
        """Drop of the ordinary events what is more than may be written at once."""
        while len(self.ordinary) > ORDINARY_AT_ONCE and not self.failing:
            fact = self.ordinary.pop()
            self.drop(fact.alias, fact.pattern or pattern_of(fact.name), fact.at)

    @property
    def failing(self) -> bool:
        """Whether it was out of reach when it was last tried."""
        return bool(self._pause)

    def write(self, now: float, *, all_of_it: bool = False) -> None:
        """Write what is due. What could not be written is kept."""
        if now < self.retry_at and not all_of_it:
            return
        try:
            tables.prepare(self.database)
            self._write_events()
            if now >= self.add_at or all_of_it:
                self.add_at = now + ADD_EVERY
                self._write_cells()
        except Exception as error:
            self._failed(now, error)
        else:
            if self.failing:
                logs.event(
                    logging.WARNING,
                    "history_back",
                    "",
                    (),
                    "The history of locks is written to the database %r again; %d events were "
                    "lost meanwhile.",
                    self.database,
                    self.dropped,
                    database=self.database,
                    dropped=self.dropped,
                )
                self._pause = self.retry_at = 0.0
                self.dropped = 0

    def _write_events(self) -> None:
        for queue in (self.others, self.ordinary):
            while queue:
                page = [queue[index] for index in range(min(len(queue), ORDINARY_AT_ONCE))]
                try:
                    tables.write_events(self.database, page)
                except (DataError, ValueError):
                    self._write_one_by_one(page)
                for _ in page:
                    queue.popleft()

    def _write_one_by_one(self, page: list[Fact]) -> None:
        """One of them cannot be kept: it is not to keep the others from it."""
        for fact in page:
            try:
                tables.write_events(self.database, [fact])
            except (DataError, ValueError) as error:
                self.drop(fact.alias, fact.pattern or pattern_of(fact.name), fact.at)
                logs.event(
                    logging.WARNING,
                    "history_dropped",
                    fact.alias,
                    [key_of(fact.name)] if fact.name else (),
                    "What has happened to a lock cannot be kept: %s",
                    error,
                )

    def _write_cells(self) -> None:
        cells = self.cells.take()
        if cells:
            try:
                tables.add_up(self.database, cells)
            except BaseException:
                self.cells.put_back(cells)
                raise

    def _failed(self, now: float, error: Exception) -> None:
        if not self.failing:
            logs.event(
                logging.WARNING,
                "history_failing",
                "",
                (),
                "The history of locks cannot be written to the database %r; locks are not "
                "affected. It is tried again; what does not fit into memory meanwhile is only "
                "counted. If the tables are missing, run 'manage.py migrate distlocks --database "
                "%s'. %s: %s",
                self.database,
                self.database,
                type(error).__name__,
                error,
                database=self.database,
                error=f"{type(error).__name__}: {error}",
            )
        self._pause = min(max(self._pause * 2, RETRY), LONGEST_RETRY)
        self.retry_at = now + self._pause
        connections[self.database].close()
