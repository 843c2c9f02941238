"""A sweep of a million dead rows, beside a thousand live leases and somebody who acquires."""

import threading
import time
from typing import Any

from benchmarks.environment import Environment
from benchmarks.rounds import Result, Target, median, percentile, ratios, spread
from distlocks import db_lock, locks

LIVE = 1000
LIVE_TTL = 5.0
# One dead row in so many was left behind by a holder, and is reported.
LEFT_BEHIND = 100

DEAD = """
INSERT INTO distlocks_lock (key, owner_id, fencing_token, acquired_at, expires_at, waiting_until,
                            host, pid, thread, label, metadata)
SELECT 'swept:' || lpad(n::text, 8, '0'),
       CASE WHEN n %% %s = 0 THEN 'owner-' || n ELSE '' END,
       ago, ago, CASE WHEN n %% %s = 0 THEN ago + 30000000 ELSE 0 END, 0,
       'host', 1, 'MainThread', '', '{}'
FROM generate_series(1, %s) AS n,
     (SELECT (extract(epoch from now() - interval '2 days') * 1000000)::bigint AS ago) AS t
"""


def run(env: Environment, quick: bool) -> list[Result]:
    dead, window = (50_000, 0.3) if quick else (1_000_000, 1.0)
    env.empty_table()
    env.run(DEAD, LEFT_BEHIND, LEFT_BEHIND, dead)
    env.run("VACUUM ANALYZE distlocks_lock")
    bytes_before = sum(env.sizes())
    with env.processes() as processes:
        keeper, prober, sweeper = processes.start("benchmarks.sweep", 3)
        keeper.call("keep", LIVE, dead)
        prober.call("probe", window)
        without: list[dict[str, float]] = []
        beside: list[dict[str, float]] = []
        took = 0.0
        finished = False
        while not finished:
            without.append(prober.call("probe", window))
            prober.begin("probe", window)
            began = time.monotonic()
            finished = sweeper.call("sweep", window)
            took += time.monotonic() - began
            probed = prober.answer()
            # The last window has a sweep for only a part of its time.
            if not finished or not beside:
                beside.append(probed)
        without = without[: len(beside)]
        examined, expired, deleted = sweeper.call("swept")
        kept, extensions = keeper.call("kept")
    left = env.ask(
        "SELECT count(*) FROM distlocks_lock WHERE key LIKE 'swept:%' AND key NOT LIKE '%-live'"
    )
    slower = {
        name: ratios([w[name] for w in beside], [w[name] for w in without])
        for name in ("median", "p99")
    }
    rows = [
        (
            name,
            f"{median([w[name] for w in without]) * 1e3:.2f}",
            f"{median([w[name] for w in beside]) * 1e3:.2f}",
            spread(slower[name]),
        )
        for name in ("median", "p99")
    ]
    return [
        Result(
            "sweep",
            f"an uncontended acquire beside a sweep of {dead:,} dead rows on PostgreSQL, "
            f"{len(beside)} pairs of windows of {window:g} s",
            ("acquire", "without, ms", "beside the sweep, ms", "ratio (middle half)"),
            rows,
            {
                "without": without,
                "beside": beside,
                "seconds": took,
                "examined": examined,
                "expired": expired,
                "deleted": deleted,
                "live_kept": kept,
                "live_extensions": extensions,
                "dead_left": left,
                "bytes_before": bytes_before,
            },
            [
                Target("p99 of acquire beside the sweep / without", median(slower["p99"]), 3.0),
                Target("dead rows left", float(left), 0.0),
                Target("live leases lost", float(LIVE - kept), 0.0),
            ],
            [
                f"{deleted:,} rows deleted and {expired:,} left behind reported in {took:.1f} s; "
                f"{kept:,} leases of {LIVE_TTL:g} s renewed meanwhile, {extensions:,} times.",
            ],
        )
    ]


# In the processes

_leases: list[Any] = []
_extended = [0]
_sweep: list[Any] = []
_swept = [0, 0, 0]


def keep(count: int, dead: int) -> None:
    """Hold leases all over the table, and let them be renewed."""
    backend = locks["default"]
    extend = backend.extend

    def counted(extensions: Any) -> Any:
        answer = extend(extensions)
        _extended[0] += len(answer.extended)
        return answer

    backend.extend = counted  # type: ignore[method-assign]
    for number in range(count):
        key = f"swept:{number * (dead // count):08d}-live"
        _leases.append(db_lock(key, ttl=LIVE_TTL, label="live").acquire())


def kept() -> tuple[int, int]:
    """How many leases are still held, and can be released."""
    threading.Event().wait(LIVE_TTL / 2)
    held = sum(not lease.lost and lease.release() for lease in _leases)
    return held, _extended[0]


def probe(seconds: float) -> dict[str, float]:
    """Acquire and release a lock; how long the acquires took."""
    took = []
    until = time.monotonic() + seconds
    while (began := time.perf_counter()) and time.monotonic() < until:
        lease = db_lock("probe").acquire()
        took.append(time.perf_counter() - began)
        lease.release()
        # A site with other things to do.
        time.sleep(0.002)
    return {"median": median(took), "p99": percentile(took, 99), "count": len(took)}


def sweep(seconds: float) -> bool:
    """Go on sweeping for that long; whether it is finished."""
    if not _sweep:
        _sweep.append(locks["default"].sweep(older_than=86400, batch_size=1000))
    until = time.monotonic() + seconds
    for batch in _sweep[0]:
        _swept[0] += batch.examined
        _swept[1] += len(batch.expired)
        _swept[2] += batch.deleted
        if time.monotonic() > until:
            return False
    return True


def swept() -> list[int]:
    return _swept
