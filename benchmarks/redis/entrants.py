"""Who is compared: each as its own documentation uses it, for leases of 30 s."""

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from threading import local
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from django.conf import settings

from distlocks import db_lock

TTL = 30
# Longer than anything that is measured; no longer than the lease, which a peer insists on.
PATIENCE = 30
Cycle = Callable[[], object]

COMPARE_AND_DELETE = """
if redis.call("get", KEYS[1]) == ARGV[1] then
    return redis.call("del", KEYS[1])
end
return 0
"""


class Entrant(ABC):
    """One way to have a lock on Redis, in this process."""

    name: ClassVar[str]
    # What has to be installed, and what is to be known where it is not.
    module: ClassVar[str] = "redis"
    missing: ClassVar[str] = ""
    # Beside a name and an expiry.
    carries: ClassVar[str]

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def cycle(self, key: str) -> Cycle:
        """What acquires and releases, with nobody else there."""

    @abstractmethod
    def attempt(self, key: str) -> Any:
        """One try: what release() wants, or None."""

    @abstractmethod
    def release(self, held: Any) -> None: ...

    def acquire(self, key: str) -> Any:
        """Wait until it is free; what release() wants."""
        raise NotImplementedError(f"{self.name} cannot wait")

    # Of the first holder, whom those who wait find there.

    def hold(self, key: str) -> Any:
        held = self.attempt(key)
        assert held is not None, f"{key} is held already"
        return held

    def clear(self, key: str) -> None:
        """Nobody wants the key any more."""


class Ours(Entrant):
    name = "distlocks"
    carries = "token, owner, host, pid, thread"

    def cycle(self, key: str) -> Cycle:
        def cycle() -> None:
            with db_lock(key, backend="redis"):
                pass

        return cycle

    def attempt(self, key: str) -> Any:
        return db_lock(key, backend="redis", timeout=0).try_acquire()

    def acquire(self, key: str) -> Any:
        return db_lock(key, backend="redis", timeout=PATIENCE).acquire()

    def release(self, held: Any) -> None:
        assert held.release(), f"{held!r} was lost"


# Floors


