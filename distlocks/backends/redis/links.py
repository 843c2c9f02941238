"""Connections to the servers, kept open between requests, for threads and for event loops."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

from ...exceptions import BackendUnavailable
from .place import Address, Place
from .wire import Incomplete, Reply, ReplyError, pack, unpack

READ_SIZE = 65536


class Link:
    """One connection. Speaks from one thread, or one task, at a time."""

    __slots__ = (
        "_connection",
        "_data",
        "_socket",
        "_timeout",
        "address",
        "generation",
        "owed",
        "since",
    )

    def __init__(self, connection: Any, address: Address, timeout: float) -> None:
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._timeout = timeout
        self.block(True)
        self.address = address
        self.generation = 0
        # How many replies to what was posted have not come yet.
        self.owed = 0
        # Since when one of them is waited for, on the monotonic clock.
        self.since = 0.0
        self._data = bytearray()

    def block(self, blocking: bool) -> None:
        """Whether it is for ask(), or for aask()."""
        self._socket.settimeout(self._timeout if blocking else 0)

    def check_identity(self) -> None:
        """Raise BackendUnavailable if the server does not tell which it is."""
        info = self.ask(pack(b"INFO", b"replication"))
        if isinstance(info, ReplyError) or b"master_replid:" not in info:
            why = f"refuses INFO ({info})" if isinstance(info, ReplyError) else "has no replid"
            raise BackendUnavailable(
                f"The Redis server {why}: by its INFO replication, master_replid, a restart or "
                f"failover is noticed before a lock is granted twice. Permit it (ACL: +info), or "
                f"do without the guard: 'incarnation_guard': 'off'."
            )

    def ask(self, request: bytes, patience: float | None = None) -> Reply:
        """The reply to a request, within `patience` seconds more than usual."""
        sock = self._socket
        if patience is not None:
            sock.settimeout(self._timeout + patience)
        sock.sendall(request)
        data = sock.recv(READ_SIZE)
        # A short status is what nearly always comes.
        if data[:1] == b"+" and data[-2:] == b"\r\n":
            return data[1:-2]
        reply = self._read(data)
        if patience is not None:
            sock.settimeout(self._timeout)
        return reply

    def _read(self, data: bytes) -> Reply:
        while True:
            if not data:
                raise ConnectionResetError("the server has closed the connection")
            try:
                return unpack(data)[0]
            except Incomplete:
                data += self._more()

    def _more(self) -> bytes:
        data = self._socket.recv(READ_SIZE)
        if not data:
            raise ConnectionResetError("the server has closed the connection")
        return data

    async def aask(self, request: bytes, patience: float = 0) -> Reply:
        """See ask(): on an event loop, over a link that does not block."""
        async with asyncio.timeout(self._timeout + patience):
            view = memoryview(request)
            while view:
                try:
                    view = view[self._socket.send(view) :]
                except (BlockingIOError, ssl.SSLWantWriteError):
                    await self._ready(writing=True)
                except ssl.SSLWantReadError:
                    await self._ready()
            data = b""
            while True:
                try:
                    more = self._socket.recv(READ_SIZE)
                except (BlockingIOError, ssl.SSLWantReadError):
                    await self._ready()
                    continue
                except ssl.SSLWantWriteError:
                    await self._ready(writing=True)
                    continue
                if not more:
                    raise ConnectionResetError("the server has closed the connection")
                data += more
                with suppress(Incomplete):
                    return unpack(data)[0]

    def fileno(self) -> int:
        """For select() and poll()."""
        return self._socket.fileno()

    def post(self, request: bytes, replies: int = 1) -> None:
        """Send what so many replies will come to, and wait for none; for a link that does not
        block. TimeoutError if the server does not take it."""
        if not self.owed:
            self.since = time.monotonic()
        self.owed += replies
        view = memoryview(request)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._await_room()
            except ssl.SSLWantReadError:
                self._data += self._more()

    def _await_room(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(self._timeout * 1000):
            raise TimeoutError(f"takes nothing more for {self._timeout:g} s")

    def collect(self) -> list[Reply]:
        """The replies to what was posted that have come meanwhile, in order."""
        replies: list[Reply] = []
        try:
            while not replies:
                self._data += self._more()
                while self._data:
                    reply, end = unpack(self._data)
                    del self._data[:end]
                    replies.append(reply)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, Incomplete):
            pass
        if replies:
            self.owed -= len(replies)
            self.since = time.monotonic()
        return replies

    async def _ready(self, *, writing: bool = False) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        add, remove = (
            (loop.add_writer, loop.remove_writer)
            if writing
            else (loop.add_reader, loop.remove_reader)
        )
        add(self._socket.fileno(), partial(_resolve, future))
        try:
            await future
        finally:
            remove(self._socket.fileno())

    def close(self) -> None:
        with suppress(Exception):
            self._socket.settimeout(self._timeout)
            self._connection.disconnect()


class TooManyConnections(BackendUnavailable):
    """All connections of this process are in use."""

    in_doubt = False


class Links:
    """The open connections of one backend in this process: some in use, the others at hand."""

    def __init__(self, place: Place, *, guarded: bool, limit: int, alias: str) -> None:
        self._place = place
        self._guarded = guarded
        self.limit = limit
        self._alias = alias
        # By blocking or not, and by address.
        self._idle: dict[bool, dict[Address, deque[Link]]] = {True: {}, False: {}}
        self._freed = threading.Condition()
        self._open = 0
        self._generation = 0

    def idle(self, address: Address, *, blocking: bool = True) -> deque[Link]:
        """Those at hand: pop one, and give it back."""
        links = self._idle[blocking].get(address)
        if links is None:
            links = self._idle[blocking].setdefault(address, deque())
        return links

    def take(self, address: Address, *, blocking: bool = True) -> Link:
        """One at hand, or a new one; BackendUnavailable if there may be no more."""
        try:
            return self.idle(address, blocking=blocking).pop()
        except IndexError:
            return self.open(address, blocking=blocking)

    def open(self, address: Address, *, blocking: bool = True) -> Link:
        """A new one, or one that is given back meanwhile."""
        give_up = time.monotonic() + self._place.timeout
        with self._freed:
            while self._open >= self.limit:
                idle = self.idle(address, blocking=blocking)
                if idle:
                    return idle.pop()
                if self._close_an_idle_one():
                    continue
                if not self._freed.wait(give_up - time.monotonic()):
                    raise TooManyConnections(
                        f"All {self.limit} connections of the lock backend {self._alias!r} are in "
                        f"use: raise 'max_connections' in its OPTIONS."
                    )
            self._open += 1
            generation = self._generation
        try:
            link = self._connect(address, blocking)
        except BaseException:
            self._forget_one()
            raise
        link.generation = generation
        return link

    def _connect(self, address: Address, blocking: bool) -> Link:
        connection = self._place.connect(address)
        link = Link(connection, address, self._place.timeout)
        try:
            if self._guarded:
                link.check_identity()
        except BaseException as error:
            link.close()
            if isinstance(error, BackendUnavailable):
                _not_done(error)
            raise
        link.block(blocking)
        return link

    def _close_an_idle_one(self) -> bool:
        for by_address in self._idle.values():
            for links in by_address.values():
                with suppress(IndexError):
                    links.popleft().close()
                    self._open -= 1
                    return True
        return False

    def give(self, link: Link, *, blocking: bool = True) -> None:
        """Put it at hand for the next."""
        if link.generation != self._generation:
            link.close()
            return
        self.idle(link.address, blocking=blocking).append(link)
        if self._open >= self.limit:
            with self._freed:
                self._freed.notify()

    def drop(self, link: Link) -> None:
        """It is broken, or its next reply would be that of an older request."""
        link.close()
        if link.generation == self._generation:
            self._forget_one()

    def drop_idle(self, address: Address) -> None:
        """The server there has gone, or is no longer the right one."""
        for by_address in self._idle.values():
            links = by_address.get(address, ())
            while links:
                with suppress(IndexError):
                    self.drop(links.pop())

    def _forget_one(self) -> None:
        with self._freed:
            self._open -= 1
            self._freed.notify()

    def close(self) -> None:
        """Close them all; those in use, when they are given back."""
        with self._freed:
            idle, self._idle = self._idle, {True: {}, False: {}}
            self._generation += 1
            self._open = 0
        for by_address in idle.values():
            for links in by_address.values():
                for link in links:
                    link.close()


def _not_done(error: BackendUnavailable) -> BackendUnavailable:
    error.in_doubt = False
    return error


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
