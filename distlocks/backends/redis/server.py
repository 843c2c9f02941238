"""How a script gets run on the right server, from a thread or on an event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

from ...exceptions import BackendUnavailable
from ..offload import offload
from .links import Link, Links
from .mail import SLICE, LoopMailbox, Mailboxes, ThreadsMailbox
from .persistence import FAILOVER_PATIENCE, Ask, Open, Persistence, Steps, Walk
from .place import UNREACHABLE, Address, Place
from .scripts import Script
from .wire import Reply, ReplyError, pack, packed

# Scripts whose work must not be lost with the server, if min_replicas is set; and by which is found
# out whether that can be.
REPLICATED = ("acquire", "extend", "mark")


class Servers:
    """The servers of one backend."""

    def __init__(
        self,
        place: Place,
        *,
        namespace: str,
        guarded: bool,
        quarantine_us: int,
        max_connections: int,
        min_replicas: int,
        alias: str,
        slice: float = SLICE,
    ) -> None:
        self.place = place
        self.alias = alias
        self.links = Links(place, guarded=guarded, limit=max_connections, alias=alias)
        self._persistence = Persistence(place, self.links, alias)
        self.min_replicas = min_replicas
        self._quarantine_us = b"%d" % quarantine_us
        self.speak(b"" if guarded else b"-")
        if place.buckets == 1:
            self.hashes = [b"{%b}" % namespace.encode()]
        else:
            self.hashes = [b"{%b.%d}" % (namespace.encode(), n) for n in range(place.buckets)]
        self._mailboxes = Mailboxes(secrets.token_hex(6).encode(), self.links, slice)

    # Where

    def hash_name(self, key: str) -> bytes:
        """The hash in which the key of this name is."""
        return self.hashes[self.place.bucket(key)]

    def mailbox(self, hash_name: bytes) -> ThreadsMailbox:
        """Of this process' threads, beside this hash."""
        return self._mailboxes.of_threads(hash_name, lambda: self.address(hash_name))

    def loop_mailbox(self, hash_name: bytes) -> LoopMailbox:
        """Of the running event loop's tasks, beside this hash."""
        return self._mailboxes.of_loop(hash_name, lambda: self.address(hash_name))

    def address(self, hash_name: bytes) -> Address:
        """The server of this hash."""
        try:
            return self.place.address(hash_name)
        except UNREACHABLE as error:
            raise self._persistence.unreachable(error) from error

    # Scripts

    def speak(self, first: bytes) -> None:
        """Tell every script this from now on: see common.lua."""
        # Changed together: threads that are calling scripts go on with what they have.
        heads: dict[tuple[bytes, bytes, int], bytes] = {}
        self._words = (first, self._quarantine_us), heads

    def run(self, hash_name: bytes, which: Script, words: int, tail: bytes) -> Reply:
        """The reply of a script: `tail` are its arguments after those that all have, packed."""
        if self.min_replicas and which.name in REPLICATED:
            return self._drive(self._again(hash_name, which, words, tail))
        link = None
        try:
            address = self.place.address(hash_name)
            link = self.links.take(address)
            reply = link.ask(self._head(which, hash_name, words) + tail)
        except BaseException as error:
            if link is not None:
                self.links.drop(link)
            if not isinstance(error, UNREACHABLE):
                raise
            return self._drive(self._again(hash_name, which, words, tail, error, link is not None))
        self.links.give(link)
        if type(reply) is ReplyError:
            return self._drive(self._again(hash_name, which, words, tail, reply, True))
        return reply

    def request(self, which: Script, hash_name: bytes, words: Sequence[bytes]) -> bytes:
        """A call of the script, for those who have a connection."""
        return self._head(which, hash_name, len(words)) + packed(words)

    def _head(self, which: Script, hash_name: bytes, words: int) -> bytes:
        """How a call of the script begins; `words` are to follow."""
        common, heads = self._words
        key = (which.sha, hash_name, words)
        head = heads.get(key)
        if head is None:
            first = (b"EVALSHA", which.sha, b"1", hash_name, *common)
            head = b"*%d\r\n%b" % (words + len(first), packed(first))
            heads[key] = head
        return head

    def run_once(self, hash_name: bytes, which: Script, words: int, tail: bytes) -> Reply:
        """See run(): for a script that must not be carried out twice."""
        return self._drive(self._again(hash_name, which, words, tail, once=True))

    async def arun(self, hash_name: bytes, which: Script, words: int, tail: bytes) -> Reply:
        """See run()."""
        return await self._adrive(self._again(hash_name, which, words, tail))

    def ask(self, hash_name: bytes, request: bytes, *, or_refusal: bool = False) -> Reply:
        """The reply to a plain command; its refusal too, if that is wanted."""
        try:
            return self._drive(self._persistence.ask(hash_name, request))
        except BackendUnavailable as error:
            if or_refusal and isinstance(error.__cause__, ReplyError):
                return error.__cause__
            raise

    def _again(
        self,
        hash_name: bytes,
        which: Script,
        words: int,
        tail: bytes,
        failure: Exception | None = None,
        was_sent: bool = False,
        *,
        once: bool = False,
    ) -> Steps:
        request = self._head(which, hash_name, words) + tail
        text = pack(b"SCRIPT", b"LOAD", which.text)
        then = self._replicated if self.min_replicas and which.name in REPLICATED else None
        # Leases on the other servers of a Cluster are to be extended too: their renewer comes back.
        hurry = which.name == "extend" and len(self.hashes) > 1
        return (
            yield from self._persistence.ask(
                hash_name,
                request,
                failure,
                was_sent,
                text=text,
                then=then,
                patience=0.0 if hurry else FAILOVER_PATIENCE,
                once=once,
            )
        )

    def _replicated(self, link: Link, reply: Reply) -> Steps:
        """Wait until enough replicas have what was written; BackendUnavailable if they do not."""
        if isinstance(reply, list) and reply[0] == b"D":
            return None
        patience = self.place.timeout / 2
        wait = pack(b"WAIT", b"%d" % self.min_replicas, b"%d" % (patience * 1000))
        count = yield Ask(link, wait, patience)
        if isinstance(count, ReplyError) or count < self.min_replicas:
            raise BackendUnavailable(
                f"Redis at {self.place} (lock backend {self.alias!r}): {count} of "
                f"{self.min_replicas} replicas ('min_replicas') have acknowledged the lock within "
                f"{patience:g} s. It is given back."
            )
        return None

    # Taking the steps

    def _drive(self, steps: Steps) -> Reply:
        with Walk(steps, self.links, blocking=True) as walk:
            for step in walk:
                try:
                    if isinstance(step, Ask):
                        walk.answer = step.link.ask(step.request, step.patience)
                    elif isinstance(step, Open):
                        walk.hold(
                            self.links.take(step.address or self.place.address(step.hash_name))
                        )
                    else:
                        time.sleep(step)
                except BaseException as failure:
                    walk.fail(failure)
        return walk.result

    async def _adrive(self, steps: Steps) -> Reply:
        with Walk(steps, self.links, blocking=False) as walk:
            for step in walk:
                try:
                    if isinstance(step, Ask):
                        walk.answer = await step.link.aask(step.request, step.patience or 0)
                    elif isinstance(step, Open):
                        walk.hold(await self._aopen(step))
                    else:
                        await asyncio.sleep(step)
                except BaseException as failure:
                    walk.fail(failure)
        return walk.result

    async def _aopen(self, step: Open) -> Link:
        address = step.address or self.place.known(step.hash_name)
        if address is not None:
            with suppress(IndexError):
                return self.links.idle(address, blocking=False).pop()
        return await offload(
            lambda: self.links.take(
                step.address or self.place.address(step.hash_name), blocking=False
            ),
            undo=lambda link: self.links.give(link, blocking=False),
        )

    def wake_all(self) -> None:
        """Let everybody who waits look for themselves."""
        self._mailboxes.wake_all()

    def close(self) -> None:
        self.links.close()
        self.place.close()
