"""Asking several stores at once, none for longer than there is time."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from django.contrib.auth import get_user_model
from django.db import connections, router, transaction

T = TypeVar("T")

# Seconds that a page waits for all stores together.
TIME = 1.5
# Threads that may be waiting for one store: further ones would wait as long.
MAX_ASKING = 4

_asking: Counter[str] = Counter()
_mutex = threading.Lock()
# By name, those that wait for a thread.
_queued: defaultdict[str, deque[Answer[Any]]] = defaultdict(deque)


class NoAnswer(Exception):
    """A store that does not answer in time."""


class Answer(Generic[T]):
    """What came of a question."""

    def __init__(self, name: str, question: Callable[[], T]) -> None:
        self._name = name
        self._question = question
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def start(self) -> Answer[T]:
        """Ask in a thread of its own, at once or when an earlier question has been answered."""
        with _mutex:
            if _asking[self._name] >= MAX_ASKING:
                _queued[self._name].append(self)
                return self
            _asking[self._name] += 1
        # Not one that the interpreter's exit would wait for.
        threading.Thread(
            target=self._apart, name=f"distlocks-look-{self._name}", daemon=True
        ).start()
        return self

    def _apart(self) -> None:
        asked: Answer[Any] | None = self
        while asked is not None:
            try:
                asked.ask()
            finally:
                connections.close_all()
            asked = self._next()

    def _next(self) -> Answer[Any] | None:
        """Who has waited longest for this thread; without any, it is one less that asks."""
        with _mutex:
            if queue := _queued[self._name]:
                return queue.popleft()
            _asking[self._name] -= 1
            return None

    def ask(self) -> Answer[T]:
        """Ask in this thread."""
        try:
            self._value = self._question()
        except Exception as error:
            self._error = error
        finally:
            self._done.set()
        return self

    @property
    def is_there(self) -> bool:
        """Whether it has come; result() does not wait then."""
        return self._done.is_set()

    def result(self, until: float) -> T:
        """The answer, waited for until then on the monotonic clock; raises what went wrong, or
        NoAnswer."""
        if not self._done.wait(max(until - time.monotonic(), 0.0)):
            with _mutex:
                # Nobody reads its answer any more.
                if self in _queued[self._name]:
                    _queued[self._name].remove(self)
                    raise NoAnswer(f"{MAX_ASKING} earlier questions have not been answered yet")
            raise NoAnswer(f"no answer within {TIME:g} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]


def is_ours(database: str) -> bool:
    """Whether a database is better asked in this thread.

    It may be the only one that sees what it has: inside a transaction. And where the users are, it
    has answered a moment ago, over a connection that is there.
    """
    return connections[database].in_atomic_block or database == router.db_for_read(get_user_model())


def of_database(database: str, question: Callable[[], T]) -> Callable[[], T]:
    """`question`, so that its failure leaves a transaction that is open usable."""

    def within() -> T:
        if not connections[database].in_atomic_block:
            return question()
        with transaction.atomic(using=database):
            return question()

    return within


def ask(questions: Mapping[str, tuple[str, Callable[[], T]]]) -> dict[str, Answer[T]]:
    """Ask all: by any name, the database that is asked if it is one, and the question."""
    answers: dict[str, Answer[T]] = {}
    ours = []
    for name, (database, question) in questions.items():
        if database:
            question = of_database(database, question)
        answer = answers[name] = Answer(name, question)
        if database and is_ours(database):
            ours.append(answer)
        else:
            answer.start()
    for answer in ours:
        answer.ask()
    return answers


def _after_fork() -> None:
    global _mutex
    _mutex = threading.Lock()
    _asking.clear()
    _queued.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
