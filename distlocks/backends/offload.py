"""How a verb that blocks is called from an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ..threads import JobThreads

T = TypeVar("T")

# Threads of our own, not asgiref's thread-sensitive one: there, a sync caller that waits for a
# lock would keep its holder from releasing it. Verbs never wait, so a few serve any number of
# tasks.
_THREADS = 8
_threads = JobThreads("distlocks-async", count=_THREADS)


def _after_fork() -> None:
    global _threads
    _threads = JobThreads("distlocks-async", count=_THREADS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def submit(verb: Callable[[], T], threads: JobThreads | None = None) -> Future[T]:
    """Have `verb` run in another thread; what it returns or raises is the future's."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = verb()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    (threads or _threads).put(run)
    return future


async def offload(verb: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Run `verb` in a thread and wait for it on the event loop.

    A verb that has begun cannot be stopped. If the task is cancelled meanwhile, the verb runs to
    its end, `undo` gets its result in the same pool, and only then is the cancellation raised: no
    grant is left behind that nobody knows of. A second cancellation is raised at once; the undo
    takes place all the same.
    """
    return await _finish(submit(verb), undo)


async def _finish(future: Future[T], undo: Callable[[T], object] | None) -> T:
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.wrap_future(submit(lambda: _settle(future, undo))))
        raise


def _settle(future: Future[T], undo: Callable[[T], object] | None) -> None:
    if future.exception() is None and undo is not None:
        undo(future.result())
