"""One of the servers: the connections to it, whether it is there, what it has not confirmed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple, TypeVar

from ... import clock
from ...exceptions import BackendUnavailable
from ...threads import JobThreads
from ..offload import submit
from ..redis import RedisBackend
from ..redis.links import Link, TooManyConnections
from ..redis.place import UNREACHABLE
from ..redis.scripts import Script, script
from ..redis.wire import Reply, ReplyError, pack

T = TypeVar("T")

# Seconds for which a server that does not answer is left alone. Somebody looks after it then, while
# nobody waits for it.
ABSENT = 0.5
# So many endings are told a server that is back; those before them end by themselves.
OWED = 10_000
# What is asked of a server all the time: it knows it from the first connection on.
_SCRIPTS = [script(f"redlock_{name}") for name in ("take", "raise", "release", "extend")]
_LOADS = b"".join([pack(b"SCRIPT", b"LOAD", one.text) for one in _SCRIPTS])


class Ending(NamedTuple):
    """The call of a script that ends something, and the moment on the lease clock at which that
    has ended by itself."""

    which: Script
    words: Sequence[bytes]
    until: float


def real_now() -> float:
    """The lease clock, also while a test has another in force: servers are real."""
    return clock.Clock().now()


class Node:
    """One of the servers. Its methods may be called from any thread."""

    def __init__(self, half: RedisBackend) -> None:
        self.half = half
        self.servers = half.servers
        self.hash_name = half.servers.hashes[0]
        self.address = half.place.address(b"")
        self.timeout = half.place.timeout
        # One: what is slow of this server keeps nobody from the others.
        self.thread = JobThreads(f"distlocks-redlock-{half.place}")
        self._mutex = threading.Lock()
        # Nobody is to wait for it: it has not answered.
        self.is_absent = False
        self._retry_at = 0.0
        self._is_looked_after = False
        # Microseconds by which its clock is ahead of the lease clock; None if it never answered.
        self.ahead_us: float | None = None
        # When it was last asked for anything, on the lease clock.
        self.asked_at = 0.0
        # What it has not confirmed: see owe(). By connection, while that may still come; of those
        # that have broken, in the order in which they did.
        self._unconfirmed: dict[Link, list[Ending]] = {}
        self._owed: deque[Ending] = deque(maxlen=OWED)
        # Connections on which something was refused that nobody waited for.
        self._refused: set[Link] = set()

    def __str__(self) -> str:
        return str(self.half.place)

    # Connections

    def idle(self) -> Link | None:
        """A connection that is at hand, if the server has not been silent on it for too long."""
        try:
            link = self.servers.links.idle(self.address, blocking=False).pop()
        except IndexError:
            return None
        try:
            if link.owed:
                self.passed_over(link, link.collect())
            if link.owed and time.monotonic() - link.since > self.timeout:
                raise TimeoutError
            if link in self._refused:
                self._refused.discard(link)
                self._break(link)
                self._greet(link)
        except BaseException as error:
            self.drop(link)
            if isinstance(error, TimeoutError):
                self.lost()
            if not isinstance(error, (*UNREACHABLE, ReplyError)):
                raise
            return None
        return link

    def open_aside(self) -> Future[Link]:
        """A new connection, opened in another thread; ConnectionError while it is absent."""

        def unless_absent() -> Link:
            if self.is_absent:
                raise ConnectionError("does not answer")
            return self.open()

        return submit(unless_absent, self.thread)

    def open(self) -> Link:
        """A new connection."""
        link = None
        try:
            link = self.servers.links.open(self.address, blocking=False)
            self._greet(link)
        except BaseException as error:
            if link is not None:
                self.drop(link)
            # That there may be no more connections says nothing about the server.
            if not isinstance(error, TooManyConnections):
                self.lost()
            raise
        self.is_absent = False
        return link

    def keep(self, opening: Future[Link]) -> None:
        """Put a connection at hand that is opened for nobody any more."""
        opening.add_done_callback(self._keep)

    def _keep(self, opened: Future[Link]) -> None:
        if opened.exception() is None:
            self.give(opened.result())

    def give(self, link: Link) -> None:
        """Put it at hand for the next."""
        self.servers.links.give(link, blocking=False)

    def drop(self, link: Link) -> None:
        """It is broken, or nobody knows what its next reply will be to."""
        self._break(link)
        self._refused.discard(link)
        self.servers.links.drop(link)

    def lost(self) -> None:
        """It does not answer: nobody waits for it until it does again."""
        with self._mutex:
            self.is_absent = True
            self._retry_at = real_now() + ABSENT
        idle = self.servers.links.idle(self.address, blocking=False)
        while idle:
            with suppress(IndexError):
                self.drop(idle.pop())

    def look_after(self) -> None:
        """See in another thread whether it is there again, if it is time for that."""
        with self._mutex:
            if self._is_looked_after or real_now() < self._retry_at:
                return
            self._is_looked_after = True
        self.thread.put(self._return)

    def _return(self) -> None:
        try:
            with suppress(*UNREACHABLE, BackendUnavailable, ReplyError):
                self.give(self.open())
        finally:
            self._is_looked_after = False

    # What it has not confirmed

    def owe(self, link: Link | None, ending: Ending) -> None:
        """It has been told over this connection, or could not be told, that something has ended,
        and has not confirmed it. If the connection breaks, it is told again over the next."""
        with self._mutex:
            if link is None:
                self._owed.append(ending)
            else:
                self._unconfirmed.setdefault(link, []).append(ending)

    def passed_over(self, link: Link, replies: Sequence[Reply]) -> None:
        """These have come over the connection, and nobody waits for them."""
        if any(isinstance(reply, ReplyError) for reply in replies):
            # It may have forgotten the scripts.
            self._refused.add(link)
        elif not link.owed and link not in self._refused:
            with self._mutex:
                self._unconfirmed.pop(link, None)

    def _break(self, link: Link) -> None:
        """What was not confirmed over it is to be said again."""
        with self._mutex:
            self._owed.extend(self._unconfirmed.pop(link, ()))

    def _greet(self, link: Link) -> None:
        """Say first what it has to know, and what it has not confirmed elsewhere."""
        link.post(_LOADS, replies=len(_SCRIPTS))
        with self._mutex:
            for other in list(self._unconfirmed):
                # Closed by whoever looks after the connections.
                if other.fileno() < 0:
                    self._owed.extend(self._unconfirmed.pop(other))
            owed = list(self._owed)
            self._owed.clear()
        try:
            while owed:
                ending = owed[0]
                # Past that, it has ended by itself.
                if ending.until > real_now():
                    link.post(self.servers.request(ending.which, self.hash_name, ending.words))
                    self.owe(link, ending)
                del owed[0]
        finally:
            with self._mutex:
                self._owed.extend(owed)

    # Its clock

    def heard(self, time_us: int) -> None:
        """It has said what time it is."""
        self.ahead_us = time_us - real_now() * 1e6


def of_each(
    nodes: Sequence[Node], verb: Callable[[Node], T]
) -> tuple[dict[Node, T], dict[Node, BackendUnavailable]]:
    """What the verb returns for each node, each in its thread; or how it has failed."""
    futures = {node: submit(lambda node=node: verb(node), node.thread) for node in nodes}  # type: ignore[misc]
    found: dict[Node, T] = {}
    failed: dict[Node, BackendUnavailable] = {}
    for node, future in futures.items():
        try:
            found[node] = future.result()
        except BackendUnavailable as error:
            failed[node] = error
    return found, failed
