"""Processes that claim a few keys in every way, each with a journal: for the `spawn` fixture."""

import os
import random
import time
from pathlib import Path
from typing import Any

from distlocks import LeaseLost, LockTimeout, db_lock, locks
from distlocks.clock import lease_now
from distlocks.keys import Key
from tests.integration.hazards.roles import say
from tests.integration.rig.journal import Journal

# Seconds.
TTL = 1.0
LIMIT = 3


def one_statement() -> None:
    """Control: latch and look in one statement, which counts what was there before it waited."""
    from distlocks.backends.database import several_sql
    from distlocks.backends.database.several import Latched, Seen

    seen: dict[str, Seen] = {}

    class OneStatement(several_sql.SqlSeveral):
        def latch(self, session: Any, key: str) -> Latched:
            both = f"WITH latch AS MATERIALIZED ({self._latch}) SELECT * FROM latch, ({self._look})"
            params = {"key": key, "owner": ""}
            while not (rows := session.execute(f"{both} AS looked", params)):
                session.execute(self._open, {"key": key})
            *row, now, count, mode, soonest, latest, _, _ = rows[0]
            seen[key] = Seen(now, count, mode or "", soonest or 0, latest or 0, 0, 0)
            return Latched(*row)

        def look(self, session: Any, key: str, owner_id: str) -> Seen:
            return seen.pop(key)

    dialect: Any = locks["postgres"].dialect  # type: ignore[attr-defined]
    table, holders = dialect.table, dialect.tables.holders
    from distlocks.backends.database.postgresql import US

    dialect.several = OneStatement(table, holders, US, several_sql.STANDARD)


CONTROLS = {"one_statement": one_statement}


def claim(
    alias: str, keys: list[list[str]], journal: str, seed: int, seconds: float, control: str = ""
) -> int:
    """Claim keys at random for so long, when told to begin; how many leases were had."""
    if control:
        CONTROLS[control]()
    choose = random.Random(seed)
    notes = Journal(Path(journal))
    grants = 0
    say("ready")
    input()
    end = lease_now() + seconds
    while lease_now() < end:
        options: dict[str, Any] = choose.choice([{}, {"shared": True}, *[{"limit": LIMIT}] * 3])
        wanted: list[Key] = [
            key[0] if len(key) == 1 else tuple(key)
            for key in choose.sample(keys, choose.choice((1, 1, 2)))
        ]
        lock = db_lock(
            *wanted, backend=alias, ttl=TTL, timeout=choose.choice((0, 0.2, 2)), **options
        )
        try:
            with lock as lease:
                had = lease_now()
                notes.write(
                    "had",
                    owner=lease.owner_id,
                    claims=[list(one) for one in lease._grant.claims],
                    tokens=list(lease._grant.fencing_tokens),
                    at=had,
                    deadline=lease.deadline,
                    pid=os.getpid(),
                )
                grants += 1
                time.sleep(choose.choice((0, 0.001, 0.003, 0.01)))
                notes.write("gives back", owner=lease.owner_id, at=min(lease_now(), lease.deadline))
        except (LockTimeout, LeaseLost):
            continue
    return grants


def lock_both_ways(alias: str, first: str, second: str, seconds: float) -> int:
    """Take two keys in the order given, now exclusively, now shared, for so long; how often."""
    say("ready")
    input()
    times, end = 0, lease_now() + seconds
    while lease_now() < end:
        shared = times % 3 == 0
        with db_lock(first, second, backend=alias, timeout=60, shared=shared):
            times += 1
    return times


def count_permits(alias: str, key: str, seconds: float, control: str = "") -> int:
    """Take a permit for a moment, again and again; at most how many had one at a time."""
    if control:
        CONTROLS[control]()
    most = 0
    say("ready")
    input()
    end = lease_now() + seconds
    while lease_now() < end:
        lease = db_lock(key, backend=alias, limit=LIMIT, timeout=0).try_acquire()
        if lease is not None:
            most = max(most, len(locks[alias].holders(key)))
            lease.release()
    return most
