"""Acquire and release, with nobody else there: what the library adds to its two statements."""

import time
from collections.abc import Callable
from typing import Any

from django.db import connections

from benchmarks import statements
from benchmarks.environment import Environment
from benchmarks.rounds import Result, Target, interleaved, median, ratios, spread
from distlocks import db_lock

Cycle = Callable[[], object]


def run(env: Environment, quick: bool) -> list[Result]:
    env.empty_table()
    rounds, cycles = (5, 100) if quick else (41, 400)
    return [postgres(env, rounds, cycles), sqlite(rounds, cycles)]


def postgres(env: Environment, rounds: int, cycles: int) -> Result:
    contenders: dict[str, Cycle] = {
        "db_lock": lock("default"),
        "bare cursor, same texts": bare("default", "plain"),
        "bare cursor, prepared": bare("default", "prepared"),
    }
    notes = [
        "A cycle of pglock.advisory() holds a session lock: it needs no row, and knows neither an "
        "expiry nor a token; it keeps its connection for itself meanwhile.",
    ]
    if env.has["pglock"]:
        contenders["django-pglock, advisory()"] = pglock()
    else:
        notes.append("django-pglock is not installed.")
    if env.has["db_mutex"]:
        try:
            mutex = db_mutex()
            mutex()
            contenders["django-db-mutex"] = mutex
        except Exception as error:
            notes.append(f"django-db-mutex does not work here: {type(error).__name__}: {error}")
    else:
        notes.append("django-db-mutex is not installed.")
    return compare(
        "uncontended-postgres",
        "acquire and release on PostgreSQL",
        contenders,
        rounds,
        cycles,
        [("bare cursor, same texts", 1.3)],
        notes,
    )


def sqlite(rounds: int, cycles: int) -> Result:
    contenders = {"db_lock": lock("sqlite"), "bare cursor, same texts": bare("sqlite", "plain")}
    return compare(
        "uncontended-sqlite",
        "acquire and release on SQLite (WAL, synchronous NORMAL)",
        contenders,
        rounds,
        cycles,
        [("bare cursor, same texts", 3.0)],
        [],
    )


def compare(
    name: str,
    title: str,
    contenders: dict[str, Cycle],
    rounds: int,
    cycles: int,
    targets: list[tuple[str, float]],
    notes: list[str],
) -> Result:
    # Of the process alone, beside the time: what the server takes is the same for all.
    cpu: dict[str, list[float]] = {contender: [] for contender in contenders}

    def timed(contender: str, cycle: Cycle) -> Callable[[], float]:
        def measure() -> float:
            began, began_cpu = time.perf_counter(), time.process_time()
            for _ in range(cycles):
                cycle()
            cpu[contender].append((time.process_time() - began_cpu) / cycles)
            return (time.perf_counter() - began) / cycles

        return measure

    measured = interleaved({n: timed(n, cycle) for n, cycle in contenders.items()}, rounds)
    ours = measured["db_lock"]
    rows = [
        (
            contender,
            f"{median(times) * 1e6:.0f}",
            f"{median(cpu[contender]) * 1e6:.0f}",
            spread(ratios(ours, times)),
        )
        for contender, times in measured.items()
    ]
    return Result(
        name,
        f"{title}, {rounds} rounds of {cycles} cycles",
        ("", "µs a cycle", "of these, client's CPU", "db_lock / this (middle half)"),
        rows,
        {"seconds": measured, "client_cpu_seconds": cpu, "cycles": cycles},
        [
            Target(f"db_lock / {base}", median(ratios(ours, measured[base])), limit)
            for base, limit in targets
        ],
        notes,
    )


def lock(alias: str) -> Cycle:
    def cycle() -> None:
        with db_lock("bench:ours", backend=alias):
            pass

    return cycle


def bare(alias: str, how: str) -> Cycle:
    """The library's own two statements, over Django's own connection."""
    key = f"bench:{how}"
    connection = connections[alias]
    if how == "plain":
        (acquire, acquire_params), (release, release_params) = statements.plain(alias, key)
    else:
        prepare, cycle = statements.as_sent(alias, key)
        with connection.cursor() as cursor:
            for sql, params in prepare:
                cursor.execute(sql, params)
        (acquire, acquire_params), (release, release_params) = cycle
    release_params = dict(release_params) | {"owner": acquire_params["owner"]}
    # Where in the answer the token stands differs between the dialects.
    with connection.cursor() as cursor:
        cursor.execute(acquire, acquire_params)
        row = cursor.fetchall()[0]
        at = next(n for n, value in enumerate(row) if _is_token(value))
        cursor.execute(release, release_params | {"token": row[at]})
        assert cursor.fetchall(), "the bare release has released nothing"

    def cycle_bare() -> None:
        with connection.cursor() as cursor:
            cursor.execute(acquire, acquire_params)
            token = cursor.fetchall()[0][at]
        release_params["token"] = token
        with connection.cursor() as cursor:
            cursor.execute(release, release_params)
            cursor.fetchall()

    return cycle_bare


def _is_token(value: Any) -> bool:
    """Microseconds of these days."""
    return isinstance(value, int) and value > 10**15


def pglock() -> Cycle:
    import pglock as peer

    def cycle() -> None:
        with peer.advisory("bench:pglock"):
            pass

    return cycle


def db_mutex() -> Cycle:
    from db_mutex.db_mutex import db_mutex as peer

    def cycle() -> None:
        with peer("bench:mutex"):
            pass

    return cycle
