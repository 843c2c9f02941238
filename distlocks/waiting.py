"""Deadlines, and when to try again. Pure: no I/O, no clock of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator

# The lease clock may run up to 1 % slower than the store's before a lease outlives its row.
DRIFT = 0.01
# Added to the drift: timer granularity and the time between the check and the act.
GRANULARITY = 0.002
# Nobody sleeps longer than this beside a lock, whatever was announced or not.
MAX_SLEEP = 5.0
# How long a statement waits for a row that another statement has in its hands.
ROW_WAIT = 0.25


def lease_deadline(first_send: float, ttl: float) -> float:
    """When a lease of `ttl` seconds must be taken for lost, on the lease clock.

    `first_send` is the reading from *before* the request was first sent: the store counts the
    lease from later than that, so the holder gives up before the store does.
    """
    return first_send + ttl * (1 - DRIFT) - GRANULARITY


def renewal_due(now: float, ttl: float, deadline: float) -> float:
    """When to extend a lease of `ttl` seconds that was granted or extended just now."""
    return min(now + ttl / 3, deadline)


def renewal_retry(now: float, ttl: float, deadline: float) -> float:
    """When to try again after an extension failed: several more times before the deadline."""
    rest = deadline - now
    return now + min(ttl / 10, max(rest / 4, 0.02)) * random.uniform(0.8, 1.2)


def wake_at(now: float, give_up: float, remaining: float) -> float:
    """Until when a waiter may sleep: its own end, just past the holder's expiry, or MAX_SLEEP."""
    past_expiry = now + max(remaining, 0.0) + random.uniform(0.002, 0.010)
    return min(give_up, past_expiry, now + MAX_SLEEP)


def poll_delay(attempt: int, *, cap: float) -> float:
    """Seconds before the next look at a held key by a waiter whom nobody wakes up.

    Jittered and growing by half each time, from about 2 ms to `cap` seconds.
    """
    bound = 0.002 * 1.5 ** min(attempt, 30)
    return min(bound, cap) * random.uniform(0.5, 1.0)


def busy_delays() -> Iterator[float]:
    """Seconds between tries to write to a database that another writer has locked.

    Uniform up to a bound that grows from 1 to 5 ms: measured to starve nobody, unlike SQLite's
    own busy handler, whose sleeps grow to 100 ms.
    """
    bound = 0.001
    while True:
        yield random.uniform(0.0003, bound)
        bound = min(bound * 1.5, 0.005)
