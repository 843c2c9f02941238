"""Whose turn it is for a key that another store grants: its queue and wake-ups, through Redis.

The other store alone decides who has a key. If Redis is lost, nothing is but speed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ... import clock, logs
from ...claims import Denial, Request, to_us
from ...exceptions import BackendUnavailable
from ..offload import offload
from .records import who
from .scripts import script
from .server import Servers
from .wire import packed

if TYPE_CHECKING:
    from .backend import RedisBackend

# Redis gets so many seconds to answer: a release must not wait for it.
PATIENCE = 0.25
# Seconds for which it is left alone after it did not answer.
LEFT_ALONE = 1.0
# Those next in a queue look at the store after so many seconds, in case a call was lost, and call
# whoever is first; those further back look after the others.
LOOK_NEXT, LOOK = 0.8, 5.0
# Who has released a key, if that is not known.
SOMEBODY = "!"


class Turns:
    """The queues of one store's keys."""

    def __init__(self, redis: RedisBackend) -> None:
        place = redis.settings.place()
        place.settings["socket_timeout"] = PATIENCE
        place.settings["socket_connect_timeout"] = PATIENCE
        self._servers = Servers(
            place,
            namespace=f"{redis.settings.namespace}.turns",
            # What is lost with the server costs only time.
            guarded=False,
            quarantine_us=0,
            max_connections=redis.servers.links.limit,
            min_replicas=0,
            alias=redis.alias,
            slice=2 * PATIENCE,
        )
        self._alias = redis.alias
        self._alone_until = 0.0
        # Who has been denied and waits, by owner id, and beside which key.
        self._waiting: dict[str, tuple[Request, str]] = {}

    @property
    def usable(self) -> bool:
        """Whether Redis has answered lately, or may do so again."""
        return clock.Clock().now() >= self._alone_until

    def denied(self, request: Request, key: str) -> None:
        """The request is going to wait beside this key."""
        self._waiting[request.owner_id] = (request, key)

    def call(self, key: str, *, leaving: str = "", released_by: str | None = "") -> None:
        """Whoever waits first for the key should try; who leaves the queue no more.

        Not if another has been called and has not tried yet: unless it is the one that has now
        released the key, or nobody knows who has (None). Empty: nobody has, it was seen to be free.
        """
        if self.usable:
            name = self._servers.hash_name(key)
            by = SOMEBODY if released_by is None else released_by
            words = packed((key.encode(), leaving.encode(), by.encode()))
            try:
                self._servers.run(name, script("turns_call"), 3, words)
            except BackendUnavailable as error:
                self._give_up(error)

    def done(self, request: Request, *, granted: bool) -> None:
        """The request does not wait any more."""
        waiting = self._waiting.pop(request.owner_id, None)
        if waiting is None:
            return
        key = waiting[1]
        mailbox = self._servers.mailbox(self._servers.hash_name(key))
        called = mailbox.forget(request.owner_id)
        if not (granted and called):
            self.call(key, leaving=request.owner_id)

    def wait(self, denial: Denial, until: float, is_denied: Callable[[], bool]) -> bool:
        """Block until it is the asker's turn, or the lease clock shows `until`; False if Redis is
        lost.

        `is_denied` looks at the store, with the asker in its place: a release may have come
        before it, or its call may have been lost.
        """
        waiting = self._waiting.get(denial.queued)
        name = self._servers.hash_name(denial.key)
        mailbox = self._servers.mailbox(name)
        mailbox.forget(denial.queued)
        while waiting is not None and self.usable:
            try:
                words = self._joining(waiting[0], denial.key, mailbox.name)
                place = self._servers.run(name, script("turns_join"), 5, words)
            except BackendUnavailable as error:
                self._give_up(error)
                break
            if not is_denied():
                self.call(denial.key)
            if not mailbox.wait(denial.queued, self._look_at(place, until)):
                self._give_up()
            elif mailbox.has_called(denial.queued) or clock.lease_now() >= until:
                return True
        return False

    async def await_(self, denial: Denial, until: float, is_denied: Callable[[], bool]) -> bool:
        """See wait()."""
        waiting = self._waiting.get(denial.queued)
        name = self._servers.hash_name(denial.key)
        mailbox = self._servers.loop_mailbox(name)
        mailbox.forget(denial.queued)
        while waiting is not None and self.usable:
            try:
                words = self._joining(waiting[0], denial.key, mailbox.name)
                place = await self._servers.arun(name, script("turns_join"), 5, words)
            except BackendUnavailable as error:
                self._give_up(error)
                break
            if not await offload(is_denied):
                await offload(lambda: self.call(denial.key))
            if not await mailbox.wait(denial.queued, self._look_at(place, until)):
                self._give_up()
            elif mailbox.has_called(denial.queued) or clock.lease_now() >= until:
                return True
        return False

    @staticmethod
    def _joining(request: Request, key: str, mailbox: bytes) -> bytes:
        waited = b"%d" % max(to_us(clock.lease_now() - request.asked_at), 0)
        return packed((mailbox, request.owner_id.encode(), waited, key.encode(), who(request)))

    @staticmethod
    def _look_at(place: int, until: float) -> float:
        return min(until, clock.lease_now() + (LOOK_NEXT if place < 2 else LOOK))

    def _give_up(self, error: BackendUnavailable | None = None) -> None:
        if error is not None and self.usable:
            logs.event(
                logging.WARNING,
                "polling",
                self._alias,
                (),
                "Waiters look for themselves for now: %s",
                error,
                error=str(error),
            )
        self._alone_until = clock.Clock().now() + LEFT_ALONE

    def close(self) -> None:
        self._servers.close()
