"""A hundred threads want the same lock again and again: does each get its share?"""

import time

from benchmarks.environment import Environment
from benchmarks.redis.entrants import FEW_PEERS, PEERS, Ours, Token, present
from benchmarks.redis.waiters import MODULE, Crowd
from benchmarks.rounds import Result, Target, median

PROCESSES = 4
WAITERS = 100
HOLD = 0.005


def run(env: Environment, quick: bool) -> list[Result]:
    rounds, seconds = (1, 4.0) if quick else (3, 15.0)
    names, notes = present(Ours, Token, *(FEW_PEERS if quick else PEERS))
    found: dict[str, list[list[int]]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            # Processes of its own: what polls on leaves nothing to the next.
            with env.processes() as processes:
                crowd = Crowd(processes.start(MODULE, PROCESSES), name, f"fair:{name}", WAITERS)
                until = time.monotonic() + seconds + 1
                crowd.begin("loop", HOLD, until)
                crowd.settle()
                released = crowd.let()
                found[name].append(crowd.finish())
                rates[name].append(sum(found[name][-1]) / (until - released))
                crowd.clear()
    rows = [
        (
            name,
            f"{median([jain(counts) for counts in rounds_of]):.3f}",
            str(max(counts.count(0) for counts in rounds_of)),
            f"{median([min(counts) for counts in rounds_of]):g}",
            f"{median([max(counts) for counts in rounds_of]):g}",
            f"{median(rates[name]):.0f}",
        )
        for name, rounds_of in found.items()
    ]
    ours = found[Ours.name]
    targets = [
        Target("Jain's index", median([jain(counts) for counts in ours]), 0.97, at_least=True),
        Target("starved", float(max(counts.count(0) for counts in ours)), 0.0),
    ]
    return [
        Result(
            "redis.fairness",
            f"{WAITERS} threads of {PROCESSES} processes loop on one key and hold it for "
            f"{HOLD * 1000:g} ms, {rounds} rounds of {seconds:g} s",
            ("", "Jain's index", "starved", "fewest", "most", "acquires a second"),
            rows,
            {"acquires": found, "acquires_a_second": rates},
            targets,
            [
                f"At most {1 / HOLD:.0f} a second. Jain's index is 1 where all get the same, "
                f"and {1 / WAITERS:g} where one gets everything.",
                *notes,
            ],
        )
    ]


def jain(counts: list[int]) -> float:
    """(Σx)² / (n Σx²)."""
    return sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts) or 1)
