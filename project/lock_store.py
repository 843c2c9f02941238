"""Where the demo's locks are, made ready: its database, Redis or ZooKeeper (DEMO_BACKEND)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from django.conf import settings
from django.core.cache import caches

from distlocks import BackendUnavailable, locks
from project.redis_server import running_redis
from project.redis_url import address, with_database
from project.servers import ServerFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class LockStore:
    """What the server processes have to know of it, and people."""

    environment: Mapping[str, str] = field(default_factory=dict)
    # Host and port; nothing if the locks are elsewhere.
    redis: str = ""


@contextlib.contextmanager
def lock_store(say: Callable[[str], None]) -> Iterator[LockStore]:
    """The store, granting locks; as long as the context lasts if it is a server of our own."""
    try:
        with contextlib.ExitStack() as stack:
            if settings.LOCKS_IN == "database":
                store = LockStore()
            elif settings.LOCKS_IN == "zookeeper":
                # The servers find it as this process does; that it answers is all there is to see.
                locks["default"].holders(limit=1)
                store = LockStore()
            elif settings.REDIS_URL:
                store = _at(settings.REDIS_URL)
                _wait_until_it_grants(store.redis, say)
            else:
                url = stack.enter_context(running_redis())
                stack.enter_context(_pointed_to(url))
                store = _at(url)
                # Nobody can have a lease from before this server's start.
                locks["default"].quarantine(end=True)
            yield store
    except BackendUnavailable as error:
        raise ServerFailed(str(error)) from error


def _at(url: str) -> LockStore:
    return LockStore(environment={"DEMO_REDIS_URL": url}, redis=address(url))


def _wait_until_it_grants(where: str, say: Callable[[str], None]) -> None:
    left = locks["default"].quarantine()
    if left:
        say(
            f"Redis at {where} has no memory of locks from before: it grants the first in "
            f"{left:.0f} s, when none from before can be held any more."
        )
    while left:
        time.sleep(left)
        left = locks["default"].quarantine()


@contextlib.contextmanager
def _pointed_to(url: str) -> Iterator[None]:
    """Points this process' locks to a server that started after its settings were read."""
    cache = settings.CACHES["locks"]
    former = cache["LOCATION"]
    cache["LOCATION"] = with_database(url, 1)
    _forget()
    try:
        yield
    finally:
        cache["LOCATION"] = former
        _forget()


def _forget() -> None:
    locks.close_all()
    with contextlib.suppress(AttributeError):
        del caches["locks"]
