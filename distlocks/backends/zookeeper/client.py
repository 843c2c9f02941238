"""What kazoo's client does otherwise than distlocks needs it."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

from kazoo.client import CLOSED_STATES, KazooClient
from kazoo.exceptions import ConnectionClosedError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import Connect
from kazoo.retry import KazooRetry

# Seconds: longest for one server to take the connection, while others are there to be tried.
CONNECT_WITHIN = 2.0


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """A server that does not answer is not waited for as long as a session may last."""

    def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["timeout"] = min(kwargs.get("timeout") or CONNECT_WITHIN, CONNECT_WITHIN)
        return super().create_connection(*args, **kwargs)


class Connection(ConnectionHandler):  # type: ignore[misc]
    """Tries the next server before long, and remembers how long one lets a session last, which
    kazoo keeps to itself."""

    # Seconds; 0 while nothing is known.
    negotiated = 0.0
    # When the server was last heard of, on the monotonic clock.
    heard_at = 0.0

    def _read_socket(self, read_timeout: float) -> Any:
        answer = super()._read_socket(read_timeout)
        self.heard_at = time.monotonic()
        return answer

    def _invoke(self, timeout: float, request: Any, xid: Any = None) -> Any:
        if isinstance(request, Connect):
            timeout = min(timeout, CONNECT_WITHIN)
        answer = super()._invoke(timeout, request, xid)
        if isinstance(request, Connect):
            self.negotiated = answer[0].time_out / 1000
        return answer


class Client(KazooClient):  # type: ignore[misc]
    """Lets through what interrupts a thread that asks: kazoo would take it for a closed socket."""

    # kazoo's own makes one of its kind first.
    _connection: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(
            handler=Handler(),
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, max_delay=0.5),
            **options,
        )
        first = self._connection
        self._connection = Connection(self, first.retry_sleeper, first.logger, first.sasl_options)

    @property
    def negotiated(self) -> float:
        """Seconds that the server lets the session last; 0 while nothing is known."""
        return float(self._connection.negotiated)

    def drop_if_silent(self, since: float, limit: float) -> None:
        """Have the next server tried if nothing was heard from this one for `limit` seconds, nor
        since a moment on the monotonic clock. kazoo itself waits for as long as anything is sent.
        """
        connection = self._connection
        if time.monotonic() - max(connection.heard_at, since) > limit:
            with suppress(OSError, AttributeError):
                connection._socket.shutdown(socket.SHUT_RDWR)

    def _call(self, request: Any, pending: Any) -> Any:
        if self._state in CLOSED_STATES:
            return super()._call(request, pending)
        self._queue.append((request, pending))
        wake = self._connection._write_sock
        try:
            if wake is None:
                raise OSError("It is closed.")
            wake.send(b"\0")
        except OSError as error:
            pending.set_exception(ConnectionClosedError(str(error)))
        return None
