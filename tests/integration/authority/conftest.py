"""Fast paths, the servers under them, and what is heard of them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.conf import settings
from django.core import mail
from django.db import connections
from django.dispatch import Signal

from distlocks import locks, signals
from distlocks.backends.fastpath import authority
from distlocks.backends.redis import server as redis_server_module
from distlocks.renewal import renewer
from distlocks.testing import flush_events
from tests.integration.authority.scene import FAST, Scene
from tests.integration.contract.stores import gate, start  # noqa: F401
from tests.servers import session
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer
from tests.waiting import eventually

# Seconds for which a process goes on that has lost its database.
TRUSTED = 1.0


@pytest.fixture(scope="package")
def own_redis() -> Iterator[RedisServer]:
    """A Redis of these tests' own: they kill and flush it, and the next finds it running."""
    server = session.private(RedisServer)
    if server is None:
        pytest.skip(session.without_program("a Redis to be killed"))
    with server:
        yield server


@pytest.fixture
def make_scene(
    own_redis: RedisServer, databases: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Scene]]:
    """`make_scene("mariadb")`: a scene whose row is in the database of that alias."""
    own_redis.start()
    # Else connections to stores are closed whenever no lease is held.
    monkeypatch.delattr(mail, "outbox", raising=False)
    # Who asks a server that is gone is told so sooner than users are, for whom one that restarts
    # should not be an error.
    monkeypatch.setattr(redis_server_module, "FAILOVER_PATIENCE", 0.1)
    with ExitStack() as running:

        def close() -> None:
            renewer.releases.settle()
            renewer.releases.give_up()
            locks.close_all()

        def make(database: str = "postgres") -> Scene:
            scene = Scene(own_redis, database, running)
            running.callback(close)
            return scene

        yield make


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    """Nobody has looked yet; no process has been added."""
    return make_scene()


@pytest.fixture
def fast(scene: Scene) -> Scene:
    """With one process."""
    scene.add()
    return scene


@pytest.fixture
def proxy(databases: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What lies between the database alias "far" and the run's PostgreSQL."""
    server = session.server(PostgresServer)
    with FaultProxy(server.host, server.port) as proxy:
        database = {
            **connections["postgres"].settings_dict,
            "HOST": proxy.host,
            "PORT": str(proxy.port),
        }
        monkeypatch.setitem(connections.databases, "far", database)
        yield proxy
        connections["far"].close()
        del connections["far"]


@pytest.fixture
def cut_off(proxy: FaultProxy, scene: Scene) -> Iterator[Scene]:
    """With a process that reads the row through the proxy, and trusts it for a second."""
    settings.DISTLOCKS["far"] = {
        "BACKEND": settings.DISTLOCKS["postgres"]["BACKEND"],
        "OPTIONS": {"using": "far"},
    }
    scene.add(database="far", mode_lease=TRUSTED)
    yield scene
    # What is still to be read, or given back, is not to be waited for.
    proxy.mode = "reset"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has to wait for the row to be read gives up sooner."""
    monkeypatch.setattr(authority, "PATIENCE", 0.5)


class Heard:
    """What signals have told, in order."""

    def __init__(self) -> None:
        self._said: list[tuple[Signal, dict[str, Any]]] = []

    def hear(self, signal: Signal, **arguments: Any) -> None:
        self._said.append((signal, arguments))

    def of(self, signal: Signal, alias: str = FAST) -> list[dict[str, Any]]:
        """What the signal has told of the alias, once it has told something."""
        return eventually(lambda: self._of(signal, alias))

    def _of(self, signal: Signal, alias: str) -> list[dict[str, Any]]:
        flush_events()
        return [said for sent, said in self._said if sent is signal and said["alias"] == alias]

    def of_phase(self, phase: str, alias: str = FAST) -> list[dict[str, Any]]:
        """Of the changes that the process has noticed, those to this phase, once there is one."""

        def found() -> list[dict[str, Any]]:
            told = self._of(signals.authority_changed, alias)
            return [said for said in told if said["authority"] == phase]

        return eventually(found)

    def hears_of(self, *phases: str, alias: str = FAST) -> None:
        """Return once the process has noticed changes to these phases, in this order."""
        changed = signals.authority_changed
        eventually(lambda: [one["authority"] for one in self._of(changed, alias)] == [*phases])


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    every = (signals.authority_changed, signals.lease_ending, signals.lease_lost)
    for signal in every:
        signal.connect(heard.hear)
    yield heard
    for signal in every:
        signal.disconnect(heard.hear)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What has been logged as a warning."""

    def found() -> list[str]:
        records = [one for one in caplog.records if one.name == "distlocks"]
        return [one.getMessage() for one in records if one.levelno == logging.WARNING]

    return found
