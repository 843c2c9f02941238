"""Threads that do what is put to them, and keep nobody waiting at the interpreter's exit."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from . import logs

if TYPE_CHECKING:
    from .backends.base import BaseBackend

Job = Callable[[], object]
Jobs = queue.SimpleQueue[Job | None]


class JobThreads:
    """Up to `count` daemon threads, started as jobs come. What a job raises is logged.

    With one thread, jobs are done in their order. `when_idle`, if given, is called in a thread
    that has had no job for a second. Unlike an executor's, these threads go on while the
    interpreter exits, so that releases which are due are still sent, and none is waited for.
    """

    def __init__(self, name: str, *, count: int = 1, when_idle: Job | None = None) -> None:
        self._name = name
        self._count = count
        self._when_idle = when_idle
        # Reentrant: a finaliser may put a job while this thread is putting one.
        self._mutex = threading.RLock()
        self._jobs: Jobs = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def put(self, job: Job) -> None:
        """Have `job` done soon. Never raises, and blocks for no job: finalisers call it."""
        with self._mutex:
            self._jobs.put(job)
            if len(self._threads) < self._count:
                name = f"{self._name}-{len(self._threads)}" if self._count > 1 else self._name
                thread = threading.Thread(
                    target=self._run, args=(self._jobs,), name=name, daemon=True
                )
                # At the very end of the interpreter it is too late for new threads.
                with suppress(RuntimeError):
                    thread.start()
                    self._threads.append(thread)

    def join(self, timeout: float | None = None) -> bool:
        """With one thread: wait until all that was put so far is done; whether it was in time."""
        if not self._threads:
            return True
        done = threading.Event()
        self.put(done.set)
        return done.wait(timeout)

    def close(self, *, wait: bool = True) -> None:
        """End the threads after what has been put so far; a later job starts new ones."""
        with self._mutex:
            threads, self._threads = self._threads, []
            jobs, self._jobs = self._jobs, queue.SimpleQueue()
            for _ in threads:
                jobs.put(None)
        for thread in threads if wait else ():
            if thread is not threading.current_thread():
                thread.join()

    def _run(self, jobs: Jobs) -> None:
        while (job := self._next(jobs)) is not None:
            try:
                job()
            except BaseException as error:
                # Even what is meant to end a thread: others depend on this one.
                self._log(error)
            # The next wait must not keep alive what the job refers to.
            del job

    def _next(self, jobs: Jobs) -> Job | None:
        if self._when_idle is not None:
            try:
                return jobs.get(timeout=1.0)
            except queue.Empty:
                try:
                    self._when_idle()
                except Exception as error:
                    self._log(error)
        return jobs.get()

    def _log(self, error: BaseException) -> None:
        logs.event(
            logging.ERROR,
            "job_failed",
            "",
            (),
            "A job of the thread %s failed",
            self._name,
            exc_info=error,
            thread=self._name,
        )


class ThreadPerBackend:
    """A thread for each lock backend, to talk to its store: one that hangs holds up no other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: dict[BaseBackend, JobThreads] = {}

    def of(self, backend: BaseBackend) -> JobThreads:
        """Called by finalisers: no lock here."""
        threads = self._threads.get(backend)
        if threads is None:
            threads = JobThreads(f"{self._name}-{backend.alias}")
            threads = self._threads.setdefault(backend, threads)
        return threads

    def forget(self, backend: BaseBackend) -> None:
        """End the thread of a backend that is done with, after what it has to do."""
        threads = self._threads.pop(backend, None)
        if threads is not None:
            threads.close(wait=False)

    def join(self, timeout: float) -> None:
        """Wait until each has done what was put to it so far, `timeout` seconds for each."""
        for threads in list(self._threads.values()):
            threads.join(timeout)
