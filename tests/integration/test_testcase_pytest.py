"""pytest-django's ways to a database, on every kind of store."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.db import connections, transaction

from distlocks import db_lock
from distlocks.models import Lock
from tests.integration.test_testcase_runner import Run
from tests.servers.children import Spawner
from tests.servers.postgres import PostgresServer
from tests.servers.watchdog import ROOT

BACKENDS = {
    "sqlite": "default",
    "portable_sqlite": "default",
    "postgres": "postgres",
    "portable_postgres": "postgres",
}
on_every_store = pytest.mark.parametrize(("backend", "using"), BACKENDS.items())
in_a_transaction = pytest.mark.django_db(databases=["default", "postgres"])
committed = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])


def rows_seen_elsewhere(key: str, using: str) -> int:
    def look() -> int:
        try:
            return Lock.objects.using(using).filter(key=key).count()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(look).result(20)


@on_every_store
@in_a_transaction
def test_db_keeps_the_lock_in_the_tests_transaction(backend: str, using: str, key: str) -> None:
    assert connections[using].in_atomic_block
    with db_lock(key, backend=backend, timeout=0):
        assert Lock.objects.using(using).filter(key=key).count() == 1
        assert db_lock(key, backend=backend, timeout=0).try_acquire() is None
    # What nobody else can see goes with the rollback.
    assert rows_seen_elsewhere(key, using) == 0


@on_every_store
@in_a_transaction
def test_db_and_a_transaction_of_the_users(backend: str, using: str, key: str) -> None:
    lock = db_lock(key, backend=backend, timeout=0)
    with transaction.atomic(using=using):
        with lock:
            pass
        assert lock.try_acquire() is None
    with lock:
        pass
    assert rows_seen_elsewhere(key, using) == 0


@on_every_store
@in_a_transaction
def test_callbacks_captured_by_the_fixture_are_the_users_own(
    backend: str,
    using: str,
    key: str,
    django_capture_on_commit_callbacks: pytest.FixtureRequest,
) -> None:
    lock, ran = db_lock(key, backend=backend, timeout=0), []

    def callback() -> None:
        with lock:
            ran.append(1)

    with (
        django_capture_on_commit_callbacks(using=using, execute=True) as callbacks,  # type: ignore[operator]
        transaction.atomic(using=using),
        lock,
    ):
        transaction.on_commit(callback, using=using)
    assert len(callbacks) == 1
    assert ran == [1]


@on_every_store
@committed
def test_transactional_db_commits_the_lock(backend: str, using: str, key: str) -> None:
    assert not connections[using].in_atomic_block
    lock = db_lock(key, backend=backend, timeout=0)
    with lock:
        assert rows_seen_elsewhere(key, using) == 1
    with transaction.atomic(using=using), lock:
        pass
    with lock:
        pass


@on_every_store
@committed
async def test_transactional_db_in_an_asynchronous_test(backend: str, using: str, key: str) -> None:
    lock = db_lock(key, backend=backend, timeout=0)
    async with lock:
        assert await lock.atry_acquire() is None
    async with lock:
        pass


INNER_TESTS = """
import pytest
from distlocks import db_lock
from distlocks.models import Lock

BOTH = ["default", "postgres"]

def leaves_nothing(backend):
    rows = Lock.objects.using(backend)
    assert not rows.exists()
    with db_lock("a", backend=backend):
        assert rows.count() == 1
    assert rows.count() == 1

@pytest.mark.django_db(databases=BOTH)
@pytest.mark.parametrize("again", range(2))
@pytest.mark.parametrize("backend", BOTH)
def test_db(backend, again):
    leaves_nothing(backend)

@pytest.mark.django_db(databases=BOTH, transaction=True)
@pytest.mark.parametrize("again", range(2))
@pytest.mark.parametrize("backend", BOTH)
def test_transactional_db(backend, again):
    leaves_nothing(backend)
"""


def test_a_run_of_pytest_leaves_nothing_and_drops_its_databases(
    tmp_path: Path, spawn: Spawner, postgres_server: PostgresServer
) -> None:
    """Tests under one key: each begins with an empty table."""
    run = Run(spawn, tmp_path, postgres_server)
    tests = tmp_path / "test_inner.py"
    tests.write_text(INNER_TESTS)
    # pytest-django itself, without this project's fixture that sets up the databases.
    done = subprocess.run(
        [
            *[sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"],
            *["-p", "pytest_django.plugin", "--ds", "tests.settings", "--create-db"],
            *["--rootdir", str(tmp_path), "-W", "error", str(tests)],
        ],
        cwd=ROOT,
        env=os.environ
        | {"DISTLOCKS_TEST_DIR": str(run.folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "8 passed" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout
    assert run.left_over() == [], done.stdout
