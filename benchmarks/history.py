"""The admin's statistics and history with millions of rows, against the same with a hundred."""

import copy
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks.environment import Environment
from benchmarks.rounds import Result, Target, interleaved, median, ratios, spread

FEW = 100
EVENTS, STATISTICS = "/admin/distlocks/lockevent/", "/admin/distlocks/lockrollup/"

# Of all events, most are ordinary; of all backends, one has nearly all of them.
FILL_EVENTS = """
INSERT INTO {schema}.distlocks_lockevent
  (at, kind, backend, key, pattern, owner_id, fencing_token, host, pid, thread, label, metadata,
   other, waited, held, reason)
SELECT now() - (%(rows)s - n) * (%(span)s::float / %(rows)s) * interval '1 second',
       CASE WHEN n %% 1000 = 0 THEN 'lost' WHEN n %% 500 = 1 THEN 'error'
            WHEN n %% 50 = 2 THEN 'timed_out' WHEN n %% 5 = 3 THEN 'acquired' ELSE 'contended' END,
       CASE WHEN n %% 5000 = 4 THEN 'audit' WHEN n %% 10 = 5 THEN 'redis' ELSE 'default' END,
       p.name || ':' || n %% 200000, p.name || ':*', 'owner-' || n / 3, 1790000000000000 + n,
       'web-' || n %% 20, 1000 + n %% 500, 'MainThread', '', '{{"request": "af32"}}',
       '{{"host": "web-2", "pid": 9, "thread": "MainThread", "owner_id": "x", "metadata": {{}}}}',
       0.5, NULL, ''
FROM generate_series(1, %(rows)s) AS n,
     LATERAL (SELECT CASE WHEN n %% 3 = 0 THEN 'order'
                          WHEN n %% 100000 = 7 THEN 'migration'
                          ELSE 'pattern' || n %% 40 END AS name) AS p
"""
# The last three days by the minute, thirty by the hour: two backends, some patterns in each.
FILL_ROLLUPS = """
INSERT INTO {schema}.distlocks_lockrollup
  (backend, began, span, pattern, acquired, contended, timed_out, expired, lost, forced, errors,
   dropped, wait_seconds, hold_seconds, {columns})
SELECT b.name, extract(epoch from now())::bigint / %(span)s * %(span)s - step * %(span)s, %(span)s,
       CASE WHEN pattern = 0 THEN '' ELSE 'pattern' || pattern || ':*' END,
       100, 10, 1, 0, 0, 0, 0, 0, 3.5, 9.5, {values}
FROM generate_series(0, %(steps)s) AS step, generate_series(0, %(patterns)s) AS pattern,
     (VALUES ('default'), ('redis')) AS b(name)
LIMIT %(limit)s
"""


def run(env: Environment, quick: bool) -> list[Result]:
    events, share = (50_000, 0.01) if quick else (5_000_000, 1.0)
    rounds = 3 if quick else 15
    with site(env) as get:
        began = time.monotonic()
        fill(env, "public", events, share)
        fill(env, "few", FEW, 0.0)
        took = time.monotonic() - began
        statistics = env.ask("SELECT count(*) FROM distlocks_lockrollup")
        questions = list(asked(get))
        rows: list[tuple[str, ...]] = []
        figures: dict[str, Any] = {"events": events, "statistics": statistics, "filled_in": took}
        targets: list[Target] = []
        for name, address, base in questions:
            queries = {database: get(database, address).queries for database in ("few", "default")}
            times = interleaved(
                {
                    "few": lambda base=base: get("few", base).seconds,
                    "many": lambda address=address: get("default", address).seconds,
                },
                rounds,
            )
            slower = ratios(times["many"], times["few"])
            plan = get("default", address).plan
            rows.append(
                (
                    name,
                    f"{queries['few']}/{queries['default']}",
                    *(f"{median(times[one]) * 1e3:.1f}" for one in ("few", "many")),
                    spread(slower),
                    ", ".join(plan),
                )
            )
            figures[name] = {"queries": queries, "times": times, "plan": plan}
            targets.append(Target(f"{name}: time against {FEW} rows", median(slower), 3.0))
        most = max(int(row[1].split("/")[1]) for row in rows)
        targets.append(Target("queries of a page, at most", float(most), 12.0))
        return [
            Result(
                "history",
                f"pages of the admin with {events:,} events and {statistics:,} rows of statistics "
                f"against {FEW} on PostgreSQL, {rounds} rounds",
                ("page", "queries", "few, ms", "many, ms", "ratio (middle half)", "read by"),
                rows,
                figures,
                targets,
                [f"Filled in {took:.0f} s."],
            )
        ]


