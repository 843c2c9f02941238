"""The servers of one run: started together, announced to the settings, ended together."""

import atexit
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tests.servers import finding
from tests.servers.base import Server, ServerError
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer, ValkeyServer
from tests.servers.redis_groups import ClusterGroup, IndependentGroup, RedisGroup, SentinelGroup
from tests.servers.watchdog import watchdog
from tests.servers.zookeeper import ZooKeeperEnsemble

KINDS: tuple[type[Server], ...] = (PostgresServer, MariaDBServer, RedisServer)
# Started when the first test asks for them (see `start_for`), by the alias of DISTLOCKS.
ON_DEMAND: dict[str, type[Server] | type[RedisGroup] | type[ZooKeeperEnsemble]] = {
    "valkey": ValkeyServer,
    "redis_sentinel": SentinelGroup,
    "redis_cluster": ClusterGroup,
    "redlock": IndependentGroup,
    "zookeeper": ZooKeeperEnsemble,
}
# A folder of the run's own; its name also tells the run's databases from those of another run.
FOLDER_VARIABLE = "DISTLOCKS_TEST_DIR"

AnyServer = TypeVar("AnyServer", bound=Server)
AnyGroup = TypeVar("AnyGroup", bound=RedisGroup | ZooKeeperEnsemble)
_owner: int | None = None
_servers: dict[type[Server], Server] = {}
_groups: dict[type[RedisGroup] | type[ZooKeeperEnsemble], RedisGroup | ZooKeeperEnsemble] = {}


def open_folder() -> Path:
    """Make the run's folder and tell this process and its children of it."""
    folder = Path(tempfile.mkdtemp(prefix="distlocks-"))
    watchdog.folder_made(folder)
    _end_with_process()
    os.environ[FOLDER_VARIABLE] = str(folder)
    return folder


def start() -> list[Server]:
    """Start every server of the run, at once, and put their URLs into the environment."""
    _end_with_process()
    missing = []
    for kind in KINDS:
        if url := os.environ.get(kind.url_variable):
            _servers[kind] = kind(url=url)
            if not _servers[kind].is_ready():
                raise ServerError(f"{kind.name} does not answer at {kind.url_variable}={url}")
        else:
            missing.append(kind)
    programs = finding.find(missing)
    _servers.update({kind: kind(program) for kind, program in programs.items()})
    with ThreadPoolExecutor(len(KINDS)) as pool:
        list(pool.map(lambda kind: _servers[kind].start(), programs))
    for kind in programs:
        os.environ[kind.url_variable] = _servers[kind].url
    return list(_servers.values())


def do_without() -> None:
    """Keep the settings from naming a server that this run has no use for."""
    for kind in KINDS:
        os.environ.pop(kind.url_variable, None)
    os.environ.pop(ValkeyServer.url_variable, None)


def running() -> list[Server]:
    return list(_servers.values())


def server(kind: type[AnyServer]) -> AnyServer:
    found = _servers[kind]
    assert isinstance(found, kind)
    return found


def start_for(alias: str) -> None:
    """Have what an alias of DISTLOCKS needs running and named in the environment, where the
    settings of this process (see `tests.settings.redis_stores`) and of its children find it.

    Skips the test where that cannot be had.
    """
    kind = ON_DEMAND.get(alias)
    if kind is not None and issubclass(kind, Server):
        on_demand(kind)
    elif kind is not None and group(kind) is None:
        import pytest

        pytest.skip(without_program(kind.name))


def on_demand(kind: type[AnyServer]) -> AnyServer:
    """The run's one server of a kind that few tests need, started the first time."""
    if kind not in _servers:
        _end_with_process()
        if url := os.environ.get(kind.url_variable):
            found = kind(url=url)
            if not found.is_ready():
                raise ServerError(f"{kind.name} does not answer at {kind.url_variable}={url}")
        else:
            found = kind(finding.find([kind])[kind]).start()
        _servers[kind] = found
        os.environ[kind.url_variable] = found.url
    return server(kind)


def group(kind: type[AnyGroup]) -> AnyGroup | None:
    """The run's one group of the kind, started the first time, its addresses in the environment;
    None where there is no program for it.
    """
    if kind not in _groups:
        new = private_group(kind)
        if new is None:
            return None
        _end_with_process()
        _groups[kind] = new.start()
        os.environ[kind.variable] = new.addresses
    found = _groups[kind]
    assert isinstance(found, kind)
    return found


def private(kind: type[AnyServer], **options: Any) -> AnyServer | None:
    """Another server of the kind, not started; None where the run's own is somebody else's and no
    program is here. A machine that was given a server by URL is not asked to install one.
    """
    given = kind.url_variable in os.environ
    program = finding.find([kind], install=not given).get(kind)
    return kind(program, **options) if program else None


def private_group(kind: type[AnyGroup]) -> AnyGroup | None:
    """Another group of the kind, not started; None where `private` has no such server."""
    server = private(kind.made_of)
    return kind(server.program) if server and server.program else None


def without_program(what: str) -> str:
    """Why a test is skipped that needs a Redis of its own."""
    return f"{what} needs redis-server, and {RedisServer.url_variable} keeps us from installing it"


def close() -> None:
    """End everything; a forked child of the run has nothing to end."""
    if os.getpid() == _owner:
        for group in _groups.values():
            group.close()
        for found in _servers.values():
            found.close()
        _groups.clear()
        _servers.clear()
        watchdog.close()


def _end_with_process() -> None:
    global _owner
    if _owner is None:
        _owner = os.getpid()
        atexit.register(close)
