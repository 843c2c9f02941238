"""The servers of one run: started together, announced to the settings, ended together."""

import atexit
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tests.servers import finding
from tests.servers.base import Server, ServerError
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.watchdog import watchdog

KINDS: tuple[type[Server], ...] = (PostgresServer, MariaDBServer)
# A folder of the run's own; its name also tells the run's databases from those of another run.
FOLDER_VARIABLE = "DISTLOCKS_TEST_DIR"

AnyServer = TypeVar("AnyServer", bound=Server)
_owner: int | None = None
_servers: dict[type[Server], Server] = {}


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


def running() -> list[Server]:
    return list(_servers.values())


def server(kind: type[AnyServer]) -> AnyServer:
    found = _servers[kind]
    assert isinstance(found, kind)
    return found


def private(kind: type[AnyServer]) -> AnyServer | None:
    """Another server of the kind, not started; None where the run's own is somebody else's and no
    program is here. A machine that was given a server by URL is not asked to install one.
    """
    program = finding.find([kind], install=False).get(kind)
    return kind(program) if program else None


def close() -> None:
    """End everything; a forked child of the run has nothing to end."""
    if os.getpid() == _owner:
        for found in _servers.values():
            found.close()
        _servers.clear()
        watchdog.close()


def _end_with_process() -> None:
    global _owner
    if _owner is None:
        _owner = os.getpid()
        atexit.register(close)
