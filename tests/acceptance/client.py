"""Asks a server of the demo project, and reads what it answers and logs."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from project.servers import HOST, Server

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of a server."""

    status: int
    headers: http.client.HTTPMessage
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def retry_after(self) -> int:
        return int(self.headers["Retry-After"])


def ask(
    server: Server,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send one request."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read())


def run(server: Server, job: str, **numbers: float) -> Reply:
    """Ask for a job; what is not given gets the server's default."""
    return ask(server, "POST", f"/run/{job}?{urlencode(numbers)}")


def board(server: Server) -> dict[str, Any]:
    """What the board shows."""
    reply = ask(server, "GET", "/board.json")
    assert reply.status == 200, reply
    shown: dict[str, Any] = reply.json
    return shown


def is_running(server: Server, job: str) -> bool:
    """Whether the board says so."""
    return any(held["job"] == job for held in board(server)["running"])


def last_run(server: Server, job: str) -> dict[str, Any]:
    """The newest run of a job on the board."""
    found: dict[str, Any] = next(run for run in board(server)["runs"] if run["job"] == job)
    return found


def log_lines(server: Server, job: str) -> list[dict[str, Any]]:
    """What a server has logged about a job."""
    assert server.log is not None
    return [line for line in json_lines(server.log) if line.get("job") == job]


def json_lines(log: Path) -> list[dict[str, Any]]:
    """All lines of a log; each has to be JSON."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def wait_for(condition: Callable[[], T | None], timeout: float = 15) -> T:
    """Try until the condition is truthy, and return it."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def is_listening(port: int) -> bool:
    """Whether anybody accepts connections there."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    with contextlib.closing(connection):
        try:
            connection.connect()
        except ConnectionRefusedError:
            return False
        return True
