"""Starts and stops server processes: one gunicorn per port, on loopback only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

BASE_DIR = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
# A little more than gunicorn's own graceful time-out.
STOP_SECONDS = 6.0


class ServerFailed(Exception):
    """A server process did not come up or went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One running server process. It leads its own process group, which its pid names."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path | None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def wait_ready(self, timeout: float = 20) -> None:
        """Return when the server answers; raise `ServerFailed` if it ends or takes too long."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.check_alive()
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                if self._ready(deadline - time.monotonic()):
                    return
            time.sleep(0.05)
        raise ServerFailed(f"server {self.name} was not ready after {timeout:g} s{self._log_hint}")

    def check_alive(self) -> None:
        """Raise `ServerFailed` if the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ServerFailed(f"server {self.name} ended with code {code}{self._log_hint}")

    def terminate(self) -> None:
        """Ask the process to stop; `stop` waits for it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Stop the process, by force if it takes too long. Does nothing if it has ended."""
        self.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        """End the whole process group at once, with no chance to clean up, as a crash would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _ready(self, timeout: float) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=max(timeout, 0.1))
        with contextlib.closing(connection):
            connection.request("GET", "/ready")
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer.get("server") == self.name

    @property
    def _log_hint(self) -> str:
        if self.log is None:
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(["; its log ends with:", *lines[-15:]])


@contextlib.contextmanager
def running_servers(
    ports: Mapping[str, int],
    database: Path,
    *,
    log_dir: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[Server]]:
    """Server processes by name and wished-for port, ready to answer; stopped at the end.

    A port that is taken is replaced by the next free one; 0 means any. Each server logs to a
    file in `log_dir`, or to our own standard error without one.
    """
    with contextlib.ExitStack() as stack:
        listeners = {name: stack.enter_context(_listen(port, name)) for name, port in ports.items()}
        peers = {name: listener.getsockname()[1] for name, listener in listeners.items()}
        shared = {
            "DEMO_DATABASE": str(database),
            "DEMO_PEERS": ",".join(f"{name}=http://{HOST}:{port}" for name, port in peers.items()),
            **(environment or {}),
        }
        servers: list[Server] = []
        stack.callback(_stop_all, servers)
        for name, listener in listeners.items():
            log = log_dir / f"{name}.log" if log_dir else None
            servers.append(_start(name, listener, log, shared))
            listener.close()
        for server in servers:
            server.wait_ready()
        yield servers


@contextlib.contextmanager
def orderly_exit() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit`, so that what was started is also stopped."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _listen(port: int, name: str) -> socket.socket:
    """A listening socket, which the server inherits: nobody can take its port in between."""
    for candidate in range(port, port + 100) if port else [0]:
        with contextlib.suppress(OSError):
            return socket.create_server((HOST, candidate), backlog=128)
    raise ServerFailed(f"no free port for server {name} from {port} on")


def _start(
    name: str, listener: socket.socket, log: Path | None, environment: Mapping[str, str]
) -> Server:
    inherited = {key: value for key, value in os.environ.items() if key != "GUNICORN_CMD_ARGS"}
    command = [sys.executable, "-m", "gunicorn", "--config", "python:project.gunicorn_conf"]
    command += ["--bind", f"fd://{listener.fileno()}", "project.wsgi:application"]
    with contextlib.ExitStack() as stack:
        output: IO[bytes] | None = stack.enter_context(log.open("ab")) if log else None
        process = subprocess.Popen(
            command,
            cwd=BASE_DIR,
            # In a group of its own: Ctrl-C reaches us alone, and we stop it in order.
            start_new_session=True,
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={
                **inherited,
                **environment,
                "DJANGO_SETTINGS_MODULE": "project.settings",
                "DEMO_SERVER_NAME": name,
                "DEMO_LIFELINE": "1",
            },
        )
    return Server(name=name, port=listener.getsockname()[1], process=process, log=log)


@contextlib.contextmanager
def running_workload(
    database: Path, count: int = 2, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Processes that contend for locks, so that there is something to be seen; ended at the end."""
    inherited = {**os.environ, **(environment or {})}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            command = [sys.executable, "manage.py", "workload", "--lifeline"]
            processes.append(
                subprocess.Popen(
                    [*command, "--trouble"] if number == 0 else command,
                    cwd=BASE_DIR,
                    start_new_session=True,
                    stdin=subprocess.PIPE,
                    env={
                        **inherited,
                        "DJANGO_SETTINGS_MODULE": "project.settings",
                        "DEMO_DATABASE": str(database),
                        "DEMO_SERVER_NAME": f"worker-{number + 1}",
                    },
                )
            )
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _stop_all(servers: list[Server]) -> None:
    for server in servers:
        server.terminate()
    for server in servers:
        server.stop()
