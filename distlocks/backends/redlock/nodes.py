"""Asking all servers at once, in one thread, for no longer than until the answer is clear."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from ... import clock
from ...exceptions import BackendUnavailable
from ...threads import JobThreads
from ..offload import submit
from ..redis import RedisBackend
from ..redis.links import Link
from ..redis.persistence import TIMED_OUT
from ..redis.place import UNREACHABLE
from ..redis.scripts import Script, script
from ..redis.wire import Reply, ReplyError, pack
from .quorum import majority

T = TypeVar("T")

# Seconds for which a server that does not answer is left alone. Somebody looks after it then, while
# nobody waits for it.
ABSENT = 0.5


def real_now() -> float:
    """The lease clock, also while a test has another in force: servers are real."""
    return clock.Clock().now()


# What is asked of a server all the time: it knows it from the first connection on.
_SCRIPTS = [script(f"redlock_{name}") for name in ("take", "raise", "release", "extend")]
_LOADS = b"".join([pack(b"SCRIPT", b"LOAD", one.text) for one in _SCRIPTS])


class Ending(NamedTuple):
    """The call of a script that ends something, and the moment on the lease clock at which that
    has ended by itself."""

    which: Script
    words: Sequence[bytes]
    until: float


class Node:
    """One of the servers: the connections to it, and whether it is there."""

    def __init__(self, half: RedisBackend, threads: JobThreads) -> None:
        self.half = half
        self.servers = half.servers
        self.hash_name = half.servers.hashes[0]
        self.address = half.place.address(b"")
        self.timeout = half.place.timeout
        self.threads = threads
        self._mutex = threading.Lock()
        # Nobody is to wait for it: it has not answered.
        self.is_absent = False
        self._retry_at = 0.0
        self._is_looked_after = False
        # Microseconds by which its clock is ahead of the lease clock; None if it never answered.
        self.ahead_us: float | None = None
        # What it has not confirmed: see owe(). By connection, while that may still come; of those
        # that have broken, in the order in which they did.
        self._unconfirmed: dict[Link, list[Ending]] = {}
        self._owed: list[Ending] = []
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
        if link.owed:
            with suppress(*UNREACHABLE):
                self.passed_over(link, link.collect())
            if link.owed and time.monotonic() - link.since > self.timeout:
                self.drop(link)
                self.lost()
                return None
        if link in self._refused:
            self._refused.discard(link)
            self._owed += self._unconfirmed.pop(link, ())
            self._greet(link)
        return link

    def passed_over(self, link: Link, replies: Sequence[Reply]) -> None:
        """These have come over the connection, and nobody waits for them."""
        if any(isinstance(reply, ReplyError) for reply in replies):
            # It has forgotten the scripts.
            self._refused.add(link)
        elif not link.owed and link not in self._refused:
            self._unconfirmed.pop(link, None)

    def open_aside(self) -> Future[Link]:
        """A new connection, opened in another thread."""
        return submit(self.open, self.threads)

    def open(self) -> Link:
        """A new connection."""
        try:
            link = self.servers.links.open(self.address, blocking=False)
        except BaseException:
            self.lost()
            raise
        try:
            self._greet(link)
        except BaseException:
            self.drop(link)
            self.lost()
            raise
        self.is_absent = False
        return link

    def give(self, link: Link) -> None:
        self.servers.links.give(link, blocking=False)

    def drop(self, link: Link) -> None:
        self._owed += self._unconfirmed.pop(link, ())
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
        self.threads.put(self._return)

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
        if link is None:
            moment = real_now()
            with self._mutex:
                # Past that, it has ended by itself.
                self._owed = [*(one for one in self._owed if one.until > moment), ending]
        else:
            self._unconfirmed.setdefault(link, []).append(ending)

    def _greet(self, link: Link) -> None:
        """Say first what it has to know, and what it has not confirmed elsewhere."""
        link.post(_LOADS, replies=len(_SCRIPTS))
        with self._mutex:
            owed, self._owed = self._owed, []
        moment = real_now()
        for ending in owed:
            if ending.until > moment:
                # By its text: a server that has restarted does not know the script.
                link.post(self.servers.text(ending.which, self.hash_name, ending.words))
                self.owe(link, ending)

    # Its clock

    def heard(self, time_us: int) -> None:
        """It has said what time it is."""
        self.ahead_us = time_us - real_now() * 1e6


class Round:
    """Some requests to all nodes that are there, over one connection to each.

    A node that is late with an answer that nobody waits for any more answers what is asked later
    over the same connection after that: what was said to it first is done first.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self._links: dict[Node, Link] = {}
        self._poll = select.poll()
        self._by_file: dict[int, Node] = {}
        # Who has not answered what was sent last: its request, and the script.
        self._waiting: dict[Node, tuple[bytes, Script]] = {}
        # On whose connection nobody has spoken before.
        self._fresh: set[Node] = set()
        self._failures: dict[Node, Exception] = {}
        # Those that have not answered lately: asked only if the others are no majority.
        self._set_aside: list[Node] = []
        self._patience = max(node.timeout for node in nodes)
        self._give_up, self._in_a_hurry = 0.0, False
        self._last: tuple[bytes, Script] | None = None
        self._ending: Ending | None = None

    def __enter__(self) -> Self:
        opening: list[Node] = []
        for node in self.nodes:
            link = node.idle()
            if link is not None:
                self._hold(node, link)
            elif node.is_absent:
                node.look_after()
                self._set_aside.append(node)
            else:
                opening.append(node)
        self._open(opening)
        return self

    def _open(self, nodes: Sequence[Node]) -> None:
        """Open connections to these, all at once."""
        if not nodes:
            return
        opening = {node.open_aside(): node for node in nodes}
        done, late = wait(opening, timeout=self._patience)
        for future in late:
            # It is put at hand when it is there.
            node = opening[future]
            future.add_done_callback(lambda ready, node=node: _keep(node, ready))  # type: ignore[misc]
            self._failures[node] = TimeoutError(f"{node} does not answer")
        for future in done:
            node = opening[future]
            error = future.exception()
            if error is None:
                self._hold(node, future.result())
                self._fresh.add(node)
            elif isinstance(error, Exception):
                self._failures[node] = error
            else:
                raise error

    def _hold(self, node: Node, link: Link) -> None:
        self._links[node] = link
        self._by_file[link.fileno()] = node
        self._poll.register(link.fileno(), select.POLLIN)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._owe()
        for node, link in self._links.items():
            if error is None:
                node.give(link)
            else:
                # Interrupted: nobody knows what has been sent.
                node.drop(link)

    def send(self, which: Script, words: Sequence[bytes], to: Sequence[Node] | None = None) -> None:
        """Call a script on these nodes, or all; answers to what was sent before are not waited for
        any more."""
        self._waiting = {}
        # The same for all: they differ in where they are.
        first = self.nodes[0]
        self._last = first.servers.request(which, first.hash_name, words), which
        for node in list(self._links):
            self._post(node)

    def _post(self, node: Node) -> None:
        assert self._last is not None
        self._waiting[node] = self._last
        try:
            self._links[node].post(self._last[0])
        except UNREACHABLE as error:
            self._again(node, error)

    def answers(self) -> Iterator[tuple[Node, Reply]]:
        """What they answer to what was sent last, as it comes; of those that do not, within the
        time that a node has, the exception."""
        for node, failure in list(self._failures.items()):
            yield node, failure
        self._give_up, self._in_a_hurry = real_now() + self._patience, False
        while self._waiting or self._are_needed():
            if not self._waiting:
                yield from self._bring_in()
                continue
            left = self._give_up - real_now()
            ready = self._poll.poll(left * 1000) if left > 0 else ()
            if left <= 0 and self._in_a_hurry:
                return
            if left <= 0:
                break
            for file, _ in ready:
                node = self._by_file[file]
                reply = self._read(node)
                if reply is not None:
                    yield node, reply
        for node in list(self._waiting):
            self._fail(node, TimeoutError(f"{node} has not answered within {node.timeout:g} s"))
            yield node, self._failures[node]
        for node in self._set_aside:
            yield node, ConnectionError(f"{node} does not answer")

    def hurry(self, patience: float) -> None:
        """Wait for those answers that are still to come, for so many more seconds at most; who is
        later is left alone."""
        if not self._in_a_hurry:
            self._give_up, self._in_a_hurry = real_now() + patience, True

    def _are_needed(self) -> bool:
        """Whether those that were set aside have to be asked after all."""
        return bool(self._set_aside) and len(self._links) < majority(len(self.nodes))

    def _bring_in(self) -> Iterator[tuple[Node, Reply]]:
        """Ask those that were set aside too; of those that are not there, the exception."""
        nodes, self._set_aside = self._set_aside, []
        self._open(nodes)
        for node in nodes:
            if node in self._links:
                self._post(node)
            if node in self._failures:
                yield node, self._failures[node]

    def _read(self, node: Node) -> Reply:
        """The node's answer to what was sent last, or its failure; None if it is still to come, or
        nobody waits for it."""
        link = self._links.get(node)
        if link is None:
            return None
        try:
            replies = link.collect()
        except UNREACHABLE as error:
            return self._again(node, error)
        if link.owed or not replies or node not in self._waiting:
            node.passed_over(link, replies)
            return None
        node.passed_over(link, replies[:-1])
        request, which = self._waiting.pop(node)
        reply = replies[-1]
        if isinstance(reply, ReplyError) and reply.code == "NOSCRIPT":
            link.post(pack(b"SCRIPT", b"LOAD", which.text) + request, replies=2)
            self._waiting[node] = (request, which)
            return None
        return reply

    def _again(self, node: Node, error: Exception) -> Exception | None:
        """Send it once more over a new connection, if the old one has broken while nobody spoke on
        it: the server may have restarted, or closes those that are idle. The failure, if not."""
        waiting = self._waiting.get(node)
        may_have_been_closed = node not in self._fresh and not isinstance(error, TIMED_OUT)
        self._fail(node, error)
        if waiting is None:
            return None
        if not may_have_been_closed:
            return error
        try:
            link = node.open()
            self._hold(node, link)
            self._fresh.add(node)
            link.post(waiting[0])
        except (*UNREACHABLE, BackendUnavailable) as again:
            if node in self._links:
                self._fail(node, again)
            self._failures[node] = again
            return again
        del self._failures[node]
        self._waiting[node] = waiting
        return None

    def _fail(self, node: Node, error: Exception) -> None:
        link = self._links.pop(node)
        self._poll.unregister(link.fileno())
        del self._by_file[link.fileno()]
        self._waiting.pop(node, None)
        self._failures[node] = error
        node.drop(link)
        node.lost()

    def end(self, which: Script, words: Sequence[bytes], life: float) -> None:
        """Like send(), for what ends something that would end by itself in `life` seconds. Who does
        not confirm it before the round is over is told until then."""
        self.send(which, words)
        self._ending = Ending(which, tuple(words), real_now() + life)

    def _owe(self) -> None:
        """Note who has not confirmed what ends something."""
        if self._ending is not None:
            for node in self.nodes:
                if node in self._waiting or node not in self._links:
                    node.owe(self._links.get(node), self._ending)


def _keep(node: Node, ready: Future[Link]) -> None:
    if ready.exception() is None:
        node.give(ready.result())


def of_each(
    nodes: Sequence[Node], verb: Callable[[Node], T]
) -> tuple[dict[Node, T], dict[Node, BackendUnavailable]]:
    """What the verb returns for each node, in threads; or how it has failed."""
    futures = {node: submit(lambda node=node: verb(node), node.threads) for node in nodes}  # type: ignore[misc]
    found: dict[Node, T] = {}
    failed: dict[Node, BackendUnavailable] = {}
    for node, future in futures.items():
        try:
            found[node] = future.result()
        except BackendUnavailable as error:
            failed[node] = error
    return found, failed
