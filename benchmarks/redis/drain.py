"""Thirty-two wait for one lock, each once: from its release until the last has had it."""

from collections import Counter

from benchmarks.environment import Environment, Process
from benchmarks.redis.entrants import FEW_PEERS, PEERS, Entrant, Ours, Token, present
from benchmarks.redis.requests import Requests, told
from benchmarks.redis.waiters import MODULE, Crowd
from benchmarks.rounds import Result, Target, interleaved, median, ratios, spread

WAITERS = 32
FLOOR = Token.name


def run(env: Environment, quick: bool) -> list[Result]:
    rounds, peers = (3, FEW_PEERS) if quick else (21, PEERS)
    return [drained(env, count, rounds, peers) for count in (1, 4)]


def drained(env: Environment, count: int, rounds: int, peers: tuple[type[Entrant], ...]) -> Result:
    names, notes = present(Ours, Token, *peers)
    with env.processes() as processes:
        workers = processes.start(MODULE, count)
        measured = interleaved(
            {name: lambda name=name: drain(workers, name, WAITERS) for name in names},  # type: ignore[misc]
            rounds,
        )
        asked = {name: requests(env, workers, name, WAITERS) for name in names}
    rows = [
        (
            name,
            f"{median(times) * 1e3:.1f}",
            spread(ratios(times, measured[FLOOR])),
            f"{asked[name].total() / WAITERS:.3g}",
            told(asked[name], WAITERS),
        )
        for name, times in measured.items()
    ]
    ratio = median(ratios(measured[Ours.name], measured[FLOOR]))
    where = "one process" if count == 1 else f"{count} processes"
    return Result(
        f"redis.drain-{count}",
        f"{WAITERS} threads of {where} wait once each for one key, {rounds} rounds",
        ("", "drained after, ms", "this / floor", "requests a handoff", "which"),
        rows,
        {"seconds": measured, "requests": {name: dict(counts) for name, counts in asked.items()}},
        [Target(f"distlocks / {FLOOR}", ratio, 1.6)],
        [
            f"The floor is {FLOOR}: the next one is told by the server, and there is no lease.",
            "Of those that poll, requests while the lock goes round; before, they poll as well.",
            *notes,
        ],
    )


def drain(workers: list[Process], name: str, threads: int) -> float:
    crowd = Crowd(workers, name, f"drain:{name}", threads)
    crowd.begin("once")
    crowd.settle()
    released = crowd.let()
    drained = max(crowd.finish())
    crowd.clear()
    return float(drained - released)


def requests(env: Environment, workers: list[Process], name: str, threads: int) -> Counter[str]:
    """What is asked of the server from the release until the last one has released."""
    crowd = Crowd(workers, name, f"drain:{name}", threads)
    crowd.begin("once")
    crowd.settle()
    with Requests(env) as seen:
        crowd.let()
        crowd.finish()
        counts = seen.counted()
    crowd.clear()
    return counts
