"""A fast path of a test's own, as each of its processes sees it, and what is done to its stores."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

from django.conf import settings
from django.db import connections
from django.test import override_settings

from distlocks import Lease, clock, db_lock, locks
from distlocks.backends.fastpath import FastPathBackend
from distlocks.claims import EXCLUSIVE, Request, claims_on, to_us
from distlocks.identity import new_owner_id
from distlocks.keys import check_key
from distlocks.models import Lock, LockAuthority, LockHolder
from distlocks.waiting import lease_deadline
from tests.servers.redis import RedisServer
from tests.settings import REDIS_BACKEND
from tests.waiting import eventually

T = TypeVar("T")

FAST = "fast"
FAST_PATH_BACKEND = "distlocks.backends.fastpath.FastPathBackend"
# Seconds. So short that the database takes over after two of them.
MAX_TTL, MODE_LEASE, SKEW, RETURN_AFTER = 1.0, 0.5, 0.2, 0.3
# Nobody pins, and the database has had the authority for long.
IN_DATABASE: dict[str, Any] = {"epoch": 7, "phase": "db", "pinned": False, "patience": 0}


class Scene:
    """Fast paths over one Redis, one table and one row.

    Each alias is what another process would be: it has a backend, and with it a view of the row,
    of its own.
    """

    def __init__(self, server: RedisServer, database: str, running: ExitStack) -> None:
        self.server = server
        # The alias of DISTLOCKS whose database keeps the row.
        self.database = database
        entry: Any = settings.DISTLOCKS[database]
        self.using = str(entry["OPTIONS"]["using"])
        self.name = f"authority-{uuid.uuid4().hex[:12]}"
        # The table is shared with other tests, whose leases are not to be waited for.
        self.prefix = f"{self.name}/"
        # Another client, also of a test on an event loop.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="beside-the-authority")
        running.callback(self._close)
        # A copy, to which aliases are added without ending what the others know.
        running.enter_context(override_settings(DISTLOCKS={**settings.DISTLOCKS}))
        self._add_redis(FAST, url=server.url)

    def _close(self) -> None:
        self.aside(connections.close_all)
        self._aside.shutdown()

    # Its processes

    @staticmethod
    def _add_redis(alias: str, **options: Any) -> str:
        settings.DISTLOCKS[f"{alias} redis"] = {"BACKEND": REDIS_BACKEND, "OPTIONS": options}
        return f"{alias} redis"

    def add(
        self,
        alias: str = FAST,
        *,
        max_ttl: float = MAX_TTL,
        database: str | None = None,
        redis: dict[str, Any] | None = None,
        **options: Any,
    ) -> FastPathBackend:
        """One more process, which may differ from others in its settings: `options` of the fast
        path, and those of its Redis in `redis`."""
        servers = f"{FAST} redis"
        if redis is not None:
            servers = self._add_redis(alias, **{"url": self.server.url, **redis})
        settings.DISTLOCKS[alias] = {
            "BACKEND": FAST_PATH_BACKEND,
            "TTL": max_ttl,
            "MAX_TTL": max_ttl,
            "KEY_PREFIX": self.prefix,
            "OPTIONS": {
                "redis": servers,
                "database": database or self.database,
                "namespace": self.name,
                "mode_lease": MODE_LEASE,
                "skew": SKEW,
                "return_after": RETURN_AFTER,
                **options,
            },
        }
        return self.backend_of(alias)

    @staticmethod
    def backend_of(alias: str) -> FastPathBackend:
        backend = locks[alias]
        assert isinstance(backend, FastPathBackend)
        return backend

    @property
    def backend(self) -> FastPathBackend:
        return self.backend_of(FAST)

    # What they do

    def lock(self, *keys: Any, alias: str = FAST, **options: Any) -> db_lock:
        return db_lock(*keys, backend=alias, **options)

    def hold(self, *keys: Any, **options: Any) -> Lease:
        """A lease that is had at once and, unless asked for, not extended."""
        return self.lock(*keys, **{"timeout": 0, "renew": False, **options}).acquire()

    def request(self, *keys: str, ttl: float = MAX_TTL, **more: Any) -> Request:
        mode, limit = more.pop("mode", EXCLUSIVE), more.pop("limit", 0)
        names = [self.prefix + check_key(key) for key in keys]
        more.setdefault("owner_id", new_owner_id())
        return Request(claims=claims_on(names, mode, limit), ttl_us=to_us(ttl), **more)

    # What becomes of it

    def aside(self, act: Callable[[], T]) -> T:
        """`act()` in a thread that has a connection of its own to the database."""
        return self._aside.submit(act).result(20)

    @property
    def rows(self) -> Any:
        return LockAuthority.objects.using(self.using).filter(name=f"{self.name}{{{self.prefix}}}")

    @property
    def row(self) -> LockAuthority:
        """As it is now."""
        found: LockAuthority = self.aside(lambda: self.rows.get())
        return found

    def change_row(self, **values: Any) -> None:
        """As another process, or a restored backup, would."""
        assert self.aside(lambda: self.rows.update(**values)) == 1

    def begin(self, **values: Any) -> None:
        """The row, before anybody has looked: in the database, unless told otherwise."""
        long_ago = clock.current().wall_us() - to_us(3600)
        row = {
            "name": f"{self.name}{{{self.prefix}}}",
            "since": long_ago,
            "mode_lease": to_us(MODE_LEASE),
            "max_ttl": to_us(MAX_TTL),
            **IN_DATABASE,
            **values,
        }
        self.aside(lambda: LockAuthority.objects.using(self.using).create(**row))

    def phase_of(self, alias: str = FAST) -> str:
        """Which phase the process knows; '' if none."""
        known = self.backend_of(alias).authority.known()
        return known.phase if known else ""

    def reaches(self, phase: str, alias: str = FAST, *, within: float = 15.0) -> None:
        """Return once the process knows that this is the phase."""
        eventually(lambda: self.phase_of(alias) == phase, within=within)

    def store_of(self, lease: Lease) -> str:
        """Which store has the lease: "database" or "redis"."""
        return self.aside(lambda: self._store_of(lease))

    def _store_of(self, lease: Lease) -> str:
        owner = {"owner_id": lease.owner_id}
        models = (Lock, LockHolder)
        if any(m._base_manager.using(self.using).filter(**owner).exists() for m in models):
            return "database"
        assert lease.owner_id in {one.owner_id for one in self.backend.redis.holders()}
        return "redis"


def sent_at(lease: Lease) -> float:
    """When the request that was granted was sent, on the lease clock."""
    return lease.deadline - lease_deadline(0.0, lease.ttl)


def until(moment: float) -> None:
    """Return once the lease clock shows the moment."""
    eventually(lambda: clock.lease_now() >= moment)


def numbered(key: str) -> Iterator[str]:
    """Keys beside `key`, one after the other."""
    number = 0
    while True:
        yield f"{key} {number}"
        number += 1
