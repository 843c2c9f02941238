"""Where guarded data lives, which store its locks are in, and leases of any token."""

import time
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.db import connections
from django.db.utils import DEFAULT_DB_ALIAS
from django.test.utils import CaptureQueriesContext, override_settings

from distlocks import Lease, db_lock, locks
from distlocks.claims import Grant, Request, claims_on, to_us
from distlocks.clock import lease_now
from distlocks.fences import TABLE
from distlocks.identity import new_owner_id
from distlocks.models import LockGuard
from tests.servers.processes import wait_until
from tests.testapp.models import Account

SQLITE, POSTGRES, MARIADB = DEFAULT_DB_ALIAS, "postgres", "mariadb"
# Database aliases, and for each the store in that database.
DATABASES = {SQLITE: "sqlite", POSTGRES: "postgres", MARIADB: "mariadb"}
DAY_US = 86400 * 1_000_000


def now_us() -> int:
    return time.time_ns() // 1000


def forged(
    *keys: str, token: int | tuple[int, ...], ttl: float = 30, age: float = 0, alias: str = "memory"
) -> Lease:
    """A lease as a holder has it whom a broken lock, or its own long pause, has misled.

    `age` is how long ago it was granted, in seconds. The store knows nothing of it.
    """
    backend = locks[alias]
    tokens = token if isinstance(token, tuple) else (token,)
    request = Request(
        claims=claims_on([backend.prefix + key for key in keys]),
        owner_id=new_owner_id(),
        ttl_us=to_us(ttl),
    )
    grant = Grant(
        claims=request.claims,
        owner_id=request.owner_id,
        fencing_tokens=tokens,
        acquired_us=tokens[0],
    )
    return Lease(
        backend, grant, first_send=lease_now() - age, ttl=ttl, renew=False, request=request
    )


class Site:
    """One database with guarded data in it, and one store with the locks."""

    def __init__(self, using: str, backend: str) -> None:
        self.using = using
        self.backend = backend

    @property
    def vendor(self) -> str:
        return connections[self.using].vendor

    def lock(self, *keys: str, **options: Any) -> db_lock:
        return db_lock(*keys, backend=self.backend, **options)

    # The data

    def open_account(self, name: str, balance: int = 0) -> None:
        Account.objects.using(self.using).create(name=name, balance=balance)

    def balance(self, name: str) -> int:
        """Read on this thread's connection, in whatever transaction is open."""
        return Account.objects.using(self.using).get(name=name).balance

    def set_balance(self, name: str, balance: int) -> None:
        assert Account.objects.using(self.using).filter(name=name).update(balance=balance) == 1

    def deposit(self, name: str) -> None:
        """Read, change, write back: two at a time lose one."""
        self.set_balance(name, self.balance(name) + 1)

    # The guards

    def guard(self, key: str) -> int | None:
        """The highest token that has entered a guarded transaction of the key."""
        found = LockGuard.objects.using(self.using).filter(key=key).first()
        return found.token if found else None

    def raise_guard(self, key: str, token: int) -> None:
        LockGuard.objects.using(self.using).update_or_create(key=key, defaults={"token": token})

    def queries(self) -> CaptureQueriesContext:
        connections[self.using].ensure_connection()
        return CaptureQueriesContext(connections[self.using])


def statements(captured: CaptureQueriesContext) -> list[str]:
    """What was sent, in order: "guard", or the first word of anything else."""
    return [
        "guard" if TABLE in query["sql"] else query["sql"].split()[0].upper()
        for query in captured.captured_queries
    ]


def wait_for_a_waiter(using: str) -> None:
    """Return when some session's guard statement is with the server and does not come back.

    Asked on a connection of its own. To be used while a guarded transaction is open.
    """
    if connections[using].vendor == "postgresql":
        query = (
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
    else:
        # What InnoDB shows of its locks is refreshed only when nobody has looked for a while.
        query = (
            f"SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE() "
            f"AND id <> CONNECTION_ID() AND command = 'Query' AND info LIKE '%{TABLE}%'"
        )
    observer = connections[using].copy()
    observer.inc_thread_sharing()

    def waits() -> bool:
        with observer.cursor() as cursor:
            cursor.execute(query)
            return bool(cursor.fetchone()[0])

    try:
        wait_for(waits)
    finally:
        observer.close()


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    assert wait_until(condition, seconds), f"did not come about within {seconds} s"


def configured(store: str, **changes: Any) -> override_settings:
    """The store with other settings; by default, with all databases among its GUARD_DATABASES."""
    entries = dict(settings.DISTLOCKS)
    entries[store] = entries[store] | {"GUARD_DATABASES": list(DATABASES)} | changes
    return override_settings(DISTLOCKS=entries)
