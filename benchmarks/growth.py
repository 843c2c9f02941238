"""A million cycles over a thousand keys: what becomes of the table."""

import time

from benchmarks.environment import Environment
from benchmarks.rounds import Result, Target

PROCESSES = 4
KEYS = 1000
MEGABYTE = 1_000_000


def run(env: Environment, quick: bool) -> list[Result]:
    cycles = 50_000 if quick else 1_000_000
    env.empty_table()
    rows: list[tuple[str, ...]] = []
    figures: list[dict[str, float]] = []
    began = time.monotonic()
    with env.processes() as processes:
        workers = processes.start("benchmarks.cycles", PROCESSES)
        for done in range(1, 11):
            for seed, worker in enumerate(workers, done * PROCESSES):
                worker.begin("hammer", KEYS, cycles // 10 // PROCESSES, seed)
            for worker in workers:
                worker.answer()
            table, indexes = env.sizes()
            figures.append({"cycles": cycles * done // 10, "table": table, "indexes": indexes})
    took = time.monotonic() - began
    while env.updates()[0] < 2 * cycles - KEYS:
        time.sleep(0.1)
    in_all, in_place = env.updates()
    for point in (figures[0], figures[4], figures[9]):
        kilobytes = [f"{point[part] / 1000:.0f}" for part in ("table", "indexes")]
        rows.append((f"after {point['cycles']:,} cycles", *kilobytes))
    in_all_bytes = (figures[-1]["table"] + figures[-1]["indexes"]) / MEGABYTE
    share = in_place / in_all
    return [
        Result(
            "growth",
            f"{cycles:,} cycles over {KEYS:,} keys from {PROCESSES} processes on PostgreSQL",
            ("", "table, kB", "indexes, kB"),
            rows,
            {"sizes": figures, "updates": in_all, "in_place": in_place, "seconds": took},
            [Target("table and indexes at the end", in_all_bytes, 2.0, " MB")],
            [
                f"{share:.2%} of {in_all:,} updates were made in place (HOT).",
                f"Through the backend's verbs, for speed; {cycles / took:,.0f} cycles a second in "
                f"all.",
            ],
        )
    ]
