"""The benchmarks still run; what they find is nothing to be asserted here."""

import json
import subprocess
import sys
from pathlib import Path

from tests.servers.postgres import PostgresServer
from tests.servers.watchdog import ROOT


def test_a_quick_run(postgres_server: PostgresServer, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *[sys.executable, "-m", "benchmarks", "uncontended", "--quick"],
            *["--postgres", postgres_server.url, "--json", str(figures)],
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())["results"]
    assert [result["name"] for result in results] == ["uncontended-postgres", "uncontended-sqlite"]
    for result in results:
        assert all(target["figure"] > 0 for target in result["targets"])
