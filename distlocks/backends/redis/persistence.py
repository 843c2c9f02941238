"""When a request is sent again, where to, and when it is given up: steps, whoever takes them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, NoReturn, Self

import redis
from redis import AuthenticationError

from ... import clock
from ...exceptions import BackendUnavailable
from .links import Link, Links
from .place import UNREACHABLE, Address, Place
from .wire import Reply, ReplyError, pack

# Who has not answered for as long as one waits is not asked again: in a read, and in what opens a
# connection.
TIMED_OUT = (TimeoutError, redis.TimeoutError)
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


class Walk:
    """A generator of steps on its way: what it is to be told next, and the link that it holds."""

    def __init__(self, steps: Steps, links: Links, *, blocking: bool) -> None:
        self._steps = steps
        self._links = links
        self._blocking = blocking
        self._held: Link | None = None
        self._error: BaseException | None = None
        self.answer: Any = None
        # What the generator has returned.
        self.result: Reply = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._give()

    def __iter__(self) -> Iterator[Ask | Open | float]:
        while True:
            error, answer = self._error, self.answer
            self._error = self.answer = None
            try:
                step = self._steps.send(answer) if error is None else self._steps.throw(error)
            except StopIteration as end:
                self.result = end.value
                return
            if isinstance(step, Open):
                self._give()
            yield step

    def hold(self, link: Link) -> None:
        """The link that was to be opened."""
        self.answer = self._held = link

    def fail(self, error: BaseException) -> None:
        """The step has failed: nobody knows what the link's next reply would be to."""
        if self._held is not None:
            self._links.drop(self._held)
            self._held = None
        self._error = error

    def _give(self) -> None:
        if self._held is not None:
            self._links.give(self._held, blocking=self._blocking)
            self._held = None


class Persistence:
    """Asks the servers of one backend for as long as an answer may come."""

    def __init__(self, place: Place, links: Links, alias: str) -> None:
        self._place = place
        self._links = links
        self._alias = alias

    def ask(
        self,
        hash_name: bytes,
        request: bytes,
        failure: Exception | None = None,
        was_sent: bool = False,
        text: bytes = b"",
        then: Then | None = None,
        patience: float = FAILOVER_PATIENCE,
        once: bool = False,
    ) -> Steps:
        """Send a request until it is answered; BackendUnavailable if it cannot be.

        Sending it again does no harm: scripts know their owner ids. With `once`, it does, and what
        may have arrived is not sent again.
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
                if once and in_doubt:
                    may_pass = False
                if not may_pass or late or tries > 20 or isinstance(failure, TIMED_OUT):
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
            self._place.moved(hash_name, self._redirected(failure, hash_name))
        if code in ("MOVED", "ASK"):
            return True
        if code in _ELSEWHERE:
            self._forget_server(hash_name)
            return self._place.can_fail_over
        return code == "NOSCRIPT" or (code in _PASSING and self._place.can_fail_over)

    def _redirected(self, failure: Exception, hash_name: bytes) -> Address:
        """Where a server of a Cluster sends us."""
        host, _, port = str(failure).split()[2].rpartition(":")
        known = self._place.known(hash_name) or ("", 0)
        return host or known[0], int(port)

    def _forget_server(self, hash_name: bytes) -> None:
        address = self._place.known(hash_name)
        if address is not None:
            # What else is open to it is stale too.
            self._links.drop_idle(address)
            self._place.forget(address)

    def _fail(self, failure: Exception, in_doubt: bool) -> NoReturn:
        if isinstance(failure, ReplyError):
            error = BackendUnavailable(
                f"Redis at {self._place} (lock backend {self._alias!r}) refuses: {failure}."
                f"{_WAY_OUT.get(_code(failure), '')}"
            )
        else:
            error = self.unreachable(failure)
        error.in_doubt = in_doubt
        raise error from failure

    def unreachable(self, failure: BaseException) -> BackendUnavailable:
        if isinstance(failure, BackendUnavailable):
            return failure
        error = BackendUnavailable(
            f"Redis at {self._place} (lock backend {self._alias!r}) does not answer: "
            f"{str(failure).rstrip('.') or type(failure).__name__}."
        )
        error.in_doubt = False
        return error


def _code(failure: Exception | None) -> str:
    """The code of the server's error; '' if it is none of the server's."""
    if not isinstance(failure, ReplyError):
        return ""
    inside = _INSIDE.search(str(failure)) if failure.code == "ERR" else None
    return inside[1] if inside else failure.code
