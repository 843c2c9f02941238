"""What the server keeps for each lock that is held."""

import time
from typing import Any

from benchmarks.environment import Environment
from benchmarks.redis.entrants import KINDS, Ours, Token, entrant, present
from benchmarks.rounds import Result, Target


def run(env: Environment, quick: bool) -> list[Result]:
    kinds = [kind for kind in KINDS if kind is not Token]
    names, notes = present(*kinds)
    carried = {kind.name: kind.carries for kind in kinds}
    # As full as those of 20,000 are the tables of 5,000.
    locks = 5_000 if quick else 20_000
    figures = {name: taken(env, name, locks) for name in names}
    rows = [
        (name, f"{held:.0f}", f"{after:.0f}", carried[name])
        for name, (held, after) in figures.items()
    ]
    return [
        Result(
            "redis.memory",
            f'{locks:,} locks with keys like "order:123456" held, of used_memory without clients',
            ("", "bytes a lock", "after its release", "beside key and expiry"),
            rows,
            {"bytes": figures},
            [Target("bytes a lock", figures[Ours.name][0], 240.0)],
            [
                "distlocks remembers what was released: later acquires of new keys clear it away, "
                "two for one, and so does a sweep.",
                *notes,
            ],
        )
    ]


def taken(env: Environment, name: str, locks: int) -> tuple[float, float]:
    """Bytes for each lock while all are held, and after they have been released."""
    who: Any = entrant(name)
    # Connections, scripts and what else is there once.
    who.release(who.attempt("order:warm"))
    before = settled(env, locks)
    held = [who.attempt(f"order:{number:06d}") for number in range(100_000, 100_000 + locks)]
    assert None not in held
    during = settled(env, locks)
    for one in held:
        who.release(one)
    # What peers leave behind for a second, too.
    time.sleep(1.5)
    after = settled(env, locks)
    env.redis.flushdb()
    return (during - before) / locks, (after - before) / locks


def settled(env: Environment, locks: int) -> int:
    """Once tables that were growing or shrinking have their size."""
    used = without_clients(env)
    while True:
        time.sleep(0.5)
        last, used = used, without_clients(env)
        if abs(used - last) < locks:
            return used


def without_clients(env: Environment) -> int:
    """Bytes that the server uses, but not for connections: those that rest get smaller."""
    about = env.redis.info("memory")
    return int(about["used_memory"]) - int(about["mem_clients_normal"])
