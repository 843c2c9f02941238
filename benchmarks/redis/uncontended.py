"""Acquire and release, with nobody else there: what each adds to its requests."""

import time
from collections.abc import Callable

from benchmarks.environment import Environment
from benchmarks.redis.entrants import (
    PEERS,
    ByHand,
    Cycle,
    Ours,
    PythonRedisLock,
    RedisPyLock,
    Socket,
    entrant,
    present,
)
from benchmarks.redis.requests import Requests, told
from benchmarks.rounds import Result, Target, interleaved, median, ratios, spread

FLOOR = Socket.name
COUNTED = 50


def run(env: Environment, quick: bool) -> list[Result]:
    rounds, cycles = (11, 100) if quick else (101, 250)
    names, notes = present(Ours, Socket, ByHand, *PEERS)
    made = {name: entrant(name).cycle(f"bench:{name}") for name in names}
    # Of the process alone, beside the time: what the server takes differs little.
    cpu: dict[str, list[float]] = {name: [] for name in names}

    def timed(name: str, cycle: Cycle) -> Callable[[], float]:
        def measure() -> float:
            began, began_cpu = time.perf_counter(), time.process_time()
            for _ in range(cycles):
                cycle()
            cpu[name].append((time.process_time() - began_cpu) / cycles)
            return (time.perf_counter() - began) / cycles

        return measure

    measured = interleaved({name: timed(name, cycle) for name, cycle in made.items()}, rounds)
    asked = {name: requests(env, cycle) for name, cycle in made.items()}
    rows = [
        (
            name,
            f"{median(times) * 1e6:.0f}",
            f"{median(cpu[name]) * 1e6:.0f}",
            f"{median(over(times, measured[FLOOR])):.0f}",
            spread(ratios(times, measured[FLOOR])),
            spread(ratios(measured[Ours.name], times)),
            asked[name][1],
        )
        for name, times in measured.items()
    ]
    return [
        Result(
            "redis.uncontended",
            f"acquire and release on Redis, {rounds} rounds of {cycles} cycles",
            (
                "",
                "µs a cycle",
                "client's CPU, µs",
                "over the floor, µs",
                "this / floor",
                "distlocks / this",
                "requests a cycle",
            ),
            rows,
            {
                "seconds": measured,
                "client_cpu_seconds": cpu,
                "cycles": cycles,
                "requests": {name: count for name, (count, _) in asked.items()},
            },
            targets(measured, asked),
            [
                f"The floor is the {FLOOR}: the same two requests as by hand, packed beforehand.",
                *notes,
            ],
        )
    ]


def targets(measured: dict[str, list[float]], asked: dict[str, tuple[float, str]]) -> list[Target]:
    ours = measured[Ours.name]
    found = [
        Target("over the floor", median(over(ours, measured[FLOOR])), 70.0, " µs"),
        Target("requests a cycle", asked[Ours.name][0], 2.0),
    ]
    for peer in (RedisPyLock.name, PythonRedisLock.name):
        if peer in measured:
            faster = sum(ratio < 1 for ratio in ratios(ours, measured[peer])) / len(ours)
            found.append(Target(f"rounds faster than {peer}", faster * 100, 90.0, " %", True))
    return found


def over(times: list[float], floor: list[float]) -> list[float]:
    """Microseconds more than the floor of the same round."""
    return [(one - other) * 1e6 for one, other in zip(times, floor, strict=True)]


def requests(env: Environment, cycle: Cycle) -> tuple[float, str]:
    """How many requests a cycle takes, and which."""
    with Requests(env) as seen:
        for _ in range(COUNTED):
            cycle()
        counts = seen.counted()
    return counts.total() / COUNTED, told(counts, COUNTED)
