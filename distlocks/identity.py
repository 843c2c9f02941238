"""Who is asking: owner ids, and what an operator is told about the asker."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import sys
import threading
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


def unit() -> tuple[str, int]:
    """The running asyncio task, else the thread: its name, and what no other that runs now has in
    this process."""
    task = current_task()
    if task is not None:
        return _shown(task.get_name()), id(task)  # type: ignore[attr-defined]
    thread = threading.current_thread()
    return _shown(thread.name), thread.ident or 0


def current_task() -> object | None:
    """The running asyncio task, if there is one."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    task: object | None = asyncio.current_task()
    return task
