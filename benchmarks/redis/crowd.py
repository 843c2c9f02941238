"""Five hundred wait for a lock that is not released: what does that ask of the server?"""

import time

from benchmarks.environment import Environment
from benchmarks.redis.entrants import FEW_PEERS, PEERS, Ours, present
from benchmarks.redis.requests import Requests, told
from benchmarks.redis.waiters import MODULE, Crowd
from benchmarks.rounds import Result, Target

PROCESSES = 4
WAITERS = 500


def run(env: Environment, quick: bool) -> list[Result]:
    seconds = 5.0
    names, notes = present(Ours, *(FEW_PEERS if quick else PEERS))
    rows, figures = [], {}
    for name in names:
        with env.processes() as processes:
            crowd = Crowd(processes.start(MODULE, PROCESSES), name, f"crowd:{name}", WAITERS)
            with Requests(env) as seen:
                began = time.monotonic()
                crowd.begin("once")
                time.sleep(max(began + seconds - time.monotonic(), 0.0))
                first = seen.counted()
                time.sleep(seconds)
                later = seen.counted()
            crowd.let()
            crowd.finish()
            crowd.clear()
        figures[name] = {"first": dict(first), "later": dict(later)}
        rows.append(
            (
                name,
                f"{first.total() / seconds:.0f}",
                told(first, seconds),
                f"{later.total() / seconds:.0f}",
                told(later, seconds),
            )
        )
    targets = []
    for part, when in (("first", "from the first try on"), ("later", "later on")):
        rate = sum(figures[Ours.name][part].values()) / seconds
        targets.append(Target(f"requests a second, {when}", rate, 300.0))
    return [
        Result(
            "redis.crowd",
            f"{WAITERS} threads of {PROCESSES} processes wait for one key that is held, "
            f"requests a second",
            ("", f"the first {seconds:g} s", "which", f"the next {seconds:g} s", "which"),
            rows,
            {"requests": figures, "seconds": seconds},
            targets,
            ["The first seconds contain how everybody begins to wait.", *notes],
        )
    ]