class Socket(Entrant):
    """A correct lock for one thread with as little Python as that takes: bytes out, bytes in."""

    name = "bare socket"
    carries = "owner"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        parts = urlsplit(url)
        where = (parts.hostname or "127.0.0.1", parts.port or 6379)
        self._socket = socket.create_connection(where, 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if parts.password:
            user = [unquote(parts.username)] if parts.username else []
            assert self._ask(packed("AUTH", *user, unquote(parts.password))) == b"+OK\r\n"
        if database := parts.path.strip("/"):
            assert self._ask(packed("SELECT", database)) == b"+OK\r\n"
        answer = self._ask(packed("SCRIPT", "LOAD", COMPARE_AND_DELETE))
        self._script = answer.splitlines()[1].decode()
        self._process, self._count = uuid4().hex[:16], 0

    def cycle(self, key: str) -> Cycle:
        send, receive = self._socket.sendall, self._socket.recv
        count = 0
        # Twice the length of what stands for the owner: unique for each acquire.
        owner = f"{self._process}%012d"
        acquire = packed("SET", key, "?" * 28, "NX", "PX", str(TTL * 1000))
        release = packed("EVALSHA", self._script, "1", key, "?" * 28)
        acquire = acquire.replace(b"?" * 28, owner.encode())
        release = release.replace(b"?" * 28, owner.encode())

        def cycle() -> None:
            nonlocal count
            count += 1
            send(acquire % count)
            if receive(64) != b"+OK\r\n":
                raise RuntimeError("the bare socket has not got its lock")
            send(release % count)
            if receive(64) != b":1\r\n":
                raise RuntimeError("the bare socket has lost its lock")

        return cycle

    def attempt(self, key: str) -> Any:
        self._count += 1
        owner = f"{self._process}{self._count:012d}"
        asked = packed("SET", key, owner, "NX", "PX", str(TTL * 1000))
        return (key, owner) if self._ask(asked) == b"+OK\r\n" else None

    def release(self, held: Any) -> None:
        assert self._ask(packed("EVALSHA", self._script, "1", *held)) == b":1\r\n"

    def _ask(self, request: bytes) -> bytes:
        self._socket.sendall(request)
        return self._socket.recv(256)


def packed(*words: str) -> bytes:
    """A request as Redis reads it."""
    parts = [f"*{len(words)}\r\n".encode()]
    for word in map(str.encode, words):
        parts.append(b"$%d\r\n%s\r\n" % (len(word), word))
    return b"".join(parts)


class Token(Entrant):
    """A list with one element, which whoever takes it pushes back: no lease, but a queue."""

    name = "BLPOP/RPUSH"
    carries = "nothing"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._local = local()

    @property
    def _client(self) -> Any:
        """One connection for each thread, not shared and so not locked."""
        import redis

        if not hasattr(self._local, "client"):
            self._local.client = redis.Redis.from_url(
                self.url, single_connection_client=True, **settings.CLIENT
            )
        return self._local.client

    def cycle(self, key: str) -> Cycle:
        raise NotImplementedError(f"{self.name} is for those who wait")

    def attempt(self, key: str) -> Any:
        return key if self._client.lpop(key) else None

    def acquire(self, key: str) -> Any:
        return key if self._client.blpop([key], PATIENCE) else _in_vain(key)

    def release(self, held: Any) -> None:
        self._client.rpush(held, "token")

    def hold(self, key: str) -> Any:
        return key

    def clear(self, key: str) -> None:
        self._client.delete(key)


# Peers


class WithClient(Entrant):
    """What goes through a client of redis-py, with its own pool of connections."""

    def __init__(self, url: str) -> None:
        import redis

        super().__init__(url)
        self.client = redis.Redis.from_url(url, **settings.CLIENT)


class ByHand(WithClient):
    name = "redis-py by hand"
    carries = "owner"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._script = self.client.script_load(COMPARE_AND_DELETE)

    def cycle(self, key: str) -> Cycle:
        def cycle() -> None:
            self.release(self.attempt(key))

        return cycle

    def attempt(self, key: str) -> Any:
        owner = uuid4().hex
        return (key, owner) if self.client.set(key, owner, nx=True, px=TTL * 1000) else None

    def release(self, held: Any) -> None:
        if self.client.evalsha(self._script, 1, *held) != 1:
            raise RuntimeError(f"{held} was lost")


class LockObject(WithClient):
    """A peer whose lock is an object with acquire() and release()."""

    # What acquire() calls the seconds to wait, and how another thread may release.
    patience = "timeout"
    handed_on: ClassVar[dict[str, Any]] = {}

    def lock(self, key: str, **options: Any) -> Any:
        raise NotImplementedError

    def cycle(self, key: str) -> Cycle:
        def cycle() -> None:
            with self.lock(key):
                pass

        return cycle

    def attempt(self, key: str) -> Any:
        lock = self.lock(key, **self.handed_on)
        return lock if lock.acquire(blocking=False) else None

    def acquire(self, key: str) -> Any:
        lock = self.lock(key, **self.handed_on)
        return lock if lock.acquire(**{self.patience: PATIENCE}) else _in_vain(key)

    def release(self, held: Any) -> None:
        held.release()


class RedisPyLock(LockObject):
    name = "redis-py Lock"
    carries = "owner"
    patience = "blocking_timeout"
    handed_on: ClassVar[dict[str, Any]] = {"thread_local": False}

    def lock(self, key: str, **options: Any) -> Any:
        return self.client.lock(key, timeout=TTL, **options)


class DjangoRedis(RedisPyLock):
    name = "django-redis"
    module = "django_redis"
    carries = "owner"

    def __init__(self, url: str) -> None:
        from django.core.cache import caches

        Entrant.__init__(self, url)
        # Of this thread; but the connections are of a pool for all.
        self._caches = caches

    def lock(self, key: str, **options: Any) -> Any:
        return self._caches["default"].lock(key, timeout=TTL, **options)


class PythonRedisLock(LockObject):
    name = "python-redis-lock"
    module = "redis_lock"
    carries = "owner"

    def lock(self, key: str, **options: Any) -> Any:
        import redis_lock

        return redis_lock.Lock(self.client, key, expire=TTL, **options)


class RedlockNg(Entrant):
    name = "redlock-ng"
    module = "redlock"
    missing = (
        "it insists on a redis-py below 6; "
        "`pip install --no-deps redlock-ng pydantic` brings it beside a newer one"
    )
    carries = "owner"

    def __init__(self, url: str) -> None:
        from redlock import Redlock

        super().__init__(url)
        self._redlock, self._once = Redlock([url]), Redlock([url], retry_count=0)

    def cycle(self, key: str) -> Cycle:
        def cycle() -> None:
            with self._redlock.lock(key, ttl=TTL * 1000) as lock:
                assert lock.valid

        return cycle

    def attempt(self, key: str) -> Any:
        return self._once.acquire(key, TTL * 1000)

    def acquire(self, key: str) -> Any:
        return self._redlock.acquire(key, TTL * 1000, blocking=True)

    def release(self, held: Any) -> None:
        self._redlock.release(held)


class Pottery(LockObject):
    name = "pottery"
    module = "pottery"
    carries = "owner"

    def lock(self, key: str, **options: Any) -> Any:
        from pottery import Redlock

        return Redlock(key=key, masters={self.client}, auto_release_time=TTL)


def _in_vain(key: str) -> Any:
    raise TimeoutError(f"{key} could not be had within {PATIENCE} s")


PEERS = (RedisPyLock, PythonRedisLock, DjangoRedis, RedlockNg, Pottery)
# One that polls, which takes long, and the one that does not.
FEW_PEERS = (RedisPyLock, PythonRedisLock)
KINDS: tuple[type[Entrant], ...] = (Ours, Socket, Token, ByHand, *PEERS)


def present(*kinds: type[Entrant]) -> tuple[list[str], list[str]]:
    """The names of those that can be had here, and notes about the others."""
    found = [kind.name for kind in kinds if find_spec(kind.module)]
    notes = [
        f"{kind.name} is not installed{kind.missing and f': {kind.missing}'}."
        for kind in kinds
        if kind.name not in found
    ]
    return found, notes


@cache
def entrant(name: str) -> Any:
    """The one of this name, in this process."""
    (kind,) = (kind for kind in KINDS if kind.name == name)
    return kind(settings.REDIS_URL)
