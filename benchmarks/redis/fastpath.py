"""What it costs an uncontended lock that a database stands behind Redis."""

import time
from collections.abc import Callable

from benchmarks.environment import Environment
from benchmarks.redis.requests import Requests
from benchmarks.rounds import Result, Target, interleaved, median, ratios, spread
from distlocks import db_lock, locks
from distlocks.backends.fastpath.row import AuthorityRow

PLAIN, FAST = "RedisBackend", "FastPathBackend"
ALIASES = {PLAIN: "redis", FAST: "fastpath"}
COUNTED = 50


def run(env: Environment, quick: bool) -> list[Result]:
    rounds, cycles = (11, 100) if quick else (101, 250)
    read, reads = AuthorityRow.read, 0

    def counted(row: AuthorityRow) -> object:
        nonlocal reads
        reads += 1
        return read(row)

    AuthorityRow.read = counted  # type: ignore[assignment,method-assign]
    began = time.perf_counter()
    measured = interleaved(
        {name: cycles_of(alias, cycles) for name, alias in ALIASES.items()}, rounds
    )
    seconds = time.perf_counter() - began
    asked = {name: requests(env, alias) for name, alias in ALIASES.items()}
    locks.close_all()
    cost = ratios(measured[FAST], measured[PLAIN])
    rows = [
        (
            name,
            f"{median(times) * 1e6:.0f}",
            spread(ratios(times, measured[PLAIN])),
            f"{asked[name]:.2f}",
        )
        for name, times in measured.items()
    ]
    return [
        Result(
            "redis.fastpath",
            f"acquire and release on Redis with a database behind it, {rounds} rounds of {cycles}",
            ("", "µs a cycle", "this / RedisBackend", "requests to Redis a cycle"),
            rows,
            {"seconds": measured, "requests": asked, "reads": reads, "within": seconds},
            [
                Target("of the time of RedisBackend", median(cost), 1.1),
                Target("requests a cycle", asked[FAST], 2.0),
            ],
            [f"The database was read {reads} times in {seconds:.0f} s."],
        )
    ]


def cycles_of(alias: str, cycles: int) -> Callable[[], float]:
    """Seconds of a cycle."""

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(cycles):
            with db_lock("bench", backend=alias):
                pass
        return (time.perf_counter() - began) / cycles

    return measure


def requests(env: Environment, alias: str) -> float:
    """To Redis, of a cycle."""
    with Requests(env) as seen:
        for _ in range(COUNTED):
            with db_lock("bench", backend=alias):
                pass
        return seen.counted().total() / COUNTED
