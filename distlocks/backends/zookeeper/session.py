"""How this process talks to the ensemble: one session, its requests, its watches, its clock."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState, ZnodeStat

from ...claims import MICROSECOND
from ...clock import lease_now
from ...exceptions import BackendUnavailable
from ...identity import pid
from ...waiting import DRIFT
from .client import Client
from .nodes import node_of
from .requests import Send, create_mark, ensure, write
from .settings import Settings

# What a node that is not as expected is answered with: for the verbs to make sense of.
ANSWERS = (NoNodeError, NodeExistsError, BadVersionError, NotEmptyError)
# The request may have been carried out, or be refused only because it is to be sent anew.
INTERRUPTIONS = (
    ConnectionLoss,
    ConnectionClosedError,
    OperationTimeoutError,
    SessionExpiredError,
    SessionMovedError,
)
# Of the operations of a transaction that failed: those that would have gone well.
BYSTANDERS = (RolledBackError, RuntimeInconsistency)
# Seconds for a goodbye.
GOODBYE = 2.0
# Seconds after which who waits for an answer looks whether one can still come, and reminds.
LOOK_AROUND = 0.25
# Seconds after which a server of which nothing is heard is given up for another, at the longest.
SILENCE = 1.0
# More leases than a process has at once, ordinarily.
MANY_LEASES = 10_000


class Interrupted(Exception):
    """The connection or the session has gone; it may well be there again in a moment."""

    def __init__(self, why: str, *, in_doubt: bool) -> None:
        super().__init__(why)
        self.in_doubt = in_doubt


def unavailable(settings: Settings, why: str) -> BackendUnavailable:
    """The error that tells of it."""
    return BackendUnavailable(
        f"The ZooKeeper ensemble of the lock backend {settings.alias!r} ({settings.hosts}): {why}."
    )


class Paths:
    """Where things are: see nodes."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.sessions = f"{root}/sessions"
        self.locks = f"{root}/locks"
        self.queues = f"{root}/queue"

    def session(self, name: str) -> str:
        return f"{self.sessions}/{name}"

    def key(self, name: str) -> str:
        return f"{self.locks}/{node_of(name)}"

    def queue(self, name: str) -> str:
        return f"{self.queues}/{node_of(name)}"


