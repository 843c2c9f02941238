"""Django's test runner, in a process of its own: what it creates, it must be able to drop."""

import uuid
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.servers.children import Child, Spawner
from tests.servers.postgres import PostgresServer

CLASSES = "tests.integration.test_testcase_classes"


class Run:
    """A run of Django's runner in a child, on databases that are nobody else's."""

    def __init__(self, spawn: Spawner, folder: Path, server: PostgresServer) -> None:
        self._spawn = spawn
        self._server = server
        # The settings name the databases after this folder.
        self.folder = folder / f"inner-{uuid.uuid4().hex[:12]}"
        self.folder.mkdir()

    def __call__(self, script: str, **arguments: Any) -> Child:
        return self._spawn(script, env={"DISTLOCKS_TEST_DIR": str(self.folder)}, **arguments)

    def left_over(self) -> list[str]:
        """Databases of the child's that are still there."""
        name = self.folder.name.replace("-", "_")
        with psycopg.connect(self._server.url, autocommit=True) as connection:
            rows = connection.execute(
                "SELECT datname FROM pg_database WHERE starts_with(datname, %s)", [name]
            )
            found = [row[0] for row in rows]
        for database in found:
            self._server.drop(database)
        return found + [path.name for path in self.folder.glob("*.sqlite3")]


@pytest.fixture
def run(spawn: Spawner, tmp_path: Path, postgres_server: PostgresServer) -> Run:
    return Run(spawn, tmp_path, postgres_server)


RUN_LABELS = """
from django.test.runner import DiscoverRunner

options = {"parallel": parallel, "test_name_patterns": patterns}
runner = DiscoverRunner(verbosity=1, interactive=False, **options)
result = runner.run_tests([label])
"""

# Around test classes that the script defines itself.
RUN_CLASS = """
import threading, unittest
from django.db import connections, transaction
from django.test import TestCase, TransactionTestCase
from django.test.runner import DiscoverRunner
from distlocks import db_lock, locks

{0}

runner = DiscoverRunner(verbosity=0, interactive=False)
runner.setup_test_environment()
databases = runner.setup_databases(aliases={{"postgres": False, "default": False}})
outcome = runner.run_suite(unittest.defaultTestLoader.loadTestsFromTestCase(Tests))
runner.teardown_databases(databases)
runner.teardown_test_environment()
result = [outcome.testsRun, [text for _, text in outcome.errors + outcome.failures]]
"""


def test_the_runner_runs_the_classes_and_drops_its_databases(run: Run) -> None:
    child = run(RUN_LABELS, label=CLASSES, parallel=0, patterns=["Case_sqlite", "_postgres"])
    assert child.result(50) == 0, child.errors
    assert run.left_over() == []


def test_runners_in_parallel_each_lock_in_their_own_database(run: Run) -> None:
    # Of a SQLite file in WAL mode, Django copies only what has been checkpointed.
    child = run(RUN_LABELS, label=CLASSES, parallel=2, patterns=["Case_postgres", "InTwoDatabases"])
    assert child.result(50) == 0, child.errors
    assert run.left_over() == []


def test_the_usual_databases_in_memory(spawn: Spawner) -> None:
    """As a project gets them that says nothing of its tests' databases."""
    child = spawn(
        RUN_LABELS,
        label=CLASSES,
        parallel=0,
        patterns=["_sqlite"],
        env={"DISTLOCKS_TEST_DIR": "", PostgresServer.url_variable: ""},
    )
    assert child.result(30) == 0, child.errors


def test_a_lease_that_a_test_forgot_does_not_keep_the_database(run: Run) -> None:
    tests = """
class Tests(TransactionTestCase):
    databases = {"postgres"}

    def test_forgets(self):
        self.lease = db_lock("forgotten", backend="postgres").acquire()

    def test_forgets_more(self):
        names = ["a", "b", "c"]
        type(self).leases = [db_lock(n, backend="portable_postgres").acquire() for n in names]
"""
    child = run(RUN_CLASS.format(tests))
    left = child.wait(50) and run.left_over()
    assert not left, child.errors
    assert child.result() == [2, []]
    assert run.left_over() == []


def test_what_goes_on_in_the_background_does_not_keep_the_database(run: Run) -> None:
    """Waiters that have listened, releases that are still under way, tests that fail."""
    tests = """
class Tests(TransactionTestCase):
    databases = {"postgres", "default"}

    def test_a_fails_under_its_lock(self):
        with db_lock("a", backend="postgres"), transaction.atomic(using="postgres"):
            with db_lock("b", backend="postgres"):
                self.fail("as it should")

    def test_b_takes_the_same_locks(self):
        with db_lock("a", "b", backend="postgres", timeout=0):
            pass

    def test_c_waits(self):
        lease = db_lock("awaited", backend="postgres").acquire()
        tokens = []

        def wait():
            with db_lock("awaited", backend="postgres", timeout=20) as mine:
                tokens.append(mine.fencing_token)
            connections.close_all()

        waiters = [threading.Thread(target=wait) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        assert db_lock("awaited", backend="postgres", timeout=0.3).try_acquire() is None
        lease.release()
        for waiter in waiters:
            waiter.join(20)
        assert len(tokens) == 3

    def test_d_commits_and_ends(self):
        for number in range(20):
            with transaction.atomic(using="postgres"):
                with db_lock(f"{number}", backend="postgres"):
                    pass
"""
    child = run(RUN_CLASS.format(tests))
    tests_run, (failure,) = child.result(50)
    assert tests_run == 4
    assert "as it should" in failure
    assert run.left_over() == []
