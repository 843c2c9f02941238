"""Topologies of the tests' own, the process that forks the workers, and scenes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core import mail
from django.test import override_settings

from distlocks import locks
from distlocks.backends.redis import RedisBackend
from tests.integration.nemesis.scene import Scene
from tests.integration.nemesis.store import ALIAS, GuardedStore
from tests.integration.nemesis.topologies import Alone, Five, Proxied, Six, Topology, Trio
from tests.integration.rig import worker
from tests.integration.rig.conductor import Rig
from tests.servers import session
from tests.servers.children import Child, Spawner
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer, ValkeyServer
from tests.servers.redis_groups import ClusterGroup, IndependentGroup, SentinelGroup
from tests.settings import REDIS_BACKEND

# Seconds: of every lease here, and so of every quarantine.
TTL = 1.2
RUNNERS = 4
WORKER = "tests.integration.nemesis.worker.NemesisWorker"


@pytest.fixture(scope="package")
def fork_server(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """The process that forks the workers."""
    spawner = Spawner(tmp_path_factory.mktemp("nemesis"))
    child = spawner(worker.serve)
    child.expect('{"who": "", "word": "ready"}')
    yield child
    # Its input is closed with it.
    child.kill()
    spawner.close()


def _own(kind: Any) -> Any:
    found = session.private(kind) if issubclass(kind, RedisServer) else session.private_group(kind)
    if found is None:
        pytest.skip(session.without_program(f"{kind.name} to be killed"))
    return found


@pytest.fixture(scope="package")
def alone() -> Iterator[Alone]:
    with _own(RedisServer) as server:
        yield Alone(server)


@pytest.fixture(scope="package")
def valkey() -> Iterator[Alone]:
    with _own(ValkeyServer) as server:
        yield Alone(server)


@pytest.fixture
def proxied(alone: Alone) -> Iterator[Proxied]:
    with FaultProxy(alone.server.host, alone.server.port) as proxy:
        yield Proxied(alone.server, proxy)


@pytest.fixture(scope="package")
def sentinel() -> Iterator[Trio]:
    with _own(SentinelGroup) as group:
        yield Trio(group)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Six]:
    with _own(ClusterGroup) as group:
        yield Six(group)


@pytest.fixture(scope="package")
def five() -> Iterator[IndependentGroup]:
    with _own(IndependentGroup) as group:
        yield group


@pytest.fixture
def quorum(five: IndependentGroup) -> Iterator[Five]:
    five.heal()
    with ExitStack() as running:
        proxies = [
            running.enter_context(FaultProxy(member.host, member.port)) for member in five.members
        ]
        yield Five(five, proxies)


@pytest.fixture
def stage(
    request: pytest.FixtureRequest, fork_server: Child, databases: None, tmp_path: Path, key: str
) -> Iterator[Callable[..., Scene]]:
    """`stage("sentinel")`: a scene on the topology of that name, with workers under way."""
    store = GuardedStore(session.server(PostgresServer).url, settings.DATABASES["postgres"]["NAME"])
    numbers = count()
    with ExitStack() as running:
        running.callback(store.close)

        def make(
            name: str,
            keys: int = 3,
            *,
            ttl: float = TTL,
            runners: int = RUNNERS,
            options: dict[str, Any] | None = None,
            **plan: Any,
        ) -> Scene:
            topology: Topology = request.getfixturevalue(name)
            topology.heal()
            number = next(numbers)
            entry = {"BACKEND": topology.backend, "TTL": ttl, "MAX_TTL": ttl}
            namespace = {"namespace": f"{key[-12:]}{number}"}
            common = {**namespace, **topology.more_options, **(options or {})}
            stores = {
                "default": settings.DISTLOCKS["default"],
                ALIAS: {**entry, "OPTIONS": {**topology.options_of_workers(), **common}},
            }
            running.enter_context(
                override_settings(
                    DISTLOCKS={
                        **settings.DISTLOCKS,
                        ALIAS: {**entry, "OPTIONS": {**topology.options(), **common}},
                    }
                )
            )
            running.callback(locks.close_all)
            folder = tmp_path / f"journals-{number}"
            folder.mkdir()
            rig = Rig(
                fork_server,
                store,
                folder,
                [f"{key}:{number}:{one}" for one in range(keys)],
                ttls=(1.0, ttl),
                worker=WORKER,
                database="postgres",
                stores=stores,
                dated=topology.dates_grants,
                timeouts=topology.timeouts,
                **plan,
            )
            running.callback(rig.close)
            scene = Scene(topology, rig, ttl)
            scene.begin(runners)
            return scene

        yield make


@pytest.fixture
def add_store(
    databases: None, monkeypatch: pytest.MonkeyPatch, key: str
) -> Iterator[Callable[..., str]]:
    """`add_store("old", ttl=1, url=…)`: the alias "old" of DISTLOCKS on a server given by OPTIONS,
    in this process. `fresh`: nobody can have had a lock there before.
    """
    # Else connections to stores are closed whenever no lease is held.
    monkeypatch.delattr(mail, "outbox", raising=False)
    with ExitStack() as changed:
        changed.callback(locks.close_all)

        def add(alias: str, *, ttl: float, fresh: bool = True, **options: Any) -> str:
            entry = {
                "BACKEND": REDIS_BACKEND,
                "TTL": ttl,
                "MAX_TTL": ttl,
                "OPTIONS": {"namespace": key[-32:], **options},
            }
            stores = {**settings.DISTLOCKS, alias: entry}
            changed.enter_context(override_settings(DISTLOCKS=stores))
            if fresh:
                backend = locks[alias]
                assert isinstance(backend, RedisBackend)
                backend.quarantine(end=True)
            return alias

        yield add