def asked(get: "Callable[[str, str], Answer]") -> Iterator[tuple[str, str, str]]:
    """Name, address, and the address of what it is compared with."""
    for name in ("15m", "1h", "6h", "24h", "7d", "30d"):
        yield f"statistics, {name}", *[f"{STATISTICS}?range={name}"] * 2
    one = f"{STATISTICS}?range=30d&backend=redis&pattern=pattern7%3A*"
    yield "statistics, 30d, one pattern and backend", one, one
    deep = get("default", f"{EVENTS}?since=all&until=29d").older
    filters = {
        "the last day": "",
        "of all time": "since=all",
        "by a cursor, 29 days deep": f"since=all{deep}",
        "one key": "since=all&key=order:42",
        "one key, the last day": "key=order:42",
        "keys order:*": "since=all&key=order:*",
        "keys order:4242*": "since=all&key=order:4242*",
        "keys migration:*": "since=all&key=migration:*",
        "keys nobody:*": "since=all&key=nobody:*",
        "pattern order:*": "since=all&pattern=order:*",
        "pattern migration:*": "since=all&pattern=migration:*",
        "kind contended": "since=all&kind=contended",
        "kind lost": "since=all&kind=lost",
        "kinds expired, taken over": "since=all&kind=expired&kind=taken_over",
        "kind cycle (none)": "since=all&kind=cycle",
        "backend default": "since=all&backend=default",
        "backend audit": "since=all&backend=audit",
        "kind lost, pattern order:*": "since=all&kind=lost&pattern=order:*",
        "kind error, backend redis (none)": "since=all&kind=error&backend=redis",
        "kind timed out, backend audit": "since=all&kind=timed_out&backend=audit",
        "kind lost, backend redis, last day": "kind=lost&backend=redis",
        "pattern migration:*, kind lost": "since=all&pattern=migration:*&kind=lost",
        "keys order:*, kind lost": "since=all&key=order:*&kind=lost",
        "owner of one key": "since=all&key=order:42&owner=owner-14",
    }
    for name, query in filters.items():
        yield f"history: {name}", f"{EVENTS}?{query}", EVENTS


class Answer:
    """What one request took."""

    def __init__(self, seconds: float, queries: list[str], content: str, plan: list[str]) -> None:
        self.seconds = seconds
        self.queries = len(queries)
        self.plan = plan
        found = re.search(r'href="[^"]*(&amp;older=[^"]+)"', content)
        self.older = found[1].replace("&amp;", "&") if found else ""


@contextmanager
def site(env: Environment) -> Iterator[Callable[[str, str], Answer]]:
    """The admin, with the history in the schema that a request names as a database."""
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connections
    from django.test import override_settings

    few = copy.deepcopy(settings.DATABASES["default"])
    few["OPTIONS"] = {**few.get("OPTIONS", {}), "options": "-c search_path=few"}
    settings.DATABASES["few"] = few
    connections.databases["few"] = few
    env.run("CREATE SCHEMA few")
    with override_settings(
        DISTLOCKS={"default": settings.DISTLOCKS["default"]}, ALLOWED_HOSTS=["testserver"]
    ):
        for database in ("default", "few"):
            call_command("migrate", database=database, verbosity=0)
        from django.contrib.auth.models import User
        from django.test import Client

        client = Client()
        client.force_login(User.objects.create_superuser("olga"))
        yield lambda database, address: _get(client, database, address)
        connections["few"].close()
        del settings.DATABASES["few"]


def _get(client: Any, database: str, address: str) -> Answer:
    from django.db import connections

    from distlocks.history import places

    queries: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        queries.append((sql, params))
        return execute(sql, params, many, context)

    with (
        mock.patch.object(places, "databases", return_value=[database]),
        connections["default"].execute_wrapper(note),
        connections["few"].execute_wrapper(note),
    ):
        began = time.perf_counter()
        response = client.get(address)
        seconds = time.perf_counter() - began
    assert response.status_code == 200, address
    plans = (_plan(connections[database], *one) for one in queries if "distlocks_lock" in one[0])
    return Answer(
        seconds,
        [sql for sql, _ in queries],
        response.content.decode(),
        sorted(set(itertools.chain.from_iterable(plans))),
    )


def _plan(connection: Any, sql: str, params: Any) -> set[str]:
    """Through which indexes, or without one, a query goes."""
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}", params)
        (found,) = cursor.fetchone()
    tree = json.loads(found) if isinstance(found, str) else found
    used: set[str] = set()
    nodes = [tree[0]["Plan"]]
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        if "Scan" in node["Node Type"] and node["Node Type"] != "Bitmap Heap Scan":
            used.add(node.get("Index Name", node["Node Type"]).removeprefix("distlocks_"))
    return used


def fill(env: Environment, schema: str, events: int, share: float) -> None:
    """Make the rows; indexes are made after them, which is faster."""
    from distlocks.models import HOLD_COLUMNS, WAIT_COLUMNS

    table = f"{schema}.distlocks_lockevent"
    indexes = env.ask(
        "SELECT array_agg(indexdef) FROM pg_indexes WHERE schemaname = %s "
        "AND indexname LIKE 'distlocks_event_%%'",
        schema,
    )
    names = [re.search(r"INDEX (\S+) ON", one) for one in indexes]
    for name in names:
        assert name is not None
        env.run(f"DROP INDEX {schema}.{name[1]}")
    span = 86400 * 30 if share else 80_000
    _run(FILL_EVENTS.format(schema=schema), {"rows": events, "span": span})
    for index in indexes:
        env.run(index)
    columns = WAIT_COLUMNS + HOLD_COLUMNS
    rollups = FILL_ROLLUPS.format(
        schema=schema, columns=", ".join(columns), values=", ".join(["3"] * len(columns))
    )
    steps = max(share, 0.01)
    for span, most, patterns in ((60, 4320, 15), (3600, 720, 40)):
        limit = None if share else FEW // 2
        values = {"span": span, "steps": int(most * steps), "patterns": patterns, "limit": limit}
        _run(rollups, values)
    env.run(f"VACUUM ANALYZE {table}")
    env.run(f"VACUUM ANALYZE {schema}.distlocks_lockrollup")


def _run(query: str, values: dict[str, Any]) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(query, values)
