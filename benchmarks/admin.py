"""The admin's pages with a hundred locks and with a hundred thousand, side by side."""

import time
from typing import Any

from benchmarks.environment import Environment
from benchmarks.rounds import Result, Target, interleaved, median, ratios, spread

FEW = 100
STORES = ("postgres", "sqlite", "redis")
# What is asked for: by its name, the query of the list, or None for the page of one lock.
PAGES: dict[str, str | None] = {
    "list": "",
    "list, by age": "?o=-age",
    "list, by time left": "?o=left",
    "list, last page": "?p={last}",
    "list, part for updates": "?_results=1",
    "list, search that finds nothing": "?q=nothing+at+all",
    "one lock": None,
}
# A search has to look at all of them.
GROWS = "list, search that finds nothing"
LIMIT = 3.0


def run(env: Environment, quick: bool) -> list[Result]:
    many = 5_000 if quick else 100_000
    rounds, views = (3, 3) if quick else (15, 10)
    results = []
    for store in STORES:
        with env.processes() as processes:
            few, lots = processes.start("benchmarks.admin", 2)
            few.call("prepare", store, FEW)
            memory = lots.call("prepare", store, many)
            rows, figures, targets = [], {}, []
            for page, query in PAGES.items():
                measured = interleaved(
                    {
                        "few": lambda: float(few.call("view", query, views)),  # noqa: B023
                        "many": lambda: float(lots.call("view", query, views)),  # noqa: B023
                    },
                    rounds,
                )
                queries = [side.call("queries", query) for side in (few, lots)]
                ratio = ratios(measured["many"], measured["few"])
                rows.append(
                    (
                        page,
                        f"{median(measured['few']) * 1e3:.1f}",
                        f"{median(measured['many']) * 1e3:.1f}",
                        spread(ratio),
                        f"{queries[0]}, {queries[1]}",
                    )
                )
                figures[page] = {"seconds": measured, "ratio": ratio, "queries": queries}
                if page != GROWS:
                    targets.append(Target(f"{page}: times as long", median(ratio), LIMIT))
            results.append(
                Result(
                    f"admin-{store}",
                    f"Admin pages, {FEW:,} and {many:,} locks in {store}",
                    ("page", f"{FEW:,} (ms)", f"{many:,} (ms)", "ratio", "queries"),
                    rows,
                    figures | {"snapshot_megabytes": memory},
                    targets,
                    [f"The snapshot of {many:,} takes {memory:.0f} MB."] if memory else [],
                )
            )
    return results


# In the processes

_client: Any = None
_last = 1
URL = "/admin/distlocks/lock/"
ONE = f"{URL}of/default/order:00000042/"


def prepare(store: str, count: int) -> float:
    """Have so many locks in a store of this process's own; megabytes that a snapshot takes."""
    global _client, _last
    from django.conf import settings
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.db import connection, connections
    from django.test import Client

    side = f"admin_{store}_{count}"
    databases = connections.databases
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA {side}")
    connections.close_all()
    databases["default"].setdefault("OPTIONS", {})["options"] = f"-c search_path={side}"
    databases["sqlite"]["NAME"] = f"{databases['sqlite']['NAME']}.{side}"
    for alias in databases:
        call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
    entry: dict[str, Any] = {"BACKEND": "distlocks.backends.database.DatabaseBackend"}
    if store == "redis":
        entry = settings.DISTLOCKS["redis"] | {"TTL": 86400, "MAX_TTL": 86400}
        entry["OPTIONS"] = entry["OPTIONS"] | {"namespace": side}
    else:
        entry["OPTIONS"] = {"using": "sqlite" if store == "sqlite" else "default"}
    settings.DISTLOCKS = {"default": entry}
    settings.ALLOWED_HOSTS = ["testserver"]
    _last = min(count, 1000) // 50
    _client = Client()
    _client.force_login(User.objects.create_superuser("bench"))
    if store == "redis":
        return _fill_redis(count)
    _fill(entry["OPTIONS"]["using"], count)
    return 0.0


def _fill(using: str, count: int) -> None:
    from django.db import connections

    from distlocks.models import Lock

    now = time.time_ns() // 1000
    Lock.objects.using(using).bulk_create(
        (
            Lock(
                key=f"order:{number:08d}",
                owner_id=f"owner-{number}",
                fencing_token=now + number,
                # In an order of their own.
                acquired_at=now - (number * 7919) % count * 1000,
                expires_at=now + 86_400_000_000 + (number * 104729) % count * 1000,
                host=f"web-{number % 10}",
                pid=number % 1000,
                thread="MainThread",
                label="bench",
            )
            for number in range(count)
        ),
        batch_size=1000,
    )
    with connections[using].cursor() as cursor:
        cursor.execute("ANALYZE distlocks_lock")


def _fill_redis(count: int) -> float:
    import tracemalloc

    from benchmarks.statements import request
    from distlocks import locks
    from distlocks.live import Wanted, listing
    from distlocks.live.snapshots import Snapshot

    backend = locks["default"]
    for number in range(count):
        backend.try_acquire(request(f"order:{number:08d}", 86_400.0))
    tracemalloc.start()
    snapshot = Snapshot("default", backend.scan())
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(snapshot.entries) == min(count, 100_000)
    del snapshot
    while listing(Wanted()).stores[0].reading:
        time.sleep(0.1)
    return taken / 1e6


def view(query: str | None, times: int) -> float:
    """Look at the page; seconds that it takes."""
    url = ONE if query is None else URL + query.format(last=_last)
    took = []
    for _ in range(times):
        began = time.perf_counter()
        response = _client.get(url)
        took.append(time.perf_counter() - began)
        assert response.status_code == 200, response.content
    return median(took)


def queries(query: str | None) -> int:
    """Statements that the page sends, over every connection of the process."""
    from django.db import connections

    from benchmarks.statements import Recorder, recorded_everywhere

    recorder = Recorder()
    for connection in connections.all(initialized_only=True):
        connection.close()
    with recorded_everywhere(recorder):
        view(query, 1)
    for connection in connections.all(initialized_only=True):
        if recorder in connection.execute_wrappers:
            connection.execute_wrappers.remove(recorder)
    return len(recorder.sent)
