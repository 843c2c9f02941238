"""Acquire and release on a majority of five servers, with nobody else there."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from django.conf import settings
from django.test import override_settings

from benchmarks.environment import Environment
from benchmarks.redis.entrants import TTL, Cycle, Pottery, RedlockNg, present
from benchmarks.rounds import Result, Target, interleaved, median, ratios, spread
from distlocks import db_lock, locks
from distlocks.backends.redlock import RedlockBackend
from tests.servers import finding
from tests.servers.redis import RedisServer
from tests.servers.redis_groups import IndependentGroup

OURS, SINGLE = "distlocks", "distlocks on one server"
PEERS = {RedlockNg: 2.5, Pottery: 8.0}


def run(env: Environment, quick: bool) -> list[Result]:
    rounds, cycles = (7, 50) if quick else (61, 100)
    _, notes = present(*PEERS)
    with IndependentGroup(finding.find([RedisServer])[RedisServer]) as group, ours(group.members):
        urls = [member.url for member in group.members]
        made = {OURS: cycle_of("redlock"), SINGLE: cycle_of("redis"), **peers(urls)}
        measured = interleaved({name: timed(cycle, cycles) for name, cycle in made.items()}, rounds)
    rows = [
        (
            name,
            f"{median(times) * 1e6:.0f}",
            spread(ratios(times, measured[OURS])),
            "token, owner, host, pid, thread" if name in (OURS, SINGLE) else "owner",
        )
        for name, times in measured.items()
    ]
    targets = [
        Target(
            f"of {kind.name}'s time per cycle to ours",
            median(ratios(measured[kind.name], measured[OURS])),
            least,
            at_least=True,
        )
        for kind, least in PEERS.items()
        if kind.name in measured
    ]
    return [
        Result(
            "redis.redlock",
            f"acquire and release on a majority of five servers, {rounds} rounds of {cycles}",
            ("", "µs a cycle", "this / distlocks", "what a lock carries"),
            rows,
            {"seconds": measured},
            targets,
            notes,
        )
    ]


@contextmanager
def ours(members: list[RedisServer]) -> Any:
    entry = {
        "BACKEND": "distlocks.backends.redlock.RedlockBackend",
        "TTL": TTL,
        "OPTIONS": {"servers": [member.url for member in members]},
    }
    with override_settings(DISTLOCKS={**settings.DISTLOCKS, "redlock": entry}):
        # Servers that have just been started have forgotten nobody's lease here.
        backend = locks["redlock"]
        assert isinstance(backend, RedlockBackend)
        backend.quarantine(end=True)
        # For so long, tokens from before may be ahead of the clocks, for all that the servers know.
        time.sleep(backend.settings.tokens_ahead + 0.1)
        try:
            yield
        finally:
            locks.close_all()


def cycle_of(alias: str) -> Cycle:
    def cycle() -> None:
        with db_lock("bench:ours", backend=alias):
            pass

    return cycle


def peers(urls: list[str]) -> dict[str, Cycle]:
    found: dict[str, Cycle] = {}
    if find_spec(RedlockNg.module):
        from redlock import Redlock

        many = Redlock(urls)

        def redlock_ng() -> None:
            with many.lock("bench:redlock-ng", ttl=TTL * 1000) as lock:
                assert lock.valid

        found[RedlockNg.name] = redlock_ng
    if find_spec(Pottery.module):
        import redis
        from pottery import Redlock as PotteryLock

        masters = {redis.Redis.from_url(url, **settings.CLIENT) for url in urls}

        def pottery() -> None:
            with PotteryLock(key="bench:pottery", masters=masters, auto_release_time=TTL):
                pass

        found[Pottery.name] = pottery
    return found


def timed(cycle: Cycle, cycles: int) -> Callable[[], float]:
    """Seconds of a cycle."""

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(cycles):
            cycle()
        return (time.perf_counter() - began) / cycles

    return measure
