"""The job runner is the same wherever its locks are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from project.demo.client import Shot, fire
from project.servers import Server
from tests.acceptance.client import is_running, last_run, run, wait_for
from tests.acceptance.conftest import LEASE_SECONDS, OTHER_BACKENDS, locks_in, two_servers


@pytest.fixture(params=OTHER_BACKENDS)
def both(request: pytest.FixtureRequest, migrated: Path, tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers."""
    with (
        locks_in(request.param, migrated) as store,
        two_servers(tmp_path, migrated, store) as servers,
    ):
        yield servers


def test_one_of_many_runs_and_its_lock_comes_free_with_its_process(both: list[Server]) -> None:
    alpha, beta = both
    shots = [
        Shot(server=both[number % 2], job="contested", seconds=0.5, interval=0)
        for number in range(8)
    ]
    answers = fire(shots)
    assert sorted(answer.status for answer in answers) == [200] + [409] * 7
    (done,) = (answer.body for answer in answers if answer.status == 200)
    for answer in answers:
        if answer.status == 409:
            holder = answer.body["held_by"]
            assert (holder["server"], holder["pid"]) == (done["server"], done["pid"])
            assert 0 < holder["remaining"] <= LEASE_SECONDS

    # Too soon, on whichever server.
    first = run(alpha, "seldom", seconds=0, interval=60)
    again = run(beta, "seldom", seconds=0, interval=60)
    assert (first.status, again.status) == (200, 409)
    assert again.json["error"] == "cooling_down"

    with ThreadPoolExecutor() as pool:
        broken = pool.submit(run, alpha, "orphan", seconds=60, interval=0)
        wait_for(lambda: is_running(beta, "orphan"))
        alpha.kill()
        with pytest.raises(OSError, match=r"."):
            broken.result()
    token = last_run(beta, "orphan")["fencing_token"]
    wait_for(lambda: run(beta, "orphan", seconds=0, interval=0).status == 200, LEASE_SECONDS + 5)
    assert last_run(beta, "orphan")["fencing_token"] > token
