"""Who has been released on PostgreSQL: one listening connection per process."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.db.backends.base.base import BaseDatabaseWrapper

from ... import clock, logs
from ..wakeups import Wakeups
from .postgresql import LISTEN_CHANNEL

if TYPE_CHECKING:
    from psycopg import Connection

# Keys hold no control characters, so this prefix tells a test of ours from a key.
HELLO = "\x01"
# How often the wire is tested while somebody sleeps, and how long a test may take. Seconds.
TEST_EVERY = 10.0
TEST_WITHIN = 2.0
# Seconds without a sleeper after which the connection is given up.
IDLE_AFTER = 30.0


class Listener:
    """Wakes the sleepers of this process when a notification names their key.

    `hearing` says whether notifications are known to arrive: a test notification, sent over
    another connection, has come back lately. Through a transaction-pooling proxy it never does,
    and sleepers poll instead.
    """

    def __init__(
        self,
        connect: Callable[[], BaseDatabaseWrapper],
        announce: Callable[[str], None],
        wakeups: Wakeups,
    ) -> None:
        self._connect = connect
        self._announce = announce
        self._wakeups = wakeups
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wrapper: BaseDatabaseWrapper | None = None
        self._closed = threading.Event()
        self.hearing = False

    def start(self) -> None:
        """Begin to listen, in a thread of its own, unless it does already."""
        if self._thread is not None:
            return
        with self._mutex:
            if self._thread is None:
                self._closed = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._closed,), name="distlocks-listener", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Stop listening and close the connection; the next start() begins anew."""
        with self._mutex:
            thread, self._thread = self._thread, None
            self._closed.set()
            self._hang_up()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _hang_up(self) -> None:
        # The thread sits in a read on this socket; closing it under its feet is not safe.
        wrapper = self._wrapper
        if wrapper is not None and wrapper.connection is not None:
            with (
                suppress(Exception),
                socket.socket(fileno=os.dup(wrapper.connection.fileno())) as same,
            ):
                same.shutdown(socket.SHUT_RDWR)

    def _run(self, closed: threading.Event) -> None:
        pause, failing = 0.1, False
        while not closed.is_set():
            wrapper = self._connect()
            self._wrapper = wrapper
            try:
                wrapper.ensure_connection()
                failing = False
                self._listen(wrapper.connection, closed)
                pause = 0.1
            except Exception as error:
                # Told once, until it has heard something again.
                if not closed.is_set() and not failing:
                    failing = True
                    logs.event(
                        logging.WARNING,
                        "polling",
                        "",
                        (),
                        "Waiters poll for now: the listening connection failed: %s",
                        error,
                        database=wrapper.alias,
                        error=str(error),
                    )
            finally:
                self.hearing = False
                # What was announced while nobody listened is lost: let everybody look.
                self._wakeups.wake_all()
                with suppress(Exception):
                    wrapper.close()
            if self._retire(closed):
                return
            closed.wait(pause)
            pause = min(pause * 2, 2.0)

    def _retire(self, closed: threading.Event) -> bool:
        """End the thread if nobody sleeps any more."""
        with self._mutex:
            if self._wakeups and not closed.is_set():
                return False
            if self._closed is closed:
                self._thread = None
                self._wrapper = None
            return True

    def _listen(self, connection: Connection[Any], closed: threading.Event) -> None:
        """Pass on what is heard, until nobody has slept for a while or the wire fails."""
        connection.execute(f"LISTEN {LISTEN_CHANNEL}")
        hello = HELLO + secrets.token_hex(8)
        tested = lease_now = clock.Clock().now()
        heard: float | None = None
        needed = lease_now
        self._announce(hello)
        while not closed.is_set():
            for notification in connection.notifies(timeout=1.0, stop_after=1):
                if notification.payload == hello:
                    heard = clock.Clock().now()
                    self.hearing = True
                elif not notification.payload.startswith(HELLO):
                    self._wakeups.wake(notification.payload)
            lease_now = clock.Clock().now()
            if self._wakeups:
                needed = lease_now
            elif lease_now - needed > IDLE_AFTER:
                return
            if heard is None or heard < tested:
                if self.hearing and lease_now - tested > TEST_WITHIN:
                    raise ConnectionError("a test notification did not come back")
            elif lease_now - tested > TEST_EVERY and self._wakeups:
                tested = lease_now
                self._announce(hello)
