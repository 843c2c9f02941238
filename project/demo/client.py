"""Asks servers for jobs, many at the same instant."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from project.servers import HOST, Server

# The longest job of the demo and a margin.
ANSWER_SECONDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One request to make: which server shall run which job, with which numbers."""

    server: Server
    job: str
    seconds: float
    interval: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server answered; status 0 when it did not."""

    shot: Shot
    sent_at: datetime
    answered_at: datetime
    status: int
    retry_after: int | None
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """In one word: done, running, cooling_down or another error."""
        return "done" if self.status == 200 else str(self.body.get("error", "no answer"))


class Volley:
    """Requests that are sent at the same instant: all connections are open before the first."""

    def __init__(self, shots: Sequence[Shot]) -> None:
        self._barrier = threading.Barrier(len(shots))
        self._answers: list[Answer] = []
        # Daemons: who interrupts the demo does not wait for answers.
        self._threads = [
            threading.Thread(target=self._fire, args=[shot], daemon=True) for shot in shots
        ]
        for thread in self._threads:
            thread.start()

    def answers(self) -> list[Answer]:
        """Wait for all answers, in the order of their arrival."""
        for thread in self._threads:
            thread.join()
        return sorted(self._answers, key=lambda answer: answer.answered_at)

    def _fire(self, shot: Shot) -> None:
        path = f"/run/{quote(shot.job)}"
        body = urlencode({"seconds": shot.seconds, "interval": shot.interval})
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        status, retry_after, said = 0, None, {}
        sent_at = datetime.now(UTC)
        with contextlib.closing(
            http.client.HTTPConnection(HOST, shot.server.port, timeout=ANSWER_SECONDS)
        ) as connection:
            try:
                connection.connect()
                self._barrier.wait(ANSWER_SECONDS)
                sent_at = datetime.now(UTC)
                connection.request("POST", path, body, headers)
                response = connection.getresponse()
                status, said = response.status, json.loads(response.read())
                if response.headers["Retry-After"]:
                    retry_after = int(response.headers["Retry-After"])
            except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:
                # A connection that failed keeps nobody else waiting at the barrier.
                self._barrier.abort()
                said = {"error": type(error).__name__, "detail": str(error)}
        answer = Answer(
            shot=shot,
            sent_at=sent_at,
            answered_at=datetime.now(UTC),
            status=status,
            retry_after=retry_after,
            body=said,
        )
        self._answers.append(answer)


def fire(shots: Sequence[Shot]) -> list[Answer]:
    """Send all at the same instant, and wait for all answers."""
    return Volley(shots).answers()
