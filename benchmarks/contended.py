"""Eight processes want the same lock, and hold it for a millisecond."""

import time
from itertools import pairwise
from typing import Any

from django.db import connections

from benchmarks import statements
from benchmarks.environment import Environment, Process
from benchmarks.rounds import Result, interleaved, median, percentile, ratios, spread
from distlocks import db_lock, locks
from distlocks.clock import lease_now

PROCESSES = 8
HOLD = 0.001


def run(env: Environment, quick: bool) -> list[Result]:
    env.empty_table()
    rounds, seconds, repeats = (3, 1.0, 5) if quick else (11, 3.0, 25)
    return [hammered(env, rounds, seconds), woken(env, repeats)]


def hammered(env: Environment, rounds: int, seconds: float) -> Result:
    found: dict[str, list[dict[str, float]]] = {}
    with env.processes() as processes:
        workers = processes.start("benchmarks.contended", PROCESSES)
        contenders = {"db_lock": "ours"}
        if env.has["pglock"]:
            contenders["django-pglock, advisory()"] = "pglock"

        def contender(name: str, function: str) -> float:
            figures = contest(workers, function, seconds)
            found.setdefault(name, []).append(figures)
            return figures["grants"]

        interleaved(
            {n: lambda n=n, f=f: contender(n, f) for n, f in contenders.items()},  # type: ignore[misc]
            rounds,
        )
    # The first was for warming up.
    found = {name: figures[1:] for name, figures in found.items()}
    measures = {
        "grants a second": ("grants", 1.0),
        "statements a grant": ("statements", 1.0),
        "hand-over, median, ms": ("median", 1e3),
        "hand-over, p99, ms": ("p99", 1e3),
        "fewest grants of a process / most": ("evenness", 1.0),
    }
    rows = []
    for title, (name, scale) in measures.items():
        values = {c: [figures[name] for figures in f] for c, f in found.items()}
        row = [title, *(f"{median(v) * scale:.2f}" for v in values.values())]
        if len(values) == 2:
            ours, theirs = values.values()
            row.append(spread(ratios(ours, theirs)) if all(theirs) else "")
        rows.append(row)
    return Result(
        "contended",
        f"{PROCESSES} processes loop on one key of PostgreSQL and hold it for "
        f"{HOLD * 1000:g} ms, {rounds} rounds of {seconds:g} s",
        ("", *found, "ratio (middle half)"),
        rows,
        {"rounds": found},
        [],
        [
            "A hand-over lasts from the call of the release to the return of the next acquire.",
            "Waiters for an advisory lock queue in the server, each with a session of its own kept "
            "busy: first come, first served. Ours sleep and race.",
        ],
    )


def contest(workers: list[Process], function: str, seconds: float) -> dict[str, float]:
    for worker in workers:
        worker.begin(function, seconds)
    answers = [worker.answer() for worker in workers]
    grants = sorted(tuple(grant) for answer in answers for grant in answer["grants"])
    # In the middle part, in which all take part.
    handed = [
        got - before_released
        for (_, before_released), (got, _) in pairwise(grants)
        if got >= before_released
    ]
    counts = [len(answer["grants"]) for answer in answers]
    return {
        "grants": len(grants) / seconds,
        "statements": sum(answer["statements"] for answer in answers) / len(grants),
        "median": median(handed),
        "p99": percentile(handed, 99),
        "evenness": min(counts) / max(counts),
    }


def woken(env: Environment, repeats: int) -> Result:
    """One who waits, for the first time in its process or later."""
    late: dict[str, list[float]] = {"the first time in its process": [], "later": []}
    with env.processes() as processes:
        holder, waiter = processes.start("benchmarks.contended", 2)
        for _ in range(repeats):
            waiter.call("forget")
            for name in late:
                holder.call("hold")
                waiter.begin("wait")
                # Asleep by then, however it sleeps.
                time.sleep(0.6)
                released = holder.call("let")
                late[name].append(waiter.answer() - released)
    rows = [
        (
            f"who waits {name}",
            f"{median(seconds) * 1e3:.2f}",
            f"{percentile(seconds, 90) * 1e3:.2f}",
            f"{max(seconds) * 1e3:.2f}",
        )
        for name, seconds in late.items()
    ]
    return Result(
        "woken",
        f"from a release to the only waiter's grant, {repeats} times, on PostgreSQL",
        ("", "median, ms", "p90, ms", "most, ms"),
        rows,
        {"seconds": late},
    )


# In the processes

_counter = statements.Recorder()
_counting: list[Any] = []
_held: list[Any] = []


def _count() -> None:
    if not _counting:
        context = statements.recorded_everywhere(_counter)
        context.__enter__()
        _counting.append(context)
        # What is open already would not be seen.
        locks["default"].close()
        connections["default"].close()
    _counter.sent.clear()


def ours(seconds: float) -> dict[str, Any]:
    _count()
    lock = db_lock("contended", timeout=None)
    grants = []
    until = lease_now() + seconds
    while lease_now() < until:
        lease = lock.acquire()
        got = lease_now()
        time.sleep(HOLD)
        released = lease_now()
        lease.release()
        grants.append((got, released))
    return {"grants": grants, "statements": len(_counter.sent)}


def pglock(seconds: float) -> dict[str, Any]:
    import pglock as peer

    _count()
    grants = []
    until = lease_now() + seconds
    while lease_now() < until:
        with peer.advisory("contended"):
            got = lease_now()
            time.sleep(HOLD)
            released = lease_now()
        grants.append((got, released))
    return {"grants": grants, "statements": len(_counter.sent)}


def hold() -> None:
    _held.append(db_lock("woken").acquire())


def let() -> float:
    at = lease_now()
    assert _held.pop().release()
    return at


def wait() -> float:
    lease = db_lock("woken", timeout=None).acquire()
    at = lease_now()
    lease.release()
    return at


def forget() -> None:
    """As if the process had never waited, or not for a while."""
    locks["default"].close()
