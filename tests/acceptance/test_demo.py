"""`manage.py demo` shows what it promises, says so by its exit code, and leaves nothing behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from project.demo.checks import Record, no_overlap, tokens_grow
from project.servers import BASE_DIR
from tests.acceptance.client import is_listening, wait_for
from tests.acceptance.conftest import BACKENDS, environment
from tests.servers import session
from tests.servers.zookeeper import ZooKeeperEnsemble

COMMAND = [sys.executable, "manage.py", "demo"]


@pytest.mark.parametrize("backend", [*BACKENDS, "zookeeper"])
def test_the_demo_shows_that_every_promise_holds(tmp_path: Path, backend: str) -> None:
    ended = subprocess.run(
        COMMAND,
        cwd=BASE_DIR,
        env=_environment(tmp_path, backend),
        capture_output=True,
        text=True,
        timeout=50,
    )
    shown = ended.stdout
    assert ended.returncode == 0, shown + ended.stderr
    assert ended.stderr == ""
    assert "FAILED" not in shown
    for promise in (
        "exactly one of eight runs  (1 answered 200, 7 answered 409)",
        "no job runs again within its interval  (2 answered 409)",
        "different jobs run side by side  (6 answered 200",
        "a lease is renewed while its job runs",
        "no job overlaps with itself  (11 runs of 8 jobs)",
        "fencing tokens strictly grow per job  (3 pairs of successive runs)",
        "every 200 has its record, every record its 200  (11 runs)",
        "each attempt, contention and completion is one log line",
    ):
        assert promise in shown
    assert re.search(r"All \d+ checks hold", shown)
    for event in ("job.attempt", "job.contention", "job.done"):
        assert event in shown
    _assert_nothing_is_left(tmp_path, shown, backend)


@pytest.mark.parametrize(
    ("backend", "number", "code"),
    [
        ("database", signal.SIGTERM, 143),
        ("database", signal.SIGINT, 130),
        ("redis", signal.SIGTERM, 143),
        ("redis", signal.SIGINT, 130),
    ],
)
def test_a_demo_that_is_stopped_stops_its_servers(
    tmp_path: Path, backend: str, number: signal.Signals, code: int
) -> None:
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            COMMAND,
            cwd=BASE_DIR,
            env=_environment(tmp_path, backend),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: "Two servers" in output.read_text(encoding="utf-8"))
        process.send_signal(number)
        assert process.wait(20) == code
    finally:
        process.kill()
        process.wait()
    shown = output.read_text(encoding="utf-8")
    assert "Traceback" not in shown
    _assert_nothing_is_left(tmp_path, shown, backend)


def test_a_run_within_another_run_is_found() -> None:
    records = _records((0, 5), (4, 6))
    assert not no_overlap(records).held
    assert no_overlap(_records((0, 5), (5, 6))).held
    # A run that never ended overlaps with whatever comes after it.
    assert not no_overlap([replace(records[0], finished_at=None), records[1]]).held
    assert no_overlap([records[0], replace(records[1], job="other")]).held


def test_a_token_that_does_not_grow_is_found() -> None:
    first, second = _records((0, 1), (2, 3))
    assert tokens_grow([first, second]).held
    assert not tokens_grow([first, replace(second, fencing_token=first.fencing_token)]).held


def _records(*spans: tuple[float, float]) -> Sequence[Record]:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        Record(
            run=str(number),
            job="job",
            server="alpha",
            fencing_token=number,
            started_at=start + timedelta(seconds=began),
            finished_at=start + timedelta(seconds=ended),
            outcome="done",
        )
        for number, (began, ended) in enumerate(spans)
    ]


def _environment(folder: Path, backend: str) -> dict[str, str]:
    store = {"DEMO_BACKEND": backend, "TMPDIR": str(folder)}
    if backend == "zookeeper":
        ensemble = session.group(ZooKeeperEnsemble)
        assert ensemble is not None
        store["DEMO_ZOOKEEPER_HOSTS"] = ensemble.addresses
    return environment(folder / "unused.sqlite3", store)


def _assert_nothing_is_left(folder: Path, shown: str, backend: str) -> None:
    ports = {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", shown)}
    assert len(ports) == (3 if backend == "redis" else 2)
    assert not any(is_listening(port) for port in ports)
    assert not list(folder.glob("distlocks-demo-*"))
