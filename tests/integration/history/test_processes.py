"""The history under what befalls processes and databases: locks go on, and what is lost is told."""

import logging
from collections.abc import Iterator

import pytest
from django.conf import settings
from django.db import connections
from django.test import override_settings

from distlocks import db_lock, locks
from distlocks.history.journal import journal
from distlocks.models import LockEvent, LockRollup
from distlocks.testing import flush_history
from tests.integration.history.conftest import History
from tests.servers import session
from tests.servers.children import Spawner
from tests.servers.postgres import PostgresServer
from tests.waiting import eventually

# In a process that is no test's, the journal's own thread writes.
LOCKS = """
from distlocks import db_lock
for number in range(5):
    with db_lock(f"{key}:{number}"):
        pass
held = db_lock(key).acquire()
assert db_lock(key, timeout=0).try_acquire() is None
"""
DONE = """
print("done")
input()
"""
FAIL_ONCE = """
from distlocks.history.journal import journal

def fail(now):
    journal.chores.remove(fail)
    print("failed")
    raise SystemExit

journal.chores.append(fail)
"""
FORK = """
import os
child = os.fork()
with db_lock(f"{key}:{child}"):
    pass
if child:
    os.waitpid(child, 0)
else:
    from distlocks.history.journal import journal
    journal.finish(10)
    os._exit(0)
"""
STAND_STILL = """
import threading
from distlocks.history import tables
stands, go = threading.Event(), threading.Event()
write = tables.write_events

def stand(*args):
    stands.set()
    go.wait()
    write(*args)

tables.write_events = stand
"""
LOCK_BESIDE_IT = """
assert stands.wait(20)
for number in range(5):
    with db_lock(f"{key}:{number}"):
        pass
print("locked")
input()
go.set()
"""


@pytest.fixture(params=["default", "postgres", "mariadb"])
def using(databases: None, request: pytest.FixtureRequest) -> str:
    using: str = request.param
    LockEvent.objects.using(using).delete()
    LockRollup.objects.using(using).delete()
    return using


def kept(using: str) -> dict[str, str]:
    """The environment of a process whose locks have their history there."""
    return {"DISTLOCKS_TEST_HISTORY": using}


def kinds(using: str) -> list[str]:
    return list(LockEvent.objects.using(using).order_by("id").values_list("kind", flat=True))


def acquired(using: str) -> int:
    rows = LockRollup.objects.using(using).filter(pattern="", span=3600)
    return sum(rows.values_list("acquired", flat=True))


def test_what_is_left_is_written_when_the_interpreter_exits(
    using: str, spawn: Spawner, key: str
) -> None:
    spawn(LOCKS, key=key, env=kept(using)).result()
    assert kinds(using) == ["contended"]
    assert acquired(using) == 6


def test_it_is_written_while_the_process_goes_on(using: str, spawn: Spawner, key: str) -> None:
    child = spawn(LOCKS + DONE, key=key, env=kept(using))
    child.expect("done")
    eventually(lambda: kinds(using) == ["contended"])
    eventually(lambda: acquired(using) == 6)
    child.kill()


def test_a_look_that_fails_is_not_the_last(spawn: Spawner, using: str, key: str) -> None:
    """Whatever ends the thread's work: it goes on with the next."""
    child = spawn(FAIL_ONCE + LOCKS + DONE, key=key, env=kept(using))
    child.expect("failed")
    eventually(lambda: acquired(using) == 6)
    child.kill()


def test_a_forked_process_writes_its_own_and_nothing_twice(
    spawn: Spawner, using: str, key: str
) -> None:
    spawn(LOCKS + FORK, key=key, env=kept(using)).result()
    assert kinds(using) == ["contended"]
    assert acquired(using) == 8


# The database of the history goes away


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server to be killed at will."""
    server = session.private(PostgresServer)
    if server is None:
        pytest.skip("there is no PostgreSQL here that is ours to kill")
    with server:
        yield server


@pytest.fixture
def far(
    databases: None, own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[History]:
    """The history is there, the locks are not."""
    database = dict(connections["postgres"].settings_dict)
    monkeypatch.setitem(connections.databases, "far", database | own_server.database("postgres"))
    entry = {**settings.DISTLOCKS["default"], "HISTORY_DAYS": 30, "HISTORY_DATABASE": "far"}
    with override_settings(DISTLOCKS={"default": entry}):
        journal._reset()
        yield History("default", "far")
        journal._reset()
        locks.close_all()
    connections["far"].close()
    del connections["far"]


def test_locks_go_on_and_what_does_not_fit_is_counted_and_told(
    far: History,
    own_server: PostgresServer,
    key: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distlocks.history.ledger.MAX_ORDINARY", 10)
    # Its tables are missing at first.
    for _ in range(2):
        with db_lock(key):
            pass
        assert not journal.flush()
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "manage.py migrate distlocks --database far" in told.getMessage()
    with connections["far"].schema_editor() as editor:
        editor.create_model(LockEvent)
        editor.create_model(LockRollup)
    assert journal.flush()
    assert far.counted("")["acquired"] == 2

    caplog.clear()
    connections["far"].close()
    own_server.kill()
    lease = db_lock(key).acquire()
    for _ in range(15):
        assert db_lock(key, timeout=0).try_acquire() is None
    lease.release()
    for _ in range(3):
        assert not journal.flush()
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "cannot be written to the database 'far'" in told.getMessage()

    caplog.clear()
    own_server.start()
    flush_history()
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "again; 5 events were lost" in told.getMessage()
    assert far.kinds(key) == ["contended"] * 10
    counted = far.counted("")
    assert (counted["contended"], counted["dropped"], counted["acquired"]) == (15, 5, 3)


def test_a_database_that_hangs_keeps_no_lock_waiting(using: str, spawn: Spawner, key: str) -> None:
    """The thread that writes stands in a statement; locks are taken and released beside it."""
    child = spawn(STAND_STILL + LOCKS + LOCK_BESIDE_IT, key=key, env=kept(using))
    child.expect("locked")
    assert kinds(using) == []
    child.send()
    child.result()
    assert acquired(using) == 11
