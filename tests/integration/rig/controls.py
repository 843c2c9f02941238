"""Locks broken on purpose, one fault each: a rig that does not catch them proves nothing.

Each is called in a worker before it has used the backend, and changes the real one there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from django.db.backends.base.base import BaseDatabaseWrapper

from distlocks import waiting
from distlocks.backends.database import mariadb, postgresql, sqlite
from distlocks.backends.database.channels import Session
from distlocks.backends.database.dialect import Taken
from distlocks.backends.database.listener import HELLO
from distlocks.claims import Claim, Request, to_us
from distlocks.clock import lease_now
from distlocks.identity import new_owner_id

if TYPE_CHECKING:
    from tests.integration.rig.worker import Worker

IS_LIVE = r"expires_at > \{us\} AND owner_id <> %\(owner\)s"
IS_FREE = r"l\.expires_at <= \{us\} OR l\.owner_id = excluded\.owner_id"
IS_FREE_ON_MARIADB = r"expires_at <= VALUES\(acquired_at\)"


def ignores_expiry() -> None:
    """An acquire that takes the key whether or not somebody has it."""
    for module in (postgresql, sqlite):
        module.ACQUIRE = altered(module.ACQUIRE, (IS_LIVE, "false"), (IS_FREE, "true"))
    _alter_mariadb("true")


def never_takes_over() -> None:
    """An acquire that takes only what was released."""
    for module in (postgresql, sqlite):
        module.ACQUIRE = altered(
            module.ACQUIRE,
            (IS_LIVE, "expires_at > 0 AND owner_id <> %(owner)s"),
            (IS_FREE, "l.expires_at = 0"),
        )
    _alter_mariadb("expires_at = 0")


def _alter_mariadb(is_free: str) -> None:
    mariadb.ACQUIRE = altered(mariadb.ACQUIRE, (IS_FREE_ON_MARIADB, is_free))
    mariadb.OURS = altered(mariadb.OURS, (IS_FREE_ON_MARIADB, is_free))


def values_from_before_the_wait() -> None:
    """An acquire that has read the clock before it waits for the row."""
    postgresql.ACQUIRE = altered(
        postgresql.ACQUIRE,
        (r"CASE WHEN again THEN l\.fencing_token ELSE .* END", "excluded.fencing_token"),
        (r"CASE WHEN again THEN l\.acquired_at ELSE n END", "excluded.acquired_at"),
        (r"n \+ %\(hold\)s,(?=\s+excluded)", "excluded.expires_at,"),
    )
    # However long the other one takes.
    postgresql.BOUNDED = altered(postgresql.BOUNDED, (r"'\d+ms'", "'20s'"))
    # There, a statement that waits has always read the clock before.
    mariadb.NOT_WAITING = ""


def tells_nobody() -> None:
    """A release that wakes none of the sleepers in other processes."""
    announce = postgresql.PostgreSQL.announce

    def only_tests(self: postgresql.PostgreSQL, session: Session, text: str) -> None:
        if text.startswith(HELLO):
            announce(self, session, text)

    postgresql.PostgreSQL.announce = only_tests  # type: ignore[method-assign]
    # No longer than the test needs.
    waiting.MAX_SLEEP = 1.5


def altered(text: str, *changes: tuple[str, str]) -> str:
    """The text with each pattern replaced; every one of them must be there."""
    for pattern, replacement in changes:
        changed = re.sub(pattern, replacement, text)
        assert changed != text, f"the statement has no {pattern!r} any more: adapt the control"
        text = changed
    return text


def latch(connection: BaseDatabaseWrapper, key: str) -> None:
    """Have the row of a key in the hands until the transaction ends."""
    with connection.cursor() as cursor:
        column = connection.ops.quote_name("key")
        cursor.execute(f"SELECT 1 FROM distlocks_lock WHERE {column} = %s FOR UPDATE", [key])
        assert cursor.fetchone(), f"there is no row of {key}"


def grant_and_release(worker: Worker, backend: Any, key: str, ttl: float) -> None:
    """A hold of no length inside an open transaction, by the dialect's own statements."""
    from django.db import connections

    from distlocks.waiting import lease_deadline

    session = Session(connections[worker.database])
    owner = new_owner_id()
    worker.journal.write("ask", keys=[key])
    deadline = lease_deadline(lease_now(), ttl)
    request = Request(claims=(Claim(key),), owner_id=owner, ttl_us=to_us(ttl))
    taken = backend.dialect.acquire(session, key, request)
    assert isinstance(taken, Taken)
    worker.journal.write(
        "grant",
        tokens={key: taken.fencing_token},
        owner=owner,
        granted_us=taken.acquired_us,
        deadline=deadline,
        ttl=ttl,
    )
    server_us, read_at = worker.server_us(), lease_now()
    assert backend.dialect.release(session, key, owner, taken.fencing_token, 0).ours
    worker.journal.write(
        "end",
        keys=[key],
        owner=owner,
        server_us=server_us,
        read_at=read_at,
        released_us=worker.server_us(),
        deadline=deadline,
        ours=True,
    )
