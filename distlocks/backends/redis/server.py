"""How a script gets run: on the right server, loaded first, sent again if its answer was lost."""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from redis import AuthenticationError

from ... import clock
from ...exceptions import BackendUnavailable
from ..offload import offload
from .links import Link, Links
from .mail import SLICE, LoopMailbox, Mailboxes, ThreadsMailbox
from .place import UNREACHABLE, Address, Place
from .scripts import Script
from .wire import Reply, ReplyError, pack, packed

# Seconds for which a request is sent again, at the longest, while another server takes over.
FAILOVER_PATIENCE = 1.0
# What a server answers that is not, or no longer, the one to ask.
_ELSEWHERE = ("READONLY", "MASTERDOWN", "UNBLOCKED")
# What passes by itself, soon.
_PASSING = ("LOADING", "TRYAGAIN", "CLUSTERDOWN", "NOREPLICAS", "BUSY")
# What to do about it.
_WAY_OUT = {
    "OOM": " Give the locks a server that is not full, or raise its maxmemory.",
    "NOREPLICAS": " It has lost its replicas (min-replicas-to-write).",
    "READONLY": " It is a replica: name the primary, or let Sentinel name it.",
    "NOPERM": " Permit it (ACL).",
    "MISCONF": " It cannot write its snapshot to the disk.",
}
# Scripts whose work must not be lost with the server, if min_replicas is set.
REPLICATED = ("acquire", "extend")
# Redis before 7 tells of errors inside of a script in its own words.
_INSIDE = re.compile(r"-(READONLY|OOM|NOREPLICAS|MISCONF|MASTERDOWN|NOPERM)\b")


class Ask(NamedTuple):
    """A step: the request to be sent over the link."""

    link: Link
    request: bytes
    patience: float | None = None


class Open(NamedTuple):
    """A step: a link to the server of this hash is needed, or to another, for once."""

    hash_name: bytes
    address: Address | None = None


