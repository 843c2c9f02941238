"""A TCP proxy on loopback that delays, holds back or cuts what passes through it."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Literal, Self, get_args

from tests.servers.base import LOOPBACK, free_port

Mode = Literal["pass", "delay", "blackhole", "reset"]


class FaultProxy:
    """Stands between a client and a server: `with FaultProxy(host, port) as proxy: proxy.port`.

    `proxy.mode` says what happens from now on:

    - "pass": everything goes through.
    - "delay": every piece arrives at least `proxy.delay` seconds later.
    - "blackhole": connections are accepted and nothing goes through, nor does a close. As in a
      network that heals, what was held back arrives when the mode changes.
    - "reset": open and new connections are cut with a TCP reset.

    `proxy.requests` and `proxy.answers` set one direction only: with `answers = "blackhole"` the
    server does what it was asked and the client never hears of it. Reset takes both.
    """

    def __init__(self, target_host: str, target_port: int, delay: float = 0.1) -> None:
        self.target = (target_host, target_port)
        self.host = LOOPBACK
        self.port = 0
        self.delay = delay
        self._modes: dict[str, Mode] = {"requests": "pass", "answers": "pass"}
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def mode(self) -> Mode:
        """What happens to requests; to answers too, unless they were set apart."""
        return self._modes["requests"]

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._set(mode, "requests", "answers")

    @property
    def requests(self) -> Mode:
        return self._modes["requests"]

    @requests.setter
    def requests(self, mode: Mode) -> None:
        self._set(mode, "requests")

    @property
    def answers(self) -> Mode:
        return self._modes["answers"]

    @answers.setter
    def answers(self, mode: Mode) -> None:
        self._set(mode, "answers")

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        return len(self._tasks)

    def cut(self) -> None:
        """Reset the connections that are open; new ones may come."""
        self._call(self._cut())

    # Below, all but `_set` and `_call` runs in the proxy's own event loop.

    def _set(self, mode: Mode, *directions: str) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"no such mode: {mode!r}")
        self._call(self._change(mode, directions))

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self) -> None:
        self._changed = asyncio.Event()
        while True:
            self.port = free_port()
            with contextlib.suppress(OSError):  # somebody was faster
                self._server = await asyncio.start_server(self._serve, self.host, self.port)
                return

    async def _change(self, mode: Mode, directions: tuple[str, ...]) -> None:
        for direction in directions:
            self._modes[direction] = mode
        self._changed.set()
        self._changed = asyncio.Event()
        if mode == "reset":
            await self._cut()

    async def _cut(self) -> None:
        for writer in list(self._open):
            _reset(writer)
        await self._finish()

    async def _close(self) -> None:
        # One that was accepted just now is not among those that are served yet, and would never be
        # closed if the server were before.
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        while len(asyncio.all_tasks()) > 1:
            await self._cut()
            await asyncio.sleep(0)
        self._server.close()
        # Transports close in the round after they have been told to.
        await asyncio.sleep(0)

    async def _finish(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        upstream = None
        try:
            if "reset" in self._modes.values():
                return _reset(writer)
            # Nobody can be reached through a black hole.
            await self._while_held("requests")
            answers, upstream = await asyncio.open_connection(*self.target)
            self._open.add(upstream)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump("requests", reader, upstream))
                pumps.create_task(self._pump("answers", answers, writer))
        except* (OSError, asyncio.CancelledError):
            # One side is gone: let the other see it, as it would without a proxy.
            for side in filter(None, (writer, upstream)):
                _reset(side)
        finally:
            for side in filter(None, (writer, upstream)):
                side.close()
                self._open.discard(side)
            self._tasks.discard(task)

    async def _pump(
        self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            piece = await reader.read(65536)
            if self._modes[direction] == "delay":
                await asyncio.sleep(self.delay)
            await self._while_held(direction)
            if not piece:
                writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()

    async def _while_held(self, direction: str) -> None:
        while self._modes[direction] == "blackhole":
            await self._changed.wait()


def _reset(writer: asyncio.StreamWriter) -> None:
    endpoint = writer.get_extra_info("socket")
    if endpoint is not None and endpoint.fileno() != -1:
        # Lingering for zero seconds makes the close a reset.
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