class Session:
    """One session with the ensemble, shared by the threads of one process.

    It is trusted only while the connection stands: a request is not even sent in between. Once the
    ensemble has declared it dead, it stays so, and another takes its place.
    """

    def __init__(self, settings: Settings, paths: Paths, on_news: Callable[[], None]) -> None:
        self.settings = settings
        self.paths = paths
        # Names it in the nodes of its claims. Never used again.
        self.name = uuid.uuid4().hex
        self.pid = pid()
        self.dead = False
        # By owner id, until when the leases last that were granted in it, on the lease clock.
        self.leases: dict[str, float] = {}
        self._on_news = on_news
        # Set also when it is dead: nobody has to wait any more.
        self._connected = threading.Event()
        self._announcing = threading.Lock()
        self._announced = False
        # By the servers' clock, in microseconds, and by this machine's, in seconds.
        self._sample = (0, 0.0)
        self._watchers: dict[str, Callable[[Any], None]] = {}
        self._client = Client(
            hosts=settings.hosts,
            timeout=settings.session_timeout,
            auth_data=settings.auth,
            default_acl=settings.acl,
            **settings.connection,
        )
        self._client.add_listener(self._on_state)
        self._client.start_async()

    @property
    def timeout(self) -> float:
        """Seconds that the session lasts without a sign of life, as agreed with the server."""
        return self._client.negotiated

    def _on_state(self, state: str) -> None:
        # In kazoo's own thread, which must not be held up.
        if state == KazooState.LOST:
            self.die()
        if state == KazooState.CONNECTED or self.dead:
            self._connected.set()
        else:
            self._connected.clear()
        # Watches have gone with the connection.
        if state != KazooState.SUSPENDED:
            self._on_news()

    def die(self) -> None:
        """It is dead, or as good as that. kazoo would go on with another, which nobody wants."""
        if not self.dead:
            self.dead = True
            self._connected.set()
            self._begin_goodbye()

    def note_lease(self, owner_id: str, ttl_us: int) -> None:
        """A lease was granted or extended in it just now."""
        self.leases[owner_id] = lease_now() + ttl_us / MICROSECOND
        if len(self.leases) > MANY_LEASES:
            # Some have never been released.
            now = lease_now()
            self.leases = {owner: until for owner, until in [*self.leases.items()] if until > now}

    def forget_lease(self, owner_id: str) -> None:
        """A lease was released or lost."""
        self.leases.pop(owner_id, None)

    @property
    def leases_last(self) -> float:
        """Seconds for which its end would cost somebody a lease."""
        return max(max(self.leases.copy().values(), default=0.0) - lease_now(), 0.0)

    # Requests

    def be_ready(self, give_up: float) -> None:
        """Return once requests can be sent; Interrupted if the session dies first, or if that
        takes until `give_up`, on the monotonic clock."""
        self._await_connection(give_up)
        if not self._announced:
            with self._announcing:
                if not self._announced:
                    self._announce(give_up)
                    self._announced = True

    def _await_connection(self, give_up: float) -> None:
        connected = self._connected.wait(max(give_up - time.monotonic(), 0))
        if self.dead:
            raise Interrupted("the session is dead", in_doubt=False)
        if not connected:
            raise Interrupted("it cannot be reached, or has no majority", in_doubt=False)

    def _announce(self, give_up: float) -> None:
        """Make the node by which others see that this session lives."""
        path = self.paths.session(self.name)
        for _ in range(3):
            (answer,) = self.ask(give_up, create_mark(path))
            if isinstance(answer, NoNodeError):
                for parent in (self.paths.sessions, self.paths.locks, self.paths.queues):
                    self.ask(give_up, ensure(parent))
            elif isinstance(answer, NodeExistsError):
                # The answer to the first try was lost.
                (stat,) = self.ask(give_up, write(path))
                self.note_time(stat)
                return
            else:
                self.note_time(answer[1])
                return
        raise Interrupted(f"the nodes below {self.paths.root} come and go", in_doubt=False)

    def ask(self, give_up: float, *sends: Send) -> list[Any]:
        """The answers to requests that are sent one right after the other.

        Among the answers may be the exceptions in ANSWERS. Raises Interrupted, and
        BackendUnavailable for what is wrong with the servers, or if they do not answer in time.
        """
        if not self._connected.is_set() or self.dead:
            raise Interrupted("there is no connection", in_doubt=False)
        pending = [send(self._client) for send in sends]
        answers = [self._answer(one, give_up) for one in pending]
        if self.dead:
            raise Interrupted("the session is dead", in_doubt=True)
        return answers

    def _answer(self, pending: Any, give_up: float) -> Any:
        asked_at = time.monotonic()
        try:
            while True:
                # What was asked at the very moment in which the session died, kazoo forgets.
                rest = give_up - time.monotonic()
                try:
                    return pending.get(timeout=max(min(rest, LOOK_AROUND), 0.001))
                except KazooTimeoutError:
                    if self.dead:
                        raise Interrupted("the session is dead", in_doubt=True) from None
                    if rest <= LOOK_AROUND:
                        raise
                    if self._connected.is_set():
                        # ZooKeeper 3.8.0 has been seen to hold an answer back until it heard from
                        # its client again, which may be the next heartbeat, after seconds.
                        self._client.exists_async(self.paths.root)
                        silence = min(SILENCE, self.settings.timeout / 3)
                        self._client.drop_if_silent(asked_at, silence)
        except ANSWERS as error:
            return error
        except INTERRUPTIONS as error:
            raise Interrupted(type(error).__name__, in_doubt=True) from error
        except KazooTimeoutError as error:
            raise unavailable(
                self.settings, f"it did not answer within {self.settings.timeout:g} s"
            ) from error
        except KazooException as error:
            raise self.refused(error) from error

    def refused(self, error: Exception) -> BackendUnavailable:
        """What to raise when the servers do not do what is asked."""
        failure = unavailable(self.settings, f"it refuses: {type(error).__name__} {error}")
        failure.in_doubt = False
        return failure

    # The servers' clock

    def note_time(self, stat: Any) -> None:
        """A node was written just now: what time it was by the servers' clock."""
        self._sample = (stat.mtime * 1000, time.monotonic())

    def note_own(self, answer: Any) -> None:
        """See note_time(): of the write to the node of this session, which must be there."""
        if isinstance(answer, Exception):
            self.die()
            raise Interrupted("the session is dead", in_doubt=False)
        self.note_time(answer)

    @property
    def clock_age(self) -> float:
        """Seconds since the servers' clock was read."""
        return time.monotonic() - self._sample[1]

    def now_us(self) -> int:
        """The servers' clock in microseconds: what it shows, or a little less, never more.

        As long as it is not set, and goes right within 1 %; each write reads it anew.
        """
        then_us, noted = self._sample
        return then_us + int((time.monotonic() - noted) * (1 - DRIFT) * MICROSECOND)

    # Watches

    def watcher(self, path: str, wake: Callable[[str], None]) -> Callable[[Any], None]:
        """What kazoo is to call when something happens to the node. One for each path: kazoo
        keeps each that it is given until then."""

        def on_event(event: Any) -> None:
            self._watchers.pop(path, None)
            wake(path)

        return self._watchers.setdefault(path, on_event)

    def server_mode(self) -> str:
        """Whether the server is "standalone", "leader" or "follower"; "" if it does not tell."""
        with suppress(Exception):
            for line in self._client.command(b"srvr").splitlines():
                if line.startswith("Mode: "):
                    return str(line.removeprefix("Mode: ").strip())
        return ""

    # The end

    def close(self) -> None:
        """Tell the ensemble goodbye. Waits for its answer for a moment."""
        self.dead = True
        self._begin_goodbye().join(GOODBYE)

    def _begin_goodbye(self) -> threading.Thread:
        farewell = threading.Thread(target=self._say_goodbye, name="distlocks-goodbye", daemon=True)
        # At the very end of the interpreter it is too late for new threads.
        with suppress(RuntimeError):
            farewell.start()
        return farewell

    def _say_goodbye(self) -> None:
        with suppress(Exception):
            self._client.stop()
        with suppress(Exception):
            self._client.close()