# A number: so many seconds of rest.
Steps = Generator[Ask | Open | float, Any, Reply]
# What else is to be said over the link, once the reply is there.
Then = Callable[[Link, Reply], Steps]


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
        self.min_replicas = min_replicas
        # What every script is told first.
        self._common = (b"" if guarded else b"-", b"%d" % quarantine_us)
        self._heads: dict[tuple[bytes, bytes, int], bytes] = {}
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
            raise self._unreachable(error) from error

    # Scripts

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

    def _head(self, which: Script, hash_name: bytes, words: int) -> bytes:
        """How a call of the script begins; `words` are to follow."""
        key = (which.sha, hash_name, words)
        head = self._heads.get(key)
        if head is None:
            first = (b"EVALSHA", which.sha, b"1", hash_name, *self._common)
            head = b"*%d\r\n%b" % (words + len(first), packed(first))
            self._heads[key] = head
        return head

    async def arun(self, hash_name: bytes, which: Script, words: int, tail: bytes) -> Reply:
        """See run()."""
        return await self._adrive(self._again(hash_name, which, words, tail))

    def ask(self, hash_name: bytes, request: bytes, *, or_refusal: bool = False) -> Reply:
        """The reply to a plain command; its refusal too, if that is wanted."""
        try:
            return self._drive(self._persistently(hash_name, request))
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
    ) -> Steps:
        request = self._head(which, hash_name, words) + tail
        text = pack(b"SCRIPT", b"LOAD", which.text)
        then = self._replicated if self.min_replicas and which.name in REPLICATED else None
        # Leases on the other servers of a Cluster are to be extended too: their renewer comes back.
        hurry = which.name == "extend" and len(self.hashes) > 1
        return (
            yield from self._persistently(
                hash_name,
                request,
                failure,
                was_sent,
                text=text,
                then=then,
                patience=0.0 if hurry else FAILOVER_PATIENCE,
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

    def _persistently(
        self,
        hash_name: bytes,
        request: bytes,
        failure: Exception | None = None,
        was_sent: bool = False,
        text: bytes = b"",
        then: Then | None = None,
        patience: float = FAILOVER_PATIENCE,
    ) -> Steps:
        """Send a request until it is answered; BackendUnavailable if it cannot be.

        Sending it again does no harm: scripts know their owner ids.
        """
        give_up = clock.Clock().now() + patience
        in_doubt = was_sent and not isinstance(failure, ReplyError)
        tries = 0
        while True:
            asked_at = None
            if failure is not None:
                tries += 1
                may_pass = self._learn_from(failure, hash_name)
                if _code(failure) == "ASK":
                    # The slot is on its way there.
                    asked_at = self._redirected(failure, hash_name)
                late = (
                    clock.Clock().now() >= give_up
                    and tries > 1
                    and _code(failure) not in ("NOSCRIPT", "MOVED", "ASK")
                )
                if not may_pass or late or tries > 20 or isinstance(failure, TimeoutError):
                    self._fail(failure, in_doubt)
                if isinstance(failure, ReplyError) or tries > 1:
                    yield from self._pause(failure, tries)
            link: Link | None = None
            sent = False
            try:
                link = yield Open(hash_name, asked_at)
                if _code(failure) == "NOSCRIPT":
                    yield Ask(link, text)
                if asked_at is not None:
                    # It may not know the script, and would then forget that it was asked.
                    yield Ask(link, text or pack(b"PING"))
                    yield Ask(link, pack(b"ASKING"))
                sent = True
                reply = yield Ask(link, request)
                if then is not None and not isinstance(reply, ReplyError):
                    yield from then(link, reply)
            except UNREACHABLE as error:
                # Whoever took the step has dropped the link.
                in_doubt = in_doubt or sent
                failure = error
                continue
            if isinstance(reply, ReplyError):
                failure = reply
                continue
            return reply

    @staticmethod
    def _pause(failure: Exception, tries: int) -> Steps:
        if _code(failure) not in ("NOSCRIPT", "MOVED", "ASK"):
            yield 0.01 * min(tries, 10) * random.uniform(0.5, 1.5)

    def _learn_from(self, failure: Exception, hash_name: bytes) -> bool:
        """Take note of what the failure says; whether trying again may help."""
        if isinstance(failure, AuthenticationError):
            return False
        if not isinstance(failure, ReplyError):
            self._forget_server(hash_name)
            return True
        code = _code(failure)
        if code == "MOVED":
            self.place.moved(hash_name, self._redirected(failure, hash_name))
        if code in ("MOVED", "ASK"):
            return True
        if code in _ELSEWHERE:
            self._forget_server(hash_name)
            return self.place.can_fail_over
        return code == "NOSCRIPT" or (code in _PASSING and self.place.can_fail_over)

    def _redirected(self, failure: Exception, hash_name: bytes) -> Address:
        """Where a server of a Cluster sends us."""
        host, _, port = str(failure).split()[2].rpartition(":")
        known = self.place.known(hash_name) or ("", 0)
        return host or known[0], int(port)

    def _forget_server(self, hash_name: bytes) -> None:
        address = self.place.known(hash_name)
        if address is not None:
            # What else is open to it is stale too.
            self.links.drop_idle(address)
            self.place.forget(address)

    def _fail(self, failure: Exception, in_doubt: bool) -> NoReturn:
        if isinstance(failure, ReplyError):
            error = BackendUnavailable(
                f"Redis at {self.place} (lock backend {self.alias!r}) refuses: {failure}."
                f"{_WAY_OUT.get(_code(failure), '')}"
            )
        else:
            error = self._unreachable(failure)
        error.in_doubt = in_doubt
        raise error from failure

    def _unreachable(self, failure: BaseException) -> BackendUnavailable:
        if isinstance(failure, BackendUnavailable):
            return failure
        error = BackendUnavailable(
            f"Redis at {self.place} (lock backend {self.alias!r}) does not answer: "
            f"{str(failure) or type(failure).__name__}."
        )
        error.in_doubt = False
        return error

    # Taking the steps

    def _drive(self, steps: Steps) -> Reply:
        answer: Any = None
        error: BaseException | None = None
        held: Link | None = None
        try:
            while True:
                try:
                    step = steps.throw(error) if error is not None else steps.send(answer)
                except StopIteration as end:
                    return end.value
                answer, error = None, None
                try:
                    if isinstance(step, Ask):
                        answer = step.link.ask(step.request, step.patience)
                    elif isinstance(step, Open):
                        if held is not None:
                            self.links.give(held)
                            held = None
                        address = step.address or self.place.address(step.hash_name)
                        answer = held = self.links.take(address)
                    else:
                        time.sleep(step)
                except BaseException as failure:
                    if held is not None:
                        self.links.drop(held)
                        held = None
                    error = failure
        finally:
            if held is not None:
                self.links.give(held)

    async def _adrive(self, steps: Steps) -> Reply:
        import asyncio

        answer: Any = None
        error: BaseException | None = None
        held: Link | None = None
        try:
            while True:
                try:
                    step = steps.throw(error) if error is not None else steps.send(answer)
                except StopIteration as end:
                    return end.value
                answer, error = None, None
                try:
                    if isinstance(step, Ask):
                        answer = await step.link.aask(step.request, step.patience or 0)
                    elif isinstance(step, Open):
                        if held is not None:
                            self.links.give(held, blocking=False)
                            held = None
                        answer = held = await self._aopen(step)
                    else:
                        await asyncio.sleep(step)
                except BaseException as failure:
                    if held is not None:
                        self.links.drop(held)
                        held = None
                    error = failure
        finally:
            if held is not None:
                self.links.give(held, blocking=False)

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

    def close(self) -> None:
        self.links.close()
        self.place.close()


def _code(failure: Exception | None) -> str:
    """The code of the server's error; '' if it is none of the server's."""
    if not isinstance(failure, ReplyError):
        return ""
    inside = _INSIDE.search(str(failure)) if failure.code == "ERR" else None
    return inside[1] if inside else failure.code
