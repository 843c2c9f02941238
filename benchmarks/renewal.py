"""Two thousand short leases, kept by one process."""

import threading
import time
from typing import Any

from django.db import connection

from benchmarks import statements
from benchmarks.environment import Environment
from benchmarks.rounds import Result, Target, median, ratios, spread
from distlocks import db_lock, locks
from distlocks.claims import Extension, to_us

LEASES = 2000
TTL = 3.0


def run(env: Environment, quick: bool) -> list[Result]:
    rounds, seconds = (2, 4.0) if quick else (7, 10.0)
    env.empty_table()
    found: dict[str, list[dict[str, Any]]] = {"renewer": [], "bare loop": []}
    for _ in range(rounds):
        # Fresh processes: the loop repeats what the renewer has just sent, at the same times.
        with env.processes() as processes:
            (keeper,) = processes.start("benchmarks.renewal")
            found["renewer"].append(keeper.call("keep", seconds))
        env.empty_table()
        with env.processes() as processes:
            (looper,) = processes.start("benchmarks.renewal")
            found["bare loop"].append(looper.call("loop", found["renewer"][-1]["batches"], seconds))
        env.empty_table()
    cpu = {name: [figures["cpu"] / seconds for figures in f] for name, f in found.items()}
    ours = found["renewer"]
    lost = sum(figures["lost"] for figures in ours)
    rows = [
        (
            name,
            f"{median([len(figures['batches']) / seconds for figures in f]):.1f}",
            f"{median([sum(n for _, n in figures['batches']) / seconds for figures in f]):.0f}",
            f"{median(cpu[name]):.2%}",
            str(max(figures["threads"] for figures in f)),
        )
        for name, f in found.items()
    ]
    return [
        Result(
            "renewal",
            f"{LEASES:,} leases of {TTL:g} s on PostgreSQL, {rounds} times {seconds:g} s",
            ("", "statements a second", "extensions a second", "CPU of one processor", "threads"),
            rows,
            {"rounds": found},
            [Target("leases lost", float(lost), 0.0)],
            [
                f"CPU of the renewer / of a bare loop that sends the same statements: "
                f"{spread(ratios(cpu['renewer'], cpu['bare loop']))}.",
                f"Least time left of any lease when it was extended: "
                f"{min(figures['least_left'] for figures in ours):.2f} s.",
                f"Threads of the renewer's process: {', '.join(ours[-1]['names'])}.",
            ],
        )
    ]


# In the processes


def keep(seconds: float) -> dict[str, Any]:
    backend = locks["default"]
    extend = backend.extend
    batches: list[tuple[float, int]] = []
    began = [float("inf")]
    leases: dict[str, Any] = {}
    least = [TTL]

    def noted(extensions: Any) -> Any:
        batches.append((time.monotonic() - began[0], len(extensions)))
        least[0] = min(least[0], *(leases[e.grant.owner_id].remaining for e in extensions))
        return extend(extensions)

    for number in range(LEASES):
        lease = db_lock(f"renewed:{number}", ttl=TTL).acquire()
        leases[lease.owner_id] = lease
    backend.extend = noted  # type: ignore[method-assign]
    # Until each has been renewed by the clock of the renewer and not of the acquires.
    time.sleep(TTL)
    batches.clear()
    began[0], cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    cpu = time.process_time() - cpu
    found = {
        "cpu": cpu,
        "batches": [batch for batch in batches if batch[0] < seconds],
        "lost": sum(lease.lost for lease in leases.values()),
        "least_left": least[0],
        "threads": threading.active_count(),
        "names": sorted(thread.name for thread in threading.enumerate()),
    }
    for lease in leases.values():
        lease.release()
    return found


def loop(batches: list[tuple[float, int]], seconds: float) -> dict[str, Any]:
    """Send what the renewer has sent, over a bare cursor, for leases that nobody renews."""
    backend: Any = locks["default"]
    grants = [
        backend.try_acquire(statements.request(f"renewed:{n}", ttl=60.0)) for n in range(LEASES)
    ]
    session = statements.Session(connection)
    sent: list[tuple[float, statements.Sent]] = []
    at = 0
    for when, size in batches:
        chosen = [grants[(at + n) % LEASES] for n in range(size)]
        at += size
        recorder = statements.Recorder()
        with connection.execute_wrapper(recorder):
            backend.dialect.extend(
                session, [Extension(grant=grant, ttl_us=to_us(60.0)) for grant in chosen]
            )
        sent.append((when, recorder.sent[-1]))
    began, cpu = time.monotonic(), time.process_time()
    for when, (sql, params) in sent:
        time.sleep(max(began + when - time.monotonic(), 0.0))
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            cursor.fetchall()
    time.sleep(max(began + seconds - time.monotonic(), 0.0))
    return {
        "cpu": time.process_time() - cpu,
        "batches": batches,
        "threads": threading.active_count(),
    }
