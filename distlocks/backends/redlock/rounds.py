"""Asking all servers at once, in one thread, for no longer than until the answer is clear."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Self

from ...exceptions import BackendUnavailable
from ..redis.links import Link, TooManyConnections
from ..redis.persistence import TIMED_OUT
from ..redis.place import UNREACHABLE
from ..redis.scripts import Script
from ..redis.wire import Reply, ReplyError, pack
from .node import Ending, Node, real_now
from .quorum import majority

# Seconds for which a connection is waited for of which there are enough others.
OPEN_PATIENCE = 0.05


class Crew:
    """The servers, and how many rounds may be under way with them at once."""

    def __init__(self, nodes: Sequence[Node], alias: str) -> None:
        self.nodes = nodes
        self.majority = majority(len(nodes))
        # Seconds within which a server must answer.
        self.patience = max(node.timeout for node in nodes)
        # Each takes a connection to each server; one is left for what takes long.
        self.limit = min(node.servers.links.limit for node in nodes)
        self._alias = alias
        self._free = threading.BoundedSemaphore(max(self.limit - 1, 1))

    def enter(self) -> None:
        if not self._free.acquire(timeout=self.patience):
            raise TooManyConnections(
                f"All {self.limit} connections of the lock backend {self._alias!r} to each server "
                f"are in use: raise 'max_connections' in its OPTIONS."
            )

    def leave(self) -> None:
        self._free.release()


class Round:
    """Some requests to all nodes that are there, over one connection to each.

    A node that is late with an answer that nobody waits for any more answers what is asked later
    over the same connection after that: what was said to it first is done first.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._links: dict[Node, Link] = {}
        self._poll = select.poll()
        self._by_file: dict[int, Node] = {}
        # Who has not answered what was sent last.
        self._waiting: set[Node] = set()
        # Who has answered it with an error that nobody can do anything about, or not at all.
        self._failures: dict[Node, Exception] = {}
        # On whose connection nobody has spoken before.
        self._fresh: set[Node] = set()
        # Those that have not answered lately: asked only if the others are no majority.
        self._set_aside: list[Node] = []
        self._request, self._script = b"", b""
        # Who was told the scripts again in this round.
        self._reloaded: set[Node] = set()
        self._posted: set[Node] = set()
        self._give_up, self._in_a_hurry = 0.0, False
        # What ends something, to whom it concerns, and who has confirmed it.
        self._ending: Ending | None = None
        self._concerned: set[Node] = set()
        self._confirmed: set[Node] = set()

    def __enter__(self) -> Self:
        self._crew.enter()
        try:
            opening: list[Node] = []
            for node in self._crew.nodes:
                link = node.idle()
                if link is not None:
                    self._hold(node, link)
                elif node.is_absent:
                    node.look_after()
                    self._set_aside.append(node)
                else:
                    opening.append(node)
            self._open(opening)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _open(self, nodes: Sequence[Node]) -> None:
        """Open connections to these, all at once."""
        opening = {node.open_aside(): node for node in nodes}
        try:
            give_up = real_now() + self._crew.patience
            while opening:
                if len(self._links) >= self._crew.majority:
                    # The others can do without.
                    give_up = min(give_up, real_now() + OPEN_PATIENCE)
                done, _ = wait(
                    opening, timeout=max(give_up - real_now(), 0), return_when=FIRST_COMPLETED
                )
                for future in done:
                    self._take(opening.pop(future), future)
                if not done:
                    break
        finally:
            for future, node in opening.items():
                node.lost()
                node.keep(future)
                self._failures[node] = TimeoutError("does not answer")

    def _take(self, node: Node, opened: Future[Link]) -> None:
        error = opened.exception()
        if error is None:
            self._hold(node, opened.result())
            self._fresh.add(node)
        elif isinstance(error, Exception):
            self._failures[node] = error
        else:
            raise error

    def _hold(self, node: Node, link: Link) -> None:
        self._failures.pop(node, None)
        self._links[node] = link
        self._by_file[link.fileno()] = node
        self._poll.register(link.fileno(), select.POLLIN)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._ending is not None:
                for node in self._concerned - self._confirmed:
                    node.owe(self._links.get(node), self._ending)
            for node, link in self._links.items():
                if error is None:
                    node.give(link)
                else:
                    # Interrupted: nobody knows what has been sent.
                    node.drop(link)
        finally:
            self._crew.leave()

    # Asking

    def send(self, which: Script, words: Sequence[bytes], to: set[Node] | None = None) -> None:
        """Call a script on all, or on these; answers to what was sent before are not waited for
        any more."""
        first = self._crew.nodes[0]
        # The same for all: they differ in where they are.
        self._request = first.servers.request(which, first.hash_name, words)
        self._script = which.text
        self._waiting.clear()
        for node in list(self._links):
            if to is None or node in to:
                self._post(node)

    def end(self, which: Script, words: Sequence[bytes], life: float, concerned: set[Node]) -> None:
        """Tell these what ends something that would end by itself in `life` seconds. Who does not
        confirm it before the round is over is told until then."""
        self._ending = Ending(which, tuple(words), real_now() + life)
        self._concerned = concerned
        self.send(which, words, concerned)

    @property
    def asked(self) -> set[Node]:
        """Who has been sent anything in this round, and may have done it."""
        return self._posted

    def _post(self, node: Node) -> None:
        self._waiting.add(node)
        self._posted.add(node)
        node.asked_at = real_now()
        try:
            self._links[node].post(self._request)
        except UNREACHABLE as error:
            self._again(node, error)

    def answers(self) -> Iterator[tuple[Node, Reply]]:
        """What they answer to what was sent last, as it comes; of those that do not, within the
        time that a node has, the exception."""
        for node, failure in list(self._failures.items()):
            yield node, failure
        self._give_up, self._in_a_hurry = real_now() + self._crew.patience, False
        while self._waiting or self._are_needed():
            if not self._waiting:
                yield from self._bring_in()
                continue
            # Also when the time is up: this process may have stood still, and not the servers.
            ready = self._poll.poll(max(self._give_up - real_now(), 0) * 1000)
            for file, _ in ready:
                node = self._by_file[file]
                reply = self._read(node)
                if reply is not None:
                    yield node, reply
            if ready or real_now() < self._give_up:
                continue
            if self._in_a_hurry:
                return
            for node in list(self._waiting):
                error = TimeoutError(f"has not answered within {node.timeout:g} s")
                self._fail(node, error)
                yield node, error
        for node in self._set_aside:
            yield node, ConnectionError("does not answer")

    def hurry(self, patience: float) -> None:
        """Wait for those answers that are still to come, for so many more seconds at most; who is
        later is left alone."""
        if not self._in_a_hurry:
            self._give_up, self._in_a_hurry = real_now() + patience, True

    def _are_needed(self) -> bool:
        """Whether those that were set aside have to be asked after all."""
        return bool(self._set_aside) and len(self._links) < self._crew.majority

    def _bring_in(self) -> Iterator[tuple[Node, Reply]]:
        """Ask those that were set aside too; of those that are not there, the exception."""
        nodes, self._set_aside = self._set_aside, []
        for node in nodes:
            node.is_absent = False
        self._open(nodes)
        self._give_up = real_now() + self._crew.patience
        for node in nodes:
            if node in self._links:
                self._post(node)
            if node in self._failures:
                yield node, self._failures[node]

    def _read(self, node: Node) -> Reply:
        """The node's answer to what was sent last, or its failure; None if it is still to come, or
        nobody waits for it."""
        link = self._links[node]
        try:
            replies = link.collect()
            if link.owed or not replies or node not in self._waiting:
                node.passed_over(link, replies)
                return None
            node.passed_over(link, replies[:-1])
            reply = replies[-1]
            if (
                isinstance(reply, ReplyError)
                and reply.code == "NOSCRIPT"
                and node not in self._reloaded
            ):
                self._reloaded.add(node)
                load = pack(b"SCRIPT", b"LOAD", self._script)
                link.post(load + self._request, replies=2)
                return None
        except (*UNREACHABLE, ReplyError) as error:
            return self._again(node, error)
        self._waiting.discard(node)
        if self._ending is not None and not isinstance(reply, ReplyError):
            self._confirmed.add(node)
        return reply

    def _again(self, node: Node, error: Exception) -> Exception | None:
        """Send it once more over a new connection, if the old one has broken while nobody spoke on
        it: the server may have restarted, or closes those that are idle. The failure, if not."""
        was_waited_for = node in self._waiting
        may_have_been_closed = node not in self._fresh and not isinstance(error, TIMED_OUT)
        self._fail(node, error)
        if not was_waited_for:
            return None
        if may_have_been_closed:
            node.is_absent = False
            opening = node.open_aside()
            done, _ = wait((opening,), timeout=OPEN_PATIENCE)
            if not done:
                node.lost()
                node.keep(opening)
            else:
                self._take(node, opening)
                if node in self._links:
                    self._post(node)
                    return None
        return self._failures[node]

    def _fail(self, node: Node, error: Exception) -> None:
        link = self._links.pop(node)
        self._poll.unregister(link.fileno())
        del self._by_file[link.fileno()]
        self._waiting.discard(node)
        self._fresh.discard(node)
        self._failures[node] = error
        node.drop(link)
        node.lost()


def why(failures: Mapping[Node, Exception]) -> str:
    """How these have failed."""
    return "; ".join(f"{node} {told(failure)}" for node, failure in failures.items())


def told(failure: object) -> str:
    """A failure, as the end of a sentence that begins with the server."""
    text = str(failure).rstrip(".") or type(failure).__name__
    if isinstance(failure, ReplyError):
        return f"refuses: {text}"
    if isinstance(failure, BackendUnavailable | TimeoutError | ConnectionError):
        return text
    return f"cannot be reached: {text}"
