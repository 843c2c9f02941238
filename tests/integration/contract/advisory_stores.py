"""A store of PostgreSQL's own locks, and what tests do to them behind the library's back."""

from types import SimpleNamespace
from typing import Any, cast

from django.db import connections
from django.db.models import F

from distlocks import Lease
from distlocks.backends.advisory import AdvisoryBackend
from distlocks.backends.advisory.sql import OF, lock_id
from distlocks.claims import to_us
from distlocks.models import AdvisoryLock
from tests.integration.contract.stores import Store
from tests.waiting import eventually

# Sessions that have one of these locks are ended, as the server does with one that is idle for
# longer than its lease.
END_SESSIONS = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_locks
WHERE locktype = 'advisory' AND objsubid = 1 AND granted
  AND (classid::bigint << 32) | objid::bigint = ANY(%s) AND (%s = '{}' OR pid = ANY(%s))
"""


class AdvisoryStore(Store):
    """See Store."""

    reports_the_dead = False
    # A holder's session ends, and all of its lease with it.
    frees_single_keys = False
    most_leases = 30

    @property
    def advisory(self) -> AdvisoryBackend:
        return cast(AdvisoryBackend, self.backend)

    def rows(self, *keys: str) -> Any:
        """Of the keys, and of their sharers."""
        every = AdvisoryLock.objects.using(self.using)
        names = [self.backend.prefix + key for key in keys]
        found = every.filter(name__in=names)
        for name in names:
            found |= every.filter(name__startswith=name + OF)
        return found

    def row(self, key: str) -> Any:
        name = self.backend.prefix + key
        row = self.aside(lambda: AdvisoryLock.objects.using(self.using).get(name=name))
        return SimpleNamespace(expires_at=row.expires_at if self.sessions(key) else 0)

    def execute(self, sql: str, *params: Any) -> list[Any]:
        def ask() -> list[Any]:
            with connections[self.using].cursor() as cursor:
                cursor.execute(sql, params)
                return cursor.fetchall()

        found: list[Any] = self.aside(ask)
        return found

    def sessions(self, key: str) -> list[int]:
        """Which sessions have the key's lock."""
        sql = """SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted
                 AND (classid::bigint << 32) | objid::bigint = %s"""
        return [pid for (pid,) in self.execute(sql, lock_id(self.backend.prefix + key))]

    def end_sessions(self, *keys: str, pids: list[int] | None = None) -> None:
        numbers = [lock_id(self.backend.prefix + key) for key in keys]
        self.execute(END_SESSIONS, numbers, pids or [], pids or [])

    def age(self, seconds: float, *keys: str) -> None:
        """Sessions that have been idle for longer than their leases last come to their end."""
        shift = to_us(seconds)
        self.aside(lambda: self._shift(self.rows(*keys), shift))
        late = """SELECT session FROM distlocks_advisorylock WHERE session <> 0 AND name = ANY(%s)
                  AND expires_at < extract(epoch from clock_timestamp()) * 1000000"""
        for key in keys:
            names = [row.name for row in self.aside(lambda key=key: list(self.rows(key)))]
            if pids := [pid for (pid,) in self.execute(late, names)]:
                self.end_sessions(key, pids=pids)

    @staticmethod
    def _shift(rows: Any, shift: int) -> None:
        rows.update(acquired_at=F("acquired_at") - shift, expires_at=F("expires_at") - shift)
        for name in ("cools_until", "shared_until"):
            rows.exclude(**{name: 0}).update(**{name: F(name) - shift})

    def expire_claims(self, key: str, *leases: Lease) -> None:
        names = [f"{self.backend.prefix}{key}{OF}{lease.owner_id}" for lease in leases]
        found = AdvisoryLock.objects.using(self.using).filter(name__in=names)
        pids = self.aside(lambda: list(found.values_list("session", flat=True)))
        self.end_sessions(key, pids=pids)
        self.aside(lambda: found.update(expires_at=1))

    def set_clock_back(self, seconds: float, *keys: str) -> None:
        later = F("fencing_token") + to_us(seconds)
        self.aside(lambda: self.rows(*keys).update(fencing_token=later))

    def eventually_waiting(self, key: str, count: int) -> None:
        """Return once so many stand in the server's queue for the key."""
        sql = """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
                 AND (classid::bigint << 32) | objid::bigint = %s"""
        eventually(lambda: self.execute(sql, lock_id(self.backend.prefix + key)) == [(count,)])
