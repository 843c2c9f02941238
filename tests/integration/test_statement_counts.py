"""What a lock costs its database when nobody competes: one statement to take, one to give back."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections
from django.db.backends.signals import connection_created

from distlocks import db_lock, locks
from distlocks.models import Lock
from tests.servers.children import Spawner
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("databases")


# In a process that is no test: there, connections stay open, and what was prepared stays so.


class Statements:
    """Counts what is sent over the connections of the locks, and what over the caller's own."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.over_the_callers: list[str] = []
        connection_created.connect(self._watch)

    def _watch(self, connection: Any, **_: Any) -> None:
        is_callers = connection is connections[connection.alias]
        sent = self.over_the_callers if is_callers else self.sent

        def note(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
            sent.append(sql)
            return execute(sql, *args)

        connection.execute_wrappers.append(note)

    def of(self, act: Callable[[], Any]) -> list[str]:
        """Those that it takes."""
        begin = len(self.sent)
        act()
        return self.sent[begin:]


def measure(backend: str, using: str, key: str) -> dict[str, list[str]]:
    """The statements behind each thing that can be done with a lock."""
    statements = Statements()

    def lock(*keys: str) -> db_lock:
        return db_lock(*(keys or (key,)), timeout=0, backend=backend)

    # What is sent first has to be prepared first.
    with lock(f"{key} warm") as lease:
        lease.extend()
    found = {}
    held = None

    def acquire(*keys: str) -> None:
        nonlocal held
        held = lock(*keys).acquire()

    def ask() -> None:
        held.check()
        assert not held.lost
        assert held.remaining > 0
        assert held.fencing_token == held.fencing_tokens[key]

    found["acquire without a row"] = statements.of(acquire)
    found["denied"] = statements.of(lambda: lock().try_acquire())
    found["extend"] = statements.of(lambda: held.extend())
    found["ask"] = statements.of(ask)
    found["release"] = statements.of(lambda: held.release())
    found["release again"] = statements.of(lambda: held.release())
    found["acquire a free row"] = statements.of(acquire)
    # Over a connection of its own, which is not counted.
    change = Lock.objects.using(using).filter(key=key).update
    change(expires_at=1)
    found["acquire an expired row"] = statements.of(acquire)
    held.release()
    for number in (2, 5):
        keys = [f"{key} {n}" for n in range(number)]
        found[f"acquire {number} keys"] = statements.of(lambda keys=keys: acquire(*keys))
        found[f"release {number} keys"] = statements.of(lambda: held.release())
    own = len(statements.over_the_callers)
    with lock():
        locks[backend].holders(key)
    found["over the caller's connection"] = statements.over_the_callers[own:]
    return found


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def measured(
    request: pytest.FixtureRequest,
    django_db_setup: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """The store, and what each thing takes there."""
    using = {"sqlite": "default"}.get(request.param, request.param)
    spawner = Spawner(tmp_path_factory.mktemp("measured"))
    key = f"measured:{uuid.uuid4().hex}"
    yield request.param, spawner(measure, request.param, using, key).result()
    spawner.close()


Measured = tuple[str, dict[str, list[str]]]


@pytest.mark.parametrize(
    "what",
    ["acquire without a row", "acquire a free row", "acquire an expired row", "release"],
)
def test_a_lock_costs_one_statement_each_way(measured: Measured, what: str) -> None:
    _, found = measured
    assert len(found[what]) == 1, found[what]


def test_an_extension_costs_no_more_than_a_transaction(measured: Measured) -> None:
    store, found = measured
    # SQLite extends many at once, and so between a BEGIN and a COMMIT.
    assert len(found["extend"]) == (3 if store == "sqlite" else 1), found["extend"]


@pytest.mark.parametrize("keys", [2, 5])
def test_several_keys_cost_one_statement_each_and_a_transaction(
    measured: Measured, keys: int
) -> None:
    _, found = measured
    for what in (f"acquire {keys} keys", f"release {keys} keys"):
        assert len(found[what]) <= keys + 2, found[what]


def test_a_denied_try_costs_little(measured: Measured) -> None:
    store, found = measured
    # PostgreSQL answers at once who has it; SQLite is asked a second time.
    assert len(found["denied"]) == (2 if store == "sqlite" else 1), found["denied"]


@pytest.mark.parametrize("what", ["ask", "release again", "over the caller's connection"])
def test_what_needs_no_statement_sends_none(measured: Measured, what: str) -> None:
    _, found = measured
    assert found[what] == []


# A try that is denied


HOLDER = """
from distlocks import db_lock

with db_lock(key, backend=backend):
    print("holding")
    input()
"""


def writes_on_postgres() -> tuple[int, ...]:
    """Rows inserted, updated and deleted so far, once every ended session has reported."""
    # What a session has done is told when it ends, if not before.
    locks["postgres"].close()
    with connections["postgres"].cursor() as cursor:
        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND application_name <> 'holder'"
        )
        eventually(lambda: cursor.execute(others) or cursor.fetchone() == (0,))
        cursor.execute(
            "SELECT n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables"
            " WHERE relname = 'distlocks_lock'"
        )
        found = cursor.fetchone()
    assert found is not None
    return tuple(found)


@pytest.fixture
def held(key: str, spawn: Spawner) -> Iterator[str]:
    """A key that another process holds, long enough for its renewals not to come in between."""
    child = spawn(HOLDER, key=key, backend="postgres", env={"PGAPPNAME": "holder"})
    child.expect("holding")
    yield key
    child.send()
    child.result()


def test_a_denied_try_writes_nothing_on_postgresql(held: str) -> None:
    def row() -> list[Any]:
        with connections["postgres"].cursor() as cursor:
            cursor.execute("SELECT xmin, ctid, * FROM distlocks_lock WHERE key = %s", [held])
            return cursor.fetchall()

    version, before = row(), writes_on_postgres()
    for _ in range(5):
        assert db_lock(held, timeout=0, backend="postgres").try_acquire() is None
        assert db_lock(held, f"{held} 2", timeout=0, backend="postgres").try_acquire() is None
    assert locks["postgres"].holders(held)
    assert row() == version
    assert writes_on_postgres() == before
    # The numbers do tell.
    with db_lock(f"{held} 3", backend="postgres"):
        pass
    inserted, updated, deleted = before
    # A session tells them at its end, and another one may see it gone before.
    eventually(lambda: writes_on_postgres() == (inserted + 1, updated + 1, deleted))


def test_a_denied_try_writes_nothing_on_sqlite(key: str) -> None:
    def version() -> int:
        """Changes whenever another connection has committed a change."""
        with connections["default"].cursor() as cursor:
            cursor.execute("PRAGMA data_version")
            found: int = cursor.fetchone()[0]
            return found

    with db_lock(key):
        before = version()
        for _ in range(5):
            assert db_lock(key, timeout=0).try_acquire() is None
        assert locks["default"].holders(key)
        assert version() == before
    assert version() != before
