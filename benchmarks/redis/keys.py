"""Sixteen threads over a thousand keys."""

import random
import threading
import time

from benchmarks.environment import Environment
from benchmarks.redis.entrants import PEERS, ByHand, Ours, entrant, present
from benchmarks.rounds import Result, interleaved, median, ratios, spread

KEYS = 1000
THREADS = 16
BASE = ByHand.name


def run(env: Environment, quick: bool) -> list[Result]:
    rounds, seconds = (3, 0.5) if quick else (15, 1.0)
    names, notes = present(Ours, ByHand, *PEERS)
    with env.processes() as processes:
        (worker,) = processes.start("benchmarks.redis.keys")
        measured = interleaved(
            {name: lambda name=name: worker.call("hammer", name, seconds) for name in names},  # type: ignore[misc]
            rounds,
        )
    rows = [
        (name, f"{median(rates):,.0f}", spread(ratios(rates, measured[BASE])))
        for name, rates in measured.items()
    ]
    return [
        Result(
            "redis.keys",
            f"{THREADS} threads of one process over {KEYS:,} keys at random, "
            f"{rounds} rounds of {seconds:g} s",
            ("", "cycles a second", f"this / {BASE}"),
            rows,
            {"cycles_a_second": measured},
            [],
            ["More is better. A key that is held is not waited for: another is tried.", *notes],
        )
    ]


# In the process


def hammer(name: str, seconds: float) -> float:
    """Cycles a second of all threads."""
    counts = [0] * THREADS
    until = time.monotonic() + seconds
    who = entrant(name)

    def run(number: int) -> None:
        choose = random.Random(number)
        while time.monotonic() < until:
            held = who.attempt(f"key:{choose.randrange(KEYS)}")
            if held is not None:
                who.release(held)
                counts[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds
