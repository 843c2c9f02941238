"""What a handoff takes while two wait, and while a thousand do."""

import time
from collections import Counter

from benchmarks.environment import Environment, Process
from benchmarks.redis.entrants import Ours, PythonRedisLock, RedisPyLock, Token, present
from benchmarks.redis.requests import Requests, told
from benchmarks.redis.waiters import MODULE, Crowd
from benchmarks.rounds import Result, Target

SIZES = (2, 50, 1000)
PROCESSES = 4


def run(env: Environment, quick: bool) -> list[Result]:
    seconds = 2.0 if quick else 10.0
    # A thousand who poll keep the machine busy for a while.
    names, notes = present(Ours, Token, PythonRedisLock, *(() if quick else (RedisPyLock,)))
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    rows = []
    for name in names:
        texts = []
        for size in SIZES:
            with env.processes() as processes:
                workers = processes.start(MODULE, min(PROCESSES, size))
                counts, times = handoffs(env, workers, name, size, seconds)
            found[name][size] = counts.total() / times
            texts.append(f"{found[name][size]:.2f} ({told(counts, times)})")
        rows.append((name, *texts))
    few, *_, many = found[Ours.name].values()
    return [
        Result(
            "redis.handoffs",
            f"requests for each handoff of one key, among threads of {PROCESSES} processes that "
            f"come back at once",
            ("", *(f"{size:,} wait" for size in SIZES)),
            rows,
            {"requests_a_handoff": found},
            [Target(f"with {SIZES[-1]:,} / with {SIZES[0]}", many / few, 1.1)],
            [
                "Counted for some seconds: the release, what the next one does to have it, and "
                "how the last one begins to wait again.",
                *notes,
            ],
        )
    ]


def handoffs(
    env: Environment, workers: list[Process], name: str, waiting: int, seconds: float
) -> tuple[Counter[str], int]:
    """What was asked of the server, and how many times the lock went on meanwhile."""
    crowd = Crowd(workers, name, f"handoffs:{name}", waiting + 1)
    until = time.monotonic() + 1 + 0.005 * waiting + seconds
    crowd.begin("loop", 0, until)
    crowd.settle()
    with Requests(env) as seen:
        crowd.let()
        time.sleep(max(until - time.monotonic(), 0.0))
        counts = seen.counted()
    times = sum(crowd.finish())
    crowd.clear()
    return counts, times
