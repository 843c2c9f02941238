"""Whatever befalls server, network and workers: no two leases of a key at once, tokens grow, what
is guarded loses nothing, whoever waits is served soon after, and nothing is left."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connections
from django.test import override_settings

from distlocks import locks
from tests.integration.advisory.scene import (
    USING,
    AdvisoryScene,
    AdvisoryTopology,
    answers_dropped,
    connections_cut,
    cut_off,
    holders_killed_and_paused,
    one_process_of_it_killed,
    server_restarted,
)
from tests.integration.nemesis.conftest import fork_server  # noqa: F401
from tests.integration.nemesis.store import ALIAS, GuardedStore
from tests.integration.rig.conductor import Rig
from tests.servers import session
from tests.servers.children import Child
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy

BACKEND = "distlocks.backends.advisory.AdvisoryBackend"
WORKER = "tests.integration.advisory.scene.AdvisoryWorker"
TTL = 1.2
Stage = Callable[..., AdvisoryScene]


@pytest.fixture
def stage(
    fork_server: Child,  # noqa: F811
    databases: None,
    fresh_postgres: PostgresServer,
    tmp_path: Path,
    key: str,
) -> Iterator[Stage]:
    """`stage()`: a scene on a server of its own, with workers under way."""
    place = fresh_postgres.database("postgres")
    here = {**copy.deepcopy(connections["postgres"].settings_dict), **place}
    numbers = count()
    store = GuardedStore(session.server(PostgresServer).url, settings.DATABASES["postgres"]["NAME"])
    connections.databases[USING] = here
    call_command("migrate", database=USING, run_syncdb=True, verbosity=0)
    with (
        FaultProxy(fresh_postgres.host, fresh_postgres.port) as proxy,
        ExitStack() as running,
    ):
        running.callback(connections.databases.pop, USING)
        running.callback(connections.__delitem__, USING)
        running.callback(connections[USING].close)
        running.callback(store.close)

        def make(keys: int = 3, *, runners: int = 4, **plan: Any) -> AdvisoryScene:
            entry = {"BACKEND": BACKEND, "TTL": TTL, "MAX_TTL": TTL, "OPTIONS": {"using": USING}}
            stores = {"default": settings.DISTLOCKS["default"], ALIAS: entry}
            running.enter_context(override_settings(DISTLOCKS={**settings.DISTLOCKS, ALIAS: entry}))
            running.callback(locks.close_all)
            folder = tmp_path / f"journals-{next(numbers)}"
            folder.mkdir()
            rig = Rig(
                fork_server,
                store,
                folder,
                [f"{key}:{one}" for one in range(keys)],
                ttls=(1.0, TTL),
                worker=WORKER,
                database="postgres",
                stores=stores,
                lock_server={**here, "HOST": proxy.host, "PORT": str(proxy.port)},
                **plan,
            )
            running.callback(rig.close)
            scene = AdvisoryScene(AdvisoryTopology(fresh_postgres, proxy), rig, TTL)  # type: ignore[arg-type]
            scene.begin(runners)
            return scene

        yield make


@pytest.mark.parametrize(
    "nemesis",
    [
        server_restarted,
        # The others show the like of it.
        pytest.param(one_process_of_it_killed, marks=pytest.mark.soak),
        answers_dropped,
        cut_off,
        connections_cut,
        holders_killed_and_paused,
    ],
    ids=lambda nemesis: nemesis.__name__,
)
def test_no_lock_is_held_twice(
    stage: Stage,
    nemesis: Callable[[AdvisoryScene], None],
    record_property: Callable[[str, object], None],
) -> None:
    scene = stage()
    gap = scene.suffer(nemesis, holding=nemesis is not holders_killed_and_paused)  # type: ignore[arg-type]
    report = scene.finish()
    record_property("seen", f"gap {gap:.2f} s, {report}")
    assert not report.violations, report
    assert report.counts["grants"] >= 10, report
    assert report.counts["committed"] >= 3, report
    scene.check_nothing_is_left()
