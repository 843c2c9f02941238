"""Locks of a test's own, those who wait for them, and what the history tells of both."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

from distlocks import db_lock
from distlocks.claims import to_us
from distlocks.history import waits as waits_module
from distlocks.history.waits import waits
from distlocks.models import LockRollup, LockWaiter

ALIAS = "watched"
MEMORY: dict[str, Any] = {"BACKEND": "distlocks.backends.memory.MemoryBackend", "HISTORY_DAYS": 1}


@contextmanager
def waiting_for(key: Any, *held: Any, timeout: float | None = 20, **options: Any) -> Iterator[str]:
    """Somebody waits for the key, who holds others; has told so when the block begins, and gets
    the key after it. The name of the thread."""
    options.setdefault("backend", ALIAS)
    name = f"waits for {key}"[:90]
    began = threading.Event()

    def wait() -> None:
        leases = [db_lock(one, **options).acquire() for one in held]
        began.set()
        with db_lock(key, timeout=timeout, **options):
            pass
        for lease in leases:
            lease.release()
        connections.close_all()

    thread = threading.Thread(target=wait, name=name)
    thread.start()
    assert began.wait(10)
    try:
        tell_of(name)
        yield name
    finally:
        waits._tell_at.clear()


def tell_of(thread: str) -> None:
    """Have the table tell of who waits in that thread."""
    give_up = time.monotonic() + 10
    while not LockWaiter.objects.filter(thread=thread).exists():
        assert time.monotonic() < give_up, "it does not wait"
        waits._tell_at.clear()
        waits.tell(time.monotonic())
        time.sleep(0.005)


def row(owner_id: str, key: str, *, holds: str = "", blockers: tuple[str, ...] = ()) -> LockWaiter:
    """Who has waited for a minute, as another process tells it, which holds another key."""
    now = time.time()
    return LockWaiter.objects.create(
        owner_id=owner_id,
        backend=ALIAS,
        key=key,
        host="web-2",
        pid=7,
        thread=f"thread-{owner_id}",
        label="",
        since=to_us(now - 60),
        deadline=to_us(now + 30),
        valid_until=to_us(now + waits_module.TOLD_FOR),
        blockers=list(blockers),
        holds=[{"owner_id": f"{owner_id}-held", "backend": ALIAS, "keys": [holds]}]
        if holds
        else [],
        holding=int(bool(holds)),
    )


def a_circle() -> None:
    """Two wait for each other."""
    row("one", "left", holds="right", blockers=("two-held",))
    row("two", "right", holds="left", blockers=("one-held",))


def counted(alias: str = ALIAS, *, ago: float = 30, **counts: int) -> None:
    """What has been counted of the minute so long ago."""
    began = int(time.time() - ago) // 60 * 60
    LockRollup.objects.create(backend=alias, began=began, span=60, pattern="", **counts)