class Talk(NamedTuple):
    """A session, for as long as one verb may take."""

    session: Session
    # On the monotonic clock.
    give_up: float

    def ask(self, *sends: Send) -> list[Any]:
        """See Session.ask()."""
        return self.session.ask(self.give_up, *sends)


class Transaction:
    """Changes that are made together or not at all."""

    def __init__(self, talk: Talk) -> None:
        self._changes: list[Callable[[Any], None]] = []
        self._session = talk.session
        # Others take the claims of a dead session: no change may come after that.
        self.check(self._session.paths.session(self._session.name))

    def check(self, path: str, version: int = -1) -> None:
        self._changes.append(lambda t: t.check(path, version))

    def set(self, path: str, data: bytes, version: int = -1) -> None:
        self._changes.append(lambda t: t.set_data(path, data, version))

    def create(self, path: str, data: bytes) -> None:
        self._changes.append(lambda t: t.create(path, data))

    def delete(self, path: str, version: int = -1) -> None:
        self._changes.append(lambda t: t.delete(path, version))

    def send(self, client: Any) -> Any:
        """To be given to ask()."""
        transaction = client.transaction()
        for change in self._changes:
            change(transaction)
        return transaction.commit_async()

    def outcome(self, answer: Any) -> Outcome:
        """What the answer of ask() says. Interrupted if the session is dead."""
        if isinstance(answer, Exception):
            return Outcome(answer, 0)
        for place, result in enumerate(answer):
            if isinstance(result, Exception) and not isinstance(result, BYSTANDERS):
                if place == 0:
                    self._session.die()
                    raise Interrupted("the session is dead", in_doubt=False)
                if not isinstance(result, ANSWERS):
                    raise self._session.refused(result)
                return Outcome(result, 0)
        state = 0
        for result in answer:
            if isinstance(result, ZnodeStat):
                self._session.note_time(result)
                state = result.mzxid
        return Outcome(None, state)


class Outcome(NamedTuple):
    """What became of a transaction."""

    # The first thing that stood in its way.
    failure: Exception | None
    # The state of every node that it has changed: see Held.state.
    state: int
