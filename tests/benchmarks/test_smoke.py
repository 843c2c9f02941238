"""The benchmarks still run; what they find is nothing to be asserted here."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.__main__ import NAMES
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.servers.watchdog import ROOT

# One that no test uses: it has to be empty, and is emptied.
DATABASE = 13


def test_a_quick_run(postgres_server: PostgresServer, tmp_path: Path) -> None:
    results = quick_run(tmp_path, "uncontended", "--postgres", postgres_server.url)
    assert [result["name"] for result in results] == ["uncontended-postgres", "uncontended-sqlite"]
    for result in results:
        assert all(target["figure"] > 0 for target in result["targets"])


@pytest.mark.timeout(180)
def test_a_quick_run_on_redis(redis_server: RedisServer, tmp_path: Path) -> None:
    url = urlsplit(redis_server.url)._replace(path=f"/{DATABASE}").geturl()
    results = quick_run(tmp_path, "redis.uncontended", "redis.drain", "--redis", url)
    names = ["redis.uncontended", "redis.drain-1", "redis.drain-4"]
    assert [result["name"] for result in results] == names
    for result in results:
        assert "distlocks" in [row[0] for row in result["rows"]]


@pytest.mark.parametrize("name", NAMES)
def test_each_can_be_run(name: str) -> None:
    assert callable(import_module(f"benchmarks.{name}").run)


def quick_run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    figures = folder / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments, "--quick", "--json", str(figures)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(figures.read_text())["results"]
    return results
