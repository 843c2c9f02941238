"""manage.py sweep_locks --interval: a service that outlives its database and stops when told."""

import signal
from pathlib import Path

import psycopg
import pytest

from distlocks.models import Lock
from tests.factories import LockFactory
from tests.servers import processes
from tests.servers.children import Child, Spawner
from tests.servers.postgres import PostgresServer
from tests.waiting import eventually

MIGRATE = """
from django.core.management import call_command
call_command("migrate", database=backend, run_syncdb=True, verbosity=0)
"""
SERVICE = """
from django.core.management import call_command
call_command("sweep_locks", "--backend", backend, "--interval", interval)
"""


def lines_until(child: Child, words: str) -> list[str]:
    """What it prints, up to the line with these words."""
    lines = [child.readline()]
    while words not in lines[-1]:
        lines.append(child.readline())
    return lines


@pytest.fixture
def service(databases: None, backend: str, spawn: Spawner) -> Child:
    using = {"sqlite": "default"}.get(backend, backend)
    Lock.objects.using(using).delete()
    LockFactory(using=using, key="first", expired=True)
    child = spawn(SERVICE, backend=backend, interval="0.05")
    assert any("'first'" in line for line in lines_until(child, "cleared 1 expired"))
    LockFactory(using=using, key="second", expired=True)
    assert any("'second'" in line for line in lines_until(child, "cleared 1 expired"))
    return child


@pytest.mark.parametrize(
    ("backend", "number"), [("postgres", signal.SIGTERM), ("sqlite", signal.SIGINT)]
)
def test_it_sweeps_again_and_again_until_it_is_told_to_stop(
    service: Child, number: signal.Signals
) -> None:
    processes.send(service.pid, number)
    assert service.wait() == 0
    lines_until(service, "Stopped.")
    assert "Traceback" not in service.errors


def test_it_does_not_sleep_its_interval_out(databases: None, spawn: Spawner) -> None:
    child = spawn(SERVICE, backend="sqlite", interval="1h")
    lines_until(child, "examined")
    processes.send(child.pid, signal.SIGTERM)
    assert child.wait(15) == 0


def test_it_outlives_a_restart_of_its_database(
    fresh_postgres: PostgresServer, spawn: Spawner, tmp_path: Path
) -> None:
    folder = tmp_path / "swept"
    folder.mkdir()
    with psycopg.connect(fresh_postgres.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE swept")
    child = spawn(
        MIGRATE + SERVICE,
        backend="postgres",
        interval="0.05",
        env={"DISTLOCKS_TEST_DIR": str(folder), PostgresServer.url_variable: fresh_postgres.url},
    )
    lines_until(child, "examined 0 rows")
    fresh_postgres.kill()
    eventually(lambda: "What was swept before stays swept." in child.errors)
    assert child.running
    assert "postgres: The database 'postgres' cannot be used for locks" in child.errors

    fresh_postgres.start()
    with psycopg.connect(fresh_postgres.url, dbname="swept", autocommit=True) as connection:
        connection.execute(
            "INSERT INTO distlocks_lock (key, owner_id, fencing_token, acquired_at, expires_at,"
            " waiting_until, host, pid, thread, label, metadata)"
            " VALUES ('left behind', 'x', 1, 1, 1, 0, 'web-1', 1, 'a', '', '{}')"
        )
    assert any("'left behind'" in line for line in lines_until(child, "cleared 1 expired"))
    processes.send(child.pid, signal.SIGTERM)
    assert child.wait() == 0
    assert "Traceback" not in child.errors
