"""How those who wait in a queue of Redis learn that it is their turn.

Whoever has its turn is named in a list, one per process (and event loop) and bucket, that one
connection is blocked on. Of the threads that wait, one reads for all: the one that mostly waits
alone learns of its turn without a thread switch, and a thousand need no more than one connection.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from redis import RedisError

from ... import clock
from ...exceptions import BackendUnavailable
from ..offload import offload
from ..wakeups import Wakeups
from .links import Link, Links
from .place import Address
from .wire import ReplyError, pack

# Seconds for which one request waits at the server.
SLICE = 2.5
# So many are remembered who were called before they had begun to wait.
REMEMBERED = 10_000
_numbers = itertools.count(1)

Where = Callable[[], Address]


class Mailbox:
    """What has come for those of this process who wait beside the keys of one bucket."""

    def __init__(self, name: bytes, owner: bytes, links: Links, where: Where, slice: float) -> None:
        # Scripts know it by this; the list is named after the bucket's hash too.
        self.name = owner + b"-%x" % next(_numbers)
        self._list = name + b":m:" + self.name
        self._links = links
        self._where = where
        self._slice = slice
        self.wakeups = Wakeups()
        # How often the server has not answered.
        self._failures = 0
        # Owner ids whose turn it is, until they try again.
        self._called: dict[str, None] = {}

    def forget(self, owner_id: str) -> bool:
        """It tries again: what it was called for is used up; whether it had been called."""
        if not self._called:
            return False
        return self._called.pop(owner_id, self) is None

    def has_called(self, owner_id: str) -> bool:
        """Whether it is this owner's turn."""
        return owner_id in self._called

    def _take_in(self, reply: Any) -> None:
        if isinstance(reply, ReplyError):
            raise reply
        if reply is not None:
            owner_id = reply[1].decode()
            self._called[owner_id] = None
            if len(self._called) > REMEMBERED:
                with suppress(StopIteration, KeyError, RuntimeError):
                    del self._called[next(iter(self._called))]
            self.wakeups.wake(owner_id)

    def let_all_look(self) -> None:
        """Let everybody look for themselves."""
        self._failures += 1
        self.wakeups.wake_all()

    def _request(self, until: float) -> tuple[bytes, float]:
        patience = max(min(until - clock.lease_now(), self._slice), 0.001)
        return pack(b"BLPOP", self._list, b"%.3f" % patience), patience


class ThreadsMailbox(Mailbox):
    """For threads: whoever waits and finds nobody reading reads, for all of them."""

    def __init__(self, name: bytes, owner: bytes, links: Links, where: Where, slice: float) -> None:
        super().__init__(name, owner, links, where, slice)
        self._reading = threading.Lock()

    def wait(self, owner_id: str, until: float) -> bool:
        """Block until it is this owner's turn, or the lease clock shows `until`; False as soon as
        the server does not answer."""
        failures = self._failures
        try:
            while clock.lease_now() < until and failures == self._failures:
                with self.wakeups.ticket(owner_id) as ticket:
                    if self.has_called(owner_id):
                        return True
                    if not (clock.current().is_real and self._reading.acquire(blocking=False)):
                        ticket.wait(until)
                        continue
                    try:
                        self._read(owner_id, until, failures)
                    finally:
                        self._reading.release()
            return failures == self._failures
        finally:
            # It has read for all, or has been woken to do so. The next can be seen to sleep, or
            # sees that nobody reads.
            if self.wakeups and not self._reading.locked():
                self.wakeups.wake_first()

    def _read(self, owner_id: str, until: float, failures: int) -> None:
        """Read what comes until it is for this owner, or everybody is to look for themselves."""
        link: Link | None = None
        try:
            link = self._links.take(self._where())
            while (
                not self.has_called(owner_id)
                and clock.lease_now() < until
                and failures == self._failures
            ):
                request, patience = self._request(until)
                self._take_in(link.ask(request, patience))
            self._links.give(link)
            link = None
        except (OSError, RedisError, ReplyError, BackendUnavailable):
            self.let_all_look()
        finally:
            if link is not None:
                self._links.drop(link)


class LoopMailbox(Mailbox):
    """For the tasks of one event loop: a task of its own reads while any of them waits."""

    def __init__(self, name: bytes, owner: bytes, links: Links, where: Where, slice: float) -> None:
        super().__init__(name, owner, links, where, slice)
        self._task: asyncio.Task[None] | None = None

    async def wait(self, owner_id: str, until: float) -> bool:
        """See ThreadsMailbox.wait()."""
        failures = self._failures
        with self.wakeups.ticket(owner_id) as ticket:
            if self.has_called(owner_id):
                return True
            if clock.current().is_real and (self._task is None or self._task.done()):
                self._task = asyncio.get_running_loop().create_task(
                    self._read(), name="distlocks-mailbox"
                )
            await ticket.wait_async(until)
        return failures == self._failures

    async def _read(self) -> None:
        while self.wakeups:
            link: Link | None = None
            try:
                link = await self._link()
                while self.wakeups:
                    request, patience = self._request(float("inf"))
                    self._take_in(await link.aask(request, patience))
                self._links.give(link, blocking=False)
                link = None
            except (OSError, RedisError, ReplyError, BackendUnavailable):
                self.let_all_look()
            finally:
                if link is not None:
                    self._links.drop(link)

    async def _link(self) -> Link:
        return await offload(
            lambda: self._links.take(self._where(), blocking=False),
            undo=lambda link: self._links.give(link, blocking=False),
        )


class Mailboxes:
    """The mailboxes of one backend in this process."""

    def __init__(self, owner: bytes, links: Links, slice: float) -> None:
        self._owner = owner
        self._slice = slice
        self._links = links
        self._of_threads: dict[bytes, ThreadsMailbox] = {}
        self._of_loops: WeakKeyDictionary[Any, dict[bytes, LoopMailbox]] = WeakKeyDictionary()

    def wake_all(self) -> None:
        """Let everybody who waits look for themselves."""
        boxes: list[Mailbox] = list(self._of_threads.values())
        for of_loop in list(self._of_loops.values()):
            boxes += of_loop.values()
        for box in boxes:
            box.let_all_look()

    def of_threads(self, hash_name: bytes, where: Where) -> ThreadsMailbox:
        """Of all threads, beside this bucket."""
        found = self._of_threads.get(hash_name)
        if found is None:
            found = self._of_threads.setdefault(
                hash_name, ThreadsMailbox(hash_name, self._owner, self._links, where, self._slice)
            )
        return found

    def of_loop(self, hash_name: bytes, where: Where) -> LoopMailbox:
        """Of the running event loop, beside this bucket."""
        boxes = self._of_loops.setdefault(asyncio.get_running_loop(), {})
        found = boxes.get(hash_name)
        if found is None:
            found = boxes[hash_name] = LoopMailbox(
                hash_name, self._owner, self._links, where, self._slice
            )
        return found
