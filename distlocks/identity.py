"""Who is asking: owner ids, and what an operator is told about the asker."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import sys
import threading
import weakref
from functools import lru_cache


@lru_cache(maxsize=1024)
def _shown(text: str) -> str:
    """A name that is only shown, as every store can keep it."""
    if not text.isprintable():
        text = text.encode("ascii", "backslashreplace").decode()
        text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text[:100]


class _Process:
    """What is the same for every request of this process."""

    __slots__ = ("counter", "host", "pid", "prefix")

    def __init__(self) -> None:
        # 96 random bits per process and a counter: unique without a system call per acquire.
        self.prefix = secrets.token_hex(12)
        self.counter = itertools.count(1)
        self.host = _shown(socket.gethostname())
        self.pid = os.getpid()


_process = _Process()


def _after_fork() -> None:
    global _process
    _process = _Process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def new_owner_id() -> str:
    """An owner id that no other acquire has ever had."""
    return f"{_process.prefix}-{next(_process.counter):x}"


def host() -> str:
    """This machine's name."""
    return _process.host


def pid() -> int:
    """This process's id, without a system call."""
    return _process.pid


_numbers = itertools.count(1)
_threads = threading.local()
_tasks: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def unit() -> tuple[str, int]:
    """The running asyncio task, else the thread: its name, and a number that no other ever has in
    this process: the system's own are used again."""
    task = current_task()
    if task is not None:
        number = _tasks.get(task)
        if number is None:
            number = _tasks[task] = next(_numbers)
        return _shown(task.get_name()), number  # type: ignore[attr-defined]
    number = getattr(_threads, "number", None)
    if number is None:
        number = _threads.number = next(_numbers)
    return _shown(threading.current_thread().name), number


def current_task() -> object | None:
    """The running asyncio task, if there is one."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    task: object | None = asyncio.current_task()
    return task
