"""What it costs an uncontended lock that its history is kept."""

import time
from collections.abc import Callable

from benchmarks.environment import Environment
from benchmarks.rounds import Result, Target, interleaved, median, ratios, spread
from distlocks import db_lock
from distlocks.history.journal import journal

# What is measured, by the alias that keeps a history; the one that keeps none is named beside it.
STORES = {"PostgreSQL": "default", "Redis": "redis"}
WITHOUT = {"default": "default_unrecorded", "redis": "redis_unrecorded"}
KEYS = 100


def run(env: Environment, quick: bool) -> list[Result]:
    rounds, cycles = (11, 200) if quick else (101, 1000)
    return [compare(store, alias, rounds, cycles) for store, alias in STORES.items()]


def compare(store: str, alias: str, rounds: int, cycles: int) -> Result:
    with_it, without = "with its history", "without"
    measured = interleaved(
        {with_it: cycles_of(alias, cycles), without: cycles_of(WITHOUT[alias], cycles)}, rounds
    )
    cost = ratios(measured[with_it], measured[without])
    return Result(
        f"recording-{alias}",
        f"acquire and release on {store}, {rounds} rounds of {cycles}",
        ("", "µs a cycle", "this / without"),
        [
            (name, f"{median(times) * 1e6:.1f}", spread(ratios(times, measured[without])))
            for name, times in measured.items()
        ],
        {"seconds": measured},
        [Target(f"of the time without a history, on {store}", median(cost), 1.05)],
        ["A round ends when its entries have been counted, which is the journal's thread's work."],
    )


def cycles_of(alias: str, cycles: int) -> Callable[[], float]:
    """Seconds of a cycle."""
    keys = [f"order:{number}" for number in range(KEYS)]

    def measure() -> float:
        began = time.perf_counter()
        for number in range(cycles):
            with db_lock(keys[number % KEYS], backend=alias):
                pass
        journal.look()
        return (time.perf_counter() - began) / cycles

    return measure
