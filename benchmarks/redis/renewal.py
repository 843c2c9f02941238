"""Two thousand short leases, kept by one process."""

import threading
import time
from typing import Any

from benchmarks.environment import Environment
from benchmarks.redis.entrants import Ours, PythonRedisLock, RedisPyLock, entrant, present
from benchmarks.redis.requests import Requests
from benchmarks.rounds import Result, Target, median, ratios, spread
from distlocks import db_lock, locks

LEASES = 2000
TTL = 3
MODULE = "benchmarks.redis.renewal"
LOOP = "bare loop"


def run(env: Environment, quick: bool) -> list[Result]:
    rounds, seconds = (1, 4.0) if quick else (5, 10.0)
    names, notes = present(Ours, PythonRedisLock, RedisPyLock)
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for name in names:
            with env.processes() as processes:
                figures, sent = kept(env, processes, name, seconds)
                found.setdefault(name, []).append(figures)
                if name == Ours.name:
                    (looper,) = processes.start(MODULE)
                    found.setdefault(LOOP, []).append(looper.call("loop", sent, seconds))
                    found[LOOP][-1]["requests"] = len(sent)
            env.redis.flushdb()
    cpu = {name: [figures["cpu"] / seconds for figures in f] for name, f in found.items()}
    rows = [
        (
            name,
            f"{median([figures['requests'] / seconds for figures in f]):.1f}",
            f"{median(cpu[name]):.2%}",
            spread(ratios(cpu[name], cpu[LOOP])),
            str(max(figures["threads"] for figures in f)),
            str(sum(figures["lost"] for figures in f)),
        )
        for name, f in found.items()
    ]
    return [
        Result(
            "redis.renewal",
            f"{LEASES:,} leases of {TTL:g} s on Redis, {rounds} times {seconds:g} s",
            (
                "",
                "requests a second",
                "CPU of one processor",
                f"this / {LOOP}",
                "threads for it",
                "leases lost",
            ),
            rows,
            {"rounds": found},
            targets(found, cpu),
            [
                f"distlocks and python-redis-lock (auto_renewal) by themselves, each by its own "
                f"schedule; {RedisPyLock.name} by one thread that calls reacquire() each second.",
                f"The {LOOP} sends through redis-py what distlocks has just sent, at the same "
                f"times, for the same leases.",
                f"Threads of distlocks: {', '.join(found[Ours.name][-1]['names'])}.",
                *notes,
            ],
        )
    ]


def targets(found: dict[str, list[dict[str, Any]]], cpu: dict[str, list[float]]) -> list[Target]:
    ours = found[Ours.name]
    return [
        Target("leases lost", float(sum(figures["lost"] for figures in ours)), 0.0),
        Target("threads for it", float(max(figures["threads"] for figures in ours)), 1.0),
        Target(f"CPU / {LOOP}", median(ratios(cpu[Ours.name], cpu[LOOP])), 5.0),
    ]


def kept(
    env: Environment, processes: Any, name: str, seconds: float
) -> tuple[dict[str, Any], list[tuple[float, list[str]]]]:
    """What a process that holds the leases has used, and what it has sent, and when."""
    (keeper,) = processes.start(MODULE)
    keeper.call("take", name)
    # Until each has been renewed by the clock of what renews and not of the acquires.
    time.sleep(TTL)
    with Requests(env) as seen:
        keeper.begin("keep", seconds)
        began = time.time()
        figures = keeper.answer()
        requests = seen.take()
    sent = [
        (when - began, [word.decode("latin-1") for word in words])
        for when, words in requests
        if when < began + seconds
    ]
    figures["requests"] = len(sent)
    figures["lost"] = keeper.call("lost", name)
    return figures, sent


# In the processes

_held: list[Any] = []
_before: set[threading.Thread] = set()


def take(name: str) -> None:
    _before.update(threading.enumerate())
    make = {
        Ours.name: lambda key: db_lock(key, backend="redis", ttl=TTL).acquire(),
        PythonRedisLock.name: _renewed_by_itself,
        RedisPyLock.name: _renewed_by_hand,
    }[name]
    if name == RedisPyLock.name:
        threading.Thread(target=_reacquire, name="by hand", daemon=True).start()
    _held.extend(make(f"renewed:{number}") for number in range(LEASES))


def _renewed_by_itself(key: str) -> Any:
    import redis_lock

    lock = redis_lock.Lock(entrant(PythonRedisLock.name).client, key, expire=TTL, auto_renewal=True)
    assert lock.acquire(blocking=False)
    return lock


def _renewed_by_hand(key: str) -> Any:
    lock = entrant(RedisPyLock.name).client.lock(key, timeout=TTL, thread_local=False)
    assert lock.acquire(blocking=False)
    return lock


def _reacquire() -> None:
    """Renew all locks each second."""
    at = time.monotonic()
    while True:
        for lock in list(_held):
            lock.reacquire()
        at += 1
        time.sleep(max(at - time.monotonic(), 0.0))


def keep(seconds: float) -> dict[str, Any]:
    cpu = time.process_time()
    time.sleep(seconds)
    cpu = time.process_time() - cpu
    added = [thread for thread in threading.enumerate() if thread not in _before]
    names = sorted({thread.name for thread in added}) if len(added) < 10 else []
    return {"cpu": cpu, "threads": len(added), "names": names}


def lost(name: str) -> int:
    """How many of the leases are not held any more."""
    if name == Ours.name:
        known = {holder.owner_id for holder in locks["redis"].holders("renewed:")}
        return sum(lease.lost or lease.owner_id not in known for lease in _held)
    if name == PythonRedisLock.name:
        return sum(lock.get_owner_id() != lock.id for lock in _held)
    return sum(not lock.owned() for lock in _held)


def loop(sent: list[tuple[float, list[str]]], seconds: float) -> dict[str, Any]:
    """Send what was sent, at the same times."""
    client = entrant("redis-py by hand").client
    requests = [(at, [word.encode("latin-1") for word in words]) for at, words in sent]
    began, cpu = time.monotonic(), time.process_time()
    for at, words in requests:
        time.sleep(max(began + at - time.monotonic(), 0.0))
        client.execute_command(*words)
    time.sleep(max(began + seconds - time.monotonic(), 0.0))
    return {"cpu": time.process_time() - cpu, "threads": 0, "lost": 0}
