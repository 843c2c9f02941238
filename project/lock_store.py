"""Where the demo's locks are, made ready: its database, or servers beside it (DEMO_BACKEND)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from django.conf import settings
from django.core.cache import caches
from django.core.management import call_command

from distlocks import BackendUnavailable, locks
from project.lock_settings import lock_settings
from project.redis_server import running_redis
from project.redis_url import address
from project.servers import ServerFailed

# Of Redlock, as many servers as are brought: two may be down.
NODES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStore:
    """What the server processes have to know of it, and people."""

    environment: Mapping[str, str] = field(default_factory=dict)
    # For people, as in "locks in …"; nothing if they are in the demo's own database.
    where: str = ""


@contextlib.contextmanager
def lock_store(say: Callable[[str], None]) -> Iterator[LockStore]:
    """The store, granting locks; as long as the context lasts if its servers are our own."""
    try:
        with contextlib.ExitStack() as stack:
            environment = stack.enter_context(BRINGERS.get(settings.LOCKS_IN, _nothing)())
            for alias in set(settings.DATABASES) - {"default"}:
                call_command("migrate", database=alias, verbosity=0)
            store = LockStore(environment=environment, where=_where())
            if store.where:
                # Whoever does not answer is told of before any server is started.
                locks["default"].holders(limit=1)
            if locks["default"].supports_quarantine:
                if environment:
                    # Nobody can have a lease from before these servers' start.
                    locks["default"].quarantine(end=True)
                _wait_until_it_grants(store.where, say)
            yield store
    except BackendUnavailable as error:
        raise ServerFailed(str(error)) from error


@contextlib.contextmanager
def _nothing() -> Iterator[dict[str, str]]:
    yield {}


@contextlib.contextmanager
def _a_redis() -> Iterator[dict[str, str]]:
    """A server of our own, unless one was named; what names it."""
    if os.environ.get("DEMO_REDIS_URL"):
        yield {}
        return
    with running_redis() as url, _pointed_to({"DEMO_REDIS_URL": url}) as environment:
        yield environment


@contextlib.contextmanager
def _redlock_nodes() -> Iterator[dict[str, str]]:
    """Servers of our own, unless some were named; what names them."""
    if os.environ.get("DEMO_REDLOCK_URLS"):
        yield {}
        return
    with contextlib.ExitStack() as running:
        urls = [running.enter_context(running_redis()) for _ in range(NODES)]
        yield running.enter_context(_pointed_to({"DEMO_REDLOCK_URLS": ",".join(urls)}))


BRINGERS = {"redis": _a_redis, "redlock": _redlock_nodes}


def _where() -> str:
    options = settings.DISTLOCKS["default"]["OPTIONS"]
    if settings.LOCKS_IN == "redis":
        return f"Redis at {address(settings.CACHES['locks']['LOCATION'])}"
    if settings.LOCKS_IN == "redlock":
        return f"Redis at {', '.join(map(address, options['servers']))}"
    if settings.LOCKS_IN == "advisory":
        database = settings.DATABASES[options["using"]]
        return f"PostgreSQL at {database['HOST']}:{database['PORT']}"
    if settings.LOCKS_IN == "zookeeper":
        return f"ZooKeeper at {options['hosts']}"
    return ""


def _wait_until_it_grants(where: str, say: Callable[[str], None]) -> None:
    left = locks["default"].quarantine()
    if left:
        say(
            f"{where} has no memory of locks from before: it grants the first in {left:.0f} s, "
            f"when none from before can be held any more."
        )
    while left:
        time.sleep(left)
        left = locks["default"].quarantine()


@contextlib.contextmanager
def _pointed_to(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Points this process' locks to servers that started after its settings were read."""
    former = dict(settings.DISTLOCKS), dict(settings.CACHES)
    found = lock_settings(settings.LOCKS_IN, environment)
    settings.DISTLOCKS |= {"default": found.locks, "turns": found.turns}
    settings.CACHES |= found.caches
    _forget()
    try:
        yield environment
    finally:
        settings.DISTLOCKS, settings.CACHES = former
        _forget()


def _forget() -> None:
    locks.close_all()
    with contextlib.suppress(AttributeError):
        del caches["locks"]
