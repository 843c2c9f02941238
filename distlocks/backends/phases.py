"""Which store of a fast path may grant, in what phase of a change. Needs no driver."""

from __future__ import annotations

REDIS, DRAIN, DATABASE, CLOSING = "redis", "drain", "db", "closing"

# What is said of each.
SAID = {
    REDIS: "Redis grants",
    DRAIN: "nobody grants until the leases from Redis have ended, then the database",
    DATABASE: "the database grants",
    CLOSING: "nobody grants until the leases from the database have ended, then Redis",
}
