"""Locks in all their states, for pages to be looked at."""

from typing import Any

from distlocks.models import LockHolder, LockWaiter
from tests.factories import SECOND, LockFactory, now_us

# A backend at whose address nobody listens.
DOWN = {
    "BACKEND": "distlocks.backends.redis.RedisBackend",
    "OPTIONS": {"url": "redis://127.0.0.1:1/0"},
}


def waits_for(key: str, owner_id: str, **fields: Any) -> LockWaiter:
    """Somebody who waits, as they tell."""
    told: dict[str, Any] = {
        "backend": "default",
        "host": "worker-2",
        "pid": 4711,
        "thread": "MainThread",
        "since": now_us() - 5 * SECOND,
        "deadline": now_us() + 20 * SECOND,
        "valid_until": now_us() + 600 * SECOND,
    }
    return LockWaiter.objects.create(key=key, owner_id=owner_id, **(told | fields))


def shared(key: str, mode: str, count: int, **fields: Any) -> None:
    """A key that several have."""
    lock = LockFactory(key=key, mode=mode, owner_id="", **fields)
    for number in range(count):
        LockHolder.objects.create(
            key=key,
            mode=mode,
            owner_id=f"{key}-{number}",
            fencing_token=lock.fencing_token + number,
            acquired_at=lock.acquired_at,
            expires_at=lock.expires_at,
            host="worker-1",
            pid=500 + number,
            thread="reader",
        )


def many_kinds() -> None:
    """One of each state, some of them waited for."""
    metadata = {"user": "olga", "request_id": "7f3a90c2", "path": "/orders/42/"}
    LockFactory(key="order:42", label="checkout", metadata=metadata, age=12)
    LockFactory(key="invoice:2024-0017", thread="Task-17", age=95, metadata={"task": "bill[8c1]"})
    LockFactory(key="nightly-report", label="nightly", host="cron-1", age=4000)
    LockFactory(key="import:products", cooling=True, age=50)
    shared("catalogue", "shared", 5, age=30)
    shared("export", "permit", 2, age=8)
    shared("customer:7", "intention", 1, age=20)
    LockFactory(key="customer:7\x1forder:42", age=20)
    LockFactory(key="file:/srv/data/" + "very-long-name-" * 8 + ".csv", age=3)
    for number in range(3):
        waits_for("order:42", f"waiter-{number}")
    waits_for("catalogue", "writer")
