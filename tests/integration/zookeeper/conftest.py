"""An ensemble of the tests' own, the process that forks the workers, and scenes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from distlocks import locks
from tests.integration.contract.stores import (  # noqa: F401
    gate,
    moved_clock,
    pytest_generate_tests,
    start,
    store,
    told,
)
from tests.integration.nemesis.conftest import fork_server  # noqa: F401
from tests.integration.nemesis.store import ALIAS, GuardedStore
from tests.integration.rig.conductor import Rig
from tests.integration.zookeeper.scene import Cut, Scene
from tests.servers import session
from tests.servers.children import Child
from tests.servers.postgres import PostgresServer
from tests.servers.zookeeper import ZooKeeperEnsemble

BACKEND = "distlocks.backends.zookeeper.ZooKeeperBackend"
# Seconds: of every lease and session here, and of a request.
TTL, TIMEOUT = 1.5, 0.7
RUNNERS = 4
WORKER = "tests.integration.zookeeper.worker.ZooKeeperWorker"


@pytest.fixture(scope="package")
def cut() -> Iterator[Cut]:
    """An ensemble to be killed at will."""
    ensemble = session.private_group(ZooKeeperEnsemble)
    assert ensemble is not None
    with ensemble:
        found = Cut(ensemble)
        yield found
        found.close()


@pytest.fixture
def stage(
    cut: Cut,
    fork_server: Child,  # noqa: F811
    databases: None,
    tmp_path: Path,
    key: str,
) -> Iterator[Callable[..., Scene]]:
    """`stage()`: a scene with workers under way."""
    guarded = GuardedStore(
        session.server(PostgresServer).url, settings.DATABASES["postgres"]["NAME"]
    )
    numbers = count()
    with ExitStack() as running:
        running.callback(guarded.close)

        def make(keys: int = 3, *, ttl: float = TTL, runners: int = RUNNERS, **plan: Any) -> Scene:
            cut.heal()
            number = next(numbers)

            def stores(hosts: str) -> dict[str, Any]:
                return {
                    "default": settings.DISTLOCKS["default"],
                    ALIAS: {
                        "BACKEND": BACKEND,
                        "TTL": ttl,
                        "OPTIONS": {
                            "hosts": hosts,
                            "path": f"/{key[-12:]}{number}",
                            "timeout": TIMEOUT,
                        },
                    },
                }

            direct, behind = stores(cut.ensemble.addresses), stores(cut.addresses)
            running.enter_context(
                override_settings(DISTLOCKS={**settings.DISTLOCKS, ALIAS: direct[ALIAS]})
            )
            running.callback(locks.close_all)
            folder = tmp_path / f"journals-{number}"
            folder.mkdir()
            rig = Rig(
                fork_server,
                guarded,
                folder,
                [f"{key}:{number}:{one}" for one in range(keys)],
                ttls=(1.0, ttl),
                worker=WORKER,
                database="postgres",
                stores=direct,
                **plan,
            )
            running.callback(rig.close)
            scene = Scene(cut, rig, ttl, lambda: {"stores": behind})
            scene.begin(runners)
            return scene

        yield make
