"""Server processes of the demo project, on a database of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from project.servers import BASE_DIR, Server, running_servers

# Short, so that a killed server's jobs come free soon.
LEASE_SECONDS = 2.0
INTERVAL_SECONDS = 1.0
JOB_LIMIT = 6


def environment(database: Path) -> dict[str, str]:
    """For a command of the demo project: not the settings of the tests."""
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "project.settings",
        "DEMO_DATABASE": str(database),
        "PYTHONUNBUFFERED": "1",
    }


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables, to be copied."""
    database = tmp_path_factory.mktemp("migrated") / "demo.sqlite3"
    command = [sys.executable, "manage.py", "migrate", "--verbosity", "0"]
    subprocess.run(command, cwd=BASE_DIR, env=environment(database), check=True, timeout=60)
    return database


@contextmanager
def two_servers(folder: Path, migrated: Path) -> Iterator[list[Server]]:
    """Servers alpha and beta on a fresh database in `folder`, which also takes their logs."""
    database = folder / "demo.sqlite3"
    shutil.copy(migrated, database)
    numbers = {
        "DEMO_LEASE_SECONDS": str(LEASE_SECONDS),
        "DEMO_INTERVAL_SECONDS": str(INTERVAL_SECONDS),
        "DEMO_JOB_LIMIT": str(JOB_LIMIT),
    }
    with running_servers(
        {"alpha": 0, "beta": 0}, database, log_dir=folder, environment=numbers
    ) as servers:
        yield servers


@pytest.fixture(scope="module")
def servers(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers for all tests of a module, which use jobs of their own."""
    with two_servers(tmp_path_factory.mktemp("servers"), migrated) as both:
        yield both


@pytest.fixture
def mortal_servers(migrated: Path, tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers for a test that does not leave them as they were."""
    with two_servers(tmp_path, migrated) as both:
        yield both
