"""Two server processes run jobs: at most one run of a job at a time, and not too often."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from project.demo.client import Shot, fire
from project.servers import BASE_DIR, Server, running_servers
from tests.acceptance.client import (
    ask,
    board,
    is_running,
    last_run,
    log_lines,
    run,
    wait_for,
)
from tests.acceptance.conftest import (
    BACKENDS,
    INTERVAL_SECONDS,
    JOB_LIMIT,
    LEASE_SECONDS,
    environment,
    locks_in,
)


def test_a_job_runs_and_is_recorded(servers: list[Server]) -> None:
    alpha, beta = servers
    reply = run(alpha, "recorded", seconds=0.2)
    assert reply.status == 200
    done = reply.json
    assert (done["job"], done["server"]) == ("recorded", "alpha")
    took = datetime.fromisoformat(done["finished_at"]) - datetime.fromisoformat(done["started_at"])
    assert took.total_seconds() >= 0.19

    record = last_run(beta, "recorded")
    assert record["outcome"] == "done"
    for name in ("run", "fencing_token", "pid", "started_at", "finished_at"):
        assert record[name] == done[name]


def test_of_many_requests_at_once_one_runs(servers: list[Server]) -> None:
    shots = [
        Shot(server=servers[number % 2], job="contested", seconds=1, interval=0)
        for number in range(8)
    ]
    answers = fire(shots)
    assert sorted(answer.status for answer in answers) == [200] + [409] * 7
    winner = next(answer.body for answer in answers if answer.status == 200)
    for answer in answers:
        if answer.status == 409:
            assert answer.body["error"] == "running"
            holder = answer.body["held_by"]
            assert (holder["server"], holder["pid"]) == (winner["server"], winner["pid"])
            assert holder["host"]
            assert datetime.fromisoformat(holder["since"]).tzinfo is not None
            assert 0 < holder["remaining"] <= LEASE_SECONDS
            assert answer.retry_after == answer.body["retry_after"] == 1


def test_different_jobs_run_side_by_side(servers: list[Server]) -> None:
    shots = [
        Shot(server=servers[number % 2], job=f"side-{number}", seconds=0.7, interval=0)
        for number in range(6)
    ]
    answers = fire(shots)
    assert [answer.status for answer in answers] == [200] * 6
    assert max(a.body["started_at"] for a in answers) < min(a.body["finished_at"] for a in answers)


def test_more_jobs_than_may_run_wait_for_their_turn(servers: list[Server]) -> None:
    jobs = [f"turn-{number}" for number in range(JOB_LIMIT + 2)]
    shots = [
        Shot(server=servers[number % 2], job=job, seconds=1.5, interval=0)
        for number, job in enumerate(jobs)
    ]
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(fire, shots)
        shown = wait_for(
            lambda: (
                len((seen := board(servers[0]))["running"]) == JOB_LIMIT
                and len(seen["waiting"]) == 2
                and seen
            )
        )
        answers = answered.result()
    assert shown["limit"] == JOB_LIMIT
    for waiting in shown["waiting"]:
        assert sorted(waiting["waits_for"]) == sorted(held["job"] for held in shown["running"])
    assert {held["job"] for held in shown["waiting"] + shown["running"]} == {*jobs}
    assert [answer.status for answer in answers] == [200] * len(jobs)
    starts = sorted(datetime.fromisoformat(answer.body["started_at"]) for answer in answers)
    ends = sorted(datetime.fromisoformat(answer.body["finished_at"]) for answer in answers)
    # Who has come too late began when one of the others had ended.
    assert all(start >= end for start, end in zip(starts[JOB_LIMIT:], ends, strict=False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_whose_turn_does_not_come_says_who_was_before_it(
    migrated: Path, tmp_path: Path, backend: str
) -> None:
    database = tmp_path / "demo.sqlite3"
    shutil.copy(migrated, database)
    numbers = {"DEMO_JOB_LIMIT": "1", "DEMO_TURN_SECONDS": "0.3"}
    with (
        locks_in(backend, migrated) as store,
        running_servers(
            {"alpha": 0}, database, log_dir=tmp_path, environment={**numbers, **store}
        ) as (alpha,),
        ThreadPoolExecutor() as pool,
    ):
        first = pool.submit(run, alpha, "first", seconds=1.5, interval=0)
        wait_for(lambda: is_running(alpha, "first"))
        reply = run(alpha, "late", seconds=0, interval=0)
        assert reply.status == 503
        assert reply.json["error"] == "no_turn"
        assert "first" in reply.json["detail"]
        assert reply.retry_after >= 1
        assert last_run(alpha, "late")["outcome"] == "failed"
        assert log_lines(alpha, "late")[-1]["reason"] == "no_turn"
        assert first.result().status == 200


def test_a_job_cools_down_until_its_interval_is_over(servers: list[Server]) -> None:
    alpha, beta = servers
    first = run(alpha, "cooling", seconds=0.1, interval=1.5)
    assert first.status == 200

    refusal = run(beta, "cooling", seconds=0.1, interval=1.5)
    assert refusal.status == 409
    assert refusal.json["error"] == "cooling_down"
    assert refusal.json["held_by"]["server"] == "alpha"
    assert 1 <= refusal.retry_after <= 2
    assert [held["job"] for held in board(beta)["cooling"]] == ["cooling"]
    assert not is_running(beta, "cooling")

    time.sleep(refusal.retry_after)
    second = run(beta, "cooling", seconds=0.1, interval=0)
    assert second.status == 200
    assert second.json["fencing_token"] > first.json["fencing_token"]
    began = [datetime.fromisoformat(reply.json["started_at"]) for reply in (first, second)]
    assert (began[1] - began[0]).total_seconds() >= 1.49


def test_the_default_interval_is_a_setting(servers: list[Server]) -> None:
    assert run(servers[0], "default", seconds=0).status == 200
    refusal = run(servers[1], "default", seconds=0)
    assert refusal.json["error"] == "cooling_down"
    assert refusal.json["held_by"]["remaining"] <= INTERVAL_SECONDS


def test_a_job_may_work_longer_than_its_lease(servers: list[Server]) -> None:
    alpha, beta = servers
    with ThreadPoolExecutor() as pool:
        long_run = pool.submit(run, alpha, "long", seconds=LEASE_SECONDS * 1.7, interval=0)
        wait_for(lambda: is_running(beta, "long"))
        refusals = []
        while not long_run.done():
            refusals.append(run(beta, "long", seconds=0, interval=0))
            time.sleep(0.1)
        done = long_run.result()
    assert done.status == 200
    late = [
        reply
        for reply in refusals
        if reply.status == 409 and _age(reply.json["held_by"]["since"]) > LEASE_SECONDS
    ]
    assert late
    # The last one may have come after the end.
    assert all(reply.status == 409 for reply in refusals[:-1])


@pytest.mark.parametrize(
    ("path", "field", "way_out"),
    [
        ("/run/with%20space", "job", "letters, digits"),
        ("/run/a/b", "job", "letters, digits"),
        ("/run/a%0A", "job", "letters, digits"),
        ("/run/" + "x" * 65, "job", "1 to 64"),
        ("/run/", "job", "/run/<job id>"),
        ("/run/fine?seconds=soon", "seconds", "from 0 to 60"),
        ("/run/fine?seconds=nan", "seconds", "from 0 to 60"),
        ("/run/fine?seconds=-1", "seconds", "from 0 to 60"),
        ("/run/fine?seconds=60.1", "seconds", "from 0 to 60"),
        ("/run/fine?interval=3601", "interval", "from 0 to 3600"),
        ("/run/fine?second=1", "second", "Known are seconds and interval"),
    ],
)
def test_a_bad_order_is_told_what_is_wrong(
    servers: list[Server], path: str, field: str, way_out: str
) -> None:
    reply = ask(servers[0], "POST", path)
    assert reply.status == 400
    assert list(reply.json["fields"]) == [field]
    assert way_out in reply.json["fields"][field][0]
    assert field in reply.json["detail"]


def test_numbers_may_come_as_json(servers: list[Server]) -> None:
    as_json = {"Content-Type": "application/json"}
    body = b'{"seconds": 0.1, "interval": 0}'
    assert ask(servers[0], "POST", "/run/json", body=body, headers=as_json).status == 200
    refusal = ask(servers[0], "POST", "/run/json", body=b"[1]", headers=as_json)
    assert refusal.status == 400
    assert list(refusal.json["fields"]) == ["body"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_only_a_post_starts_a_job(servers: list[Server], method: str) -> None:
    reply = ask(servers[0], method, "/run/wrong-method")
    assert reply.status == 405
    assert "POST" in reply.headers["Allow"]
    assert reply.json["error"] == "method_not_allowed"
    assert not log_lines(servers[0], "wrong-method")


def test_other_sites_pages_start_nothing(servers: list[Server]) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site"}
    assert ask(servers[0], "POST", "/run/foreign", headers=foreign).status == 403
    assert ask(servers[0], "POST", "/run/foreign", headers={"Host": "evil.test"}).status == 400
    assert not log_lines(servers[0], "foreign")


def test_each_attempt_and_its_end_is_one_log_line(servers: list[Server]) -> None:
    alpha, beta = servers
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, alpha, "logged", seconds=0.6, interval=0)
        wait_for(lambda: is_running(beta, "logged"))
        refusal = run(beta, "logged", seconds=0, interval=0)
        done = running.result()
    assert (done.status, refusal.status) == (200, 409)

    attempt, end = log_lines(alpha, "logged")
    assert (attempt["event"], end["event"]) == ("job.attempt", "job.done")
    assert end["token"] == done.json["fencing_token"]
    assert end["waited_ms"] >= 0
    for line in (attempt, end):
        assert (line["server"], line["pid"]) == ("alpha", done.json["pid"])
        assert datetime.fromisoformat(line["at"]).tzinfo is not None

    attempt, contention = log_lines(beta, "logged")
    assert (attempt["event"], contention["event"]) == ("job.attempt", "job.contention")
    assert contention["state"] == "running"
    assert contention["held_by"] == refusal.json["held_by"]
    assert contention["token"] is None


def test_a_job_that_loses_its_lease_says_so(servers: list[Server], store: dict[str, str]) -> None:
    alpha, beta = servers
    assert alpha.log is not None
    database = alpha.log.parent / "demo.sqlite3"
    force = (
        "import django; django.setup(); from distlocks import locks; "
        "assert locks['default'].force_release('job:robbed')"
    )
    with ThreadPoolExecutor() as pool:
        robbed = pool.submit(run, alpha, "robbed", seconds=20, interval=0)
        wait_for(lambda: is_running(beta, "robbed"))
        subprocess.run(
            [sys.executable, "-c", force],
            cwd=BASE_DIR,
            env=environment(database, store),
            check=True,
            timeout=30,
        )
        reply = robbed.result()
    assert reply.status == 500
    assert reply.json["error"] == "lease_lost"
    assert last_run(beta, "robbed")["outcome"] == "lost"
    failed = log_lines(alpha, "robbed")[-1]
    assert (failed["event"], failed["reason"]) == ("job.failed", "lease_lost")


def test_a_run_that_never_noticed_its_loss_cannot_say_that_it_is_done(
    servers: list[Server], store: dict[str, str]
) -> None:
    """Not even when its work goes well and its last look at the lease came before the loss."""
    alpha, beta = servers
    assert alpha.log is not None
    run_unaware = """
import django; django.setup()
from distlocks import StaleToken, force_release
from project.jobs import runner
from project.jobs.orders import JobOrder
runner.work = lambda lease, seconds: force_release("job:unaware")
try:
    runner.run_job(JobOrder(job="unaware", seconds=0, interval=0))
except StaleToken:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", run_unaware],
        cwd=BASE_DIR,
        env=environment(alpha.log.parent / "demo.sqlite3", store),
        check=True,
        timeout=30,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "refused\n"
    assert '"reason": "stale_token"' in done.stderr
    assert last_run(beta, "unaware")["outcome"] == "lost"


def test_a_killed_servers_job_comes_free_with_its_lease(mortal_servers: list[Server]) -> None:
    alpha, beta = mortal_servers
    with ThreadPoolExecutor() as pool:
        broken = pool.submit(run, alpha, "orphan", seconds=60, interval=0)
        wait_for(lambda: is_running(beta, "orphan"))
        alpha.kill()
        killed_at = datetime.now().astimezone()
        with pytest.raises(OSError, match=r"."):
            broken.result()

    token = last_run(beta, "orphan")["fencing_token"]
    taken = wait_for(lambda: _if_done(beta, "orphan"), LEASE_SECONDS + 5)
    waited = datetime.fromisoformat(taken["started_at"]) - killed_at
    assert waited.total_seconds() < LEASE_SECONDS + 3
    assert taken["server"] == "beta"
    assert taken["fencing_token"] > token
    # Its own record could not be finished; the board tells from the lock that it is over.
    assert [r["outcome"] for r in board(beta)["runs"] if r["server"] == "alpha"] == ["broken_off"]


def test_a_stopping_server_lets_its_jobs_end(mortal_servers: list[Server]) -> None:
    alpha, beta = mortal_servers
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, alpha, "last", seconds=0.8, interval=0)
        wait_for(lambda: is_running(beta, "last"))
        alpha.stop()
        assert running.result().status == 200
    assert alpha.process.returncode == 0
    assert last_run(beta, "last")["outcome"] == "done"


@pytest.mark.parametrize("instead", ["a folder", "another file"])
def test_without_its_store_nothing_runs(tmp_path: Path, instead: str) -> None:
    database = tmp_path / "demo.sqlite3"
    if instead == "a folder":
        database.mkdir()
    else:
        database.write_bytes(b"This is no database. " * 100)
    with running_servers(
        {"alpha": 0}, database, log_dir=tmp_path, environment={"DEMO_BACKEND": "database"}
    ) as (alpha,):
        _assert_nothing_runs(alpha, "storeless")


def test_without_its_redis_nothing_runs(migrated: Path, tmp_path: Path) -> None:
    database = tmp_path / "demo.sqlite3"
    shutil.copy(migrated, database)
    with ExitStack() as redis:
        store = redis.enter_context(locks_in("redis", migrated))
        with running_servers({"alpha": 0}, database, log_dir=tmp_path, environment=store) as (
            alpha,
        ):
            assert run(alpha, "before", seconds=0).status == 200
            redis.close()
            _assert_nothing_runs(alpha, "storeless")


def _assert_nothing_runs(server: Server, job: str) -> None:
    reply = run(server, job, seconds=0)
    assert reply.status == 503
    assert reply.json["error"] == "store_unavailable"
    assert reply.retry_after >= 1
    failed = log_lines(server, job)[-1]
    assert (failed["event"], failed["reason"]) == ("job.failed", "store_unavailable")

    shown = ask(server, "GET", "/board.json")
    assert shown.status == 503
    assert shown.retry_after >= 1
    # The page itself comes, to say so.
    assert ask(server, "GET", "/").status == 200


def test_the_board_passes_a_strict_policy(servers: list[Server]) -> None:
    page = ask(servers[0], "GET", "/")
    assert page.status == 200
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    html = page.content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)

    files = re.findall(r'(?:src|href)="(/static/[^"]+)"', html)
    assert {file.rsplit(".")[-1] for file in files} == {"css", "js", "svg"}
    for file in files:
        assert ask(servers[0], "GET", file).status == 200


def test_the_board_shows_who_runs_what(servers: list[Server]) -> None:
    alpha, beta = servers
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, alpha, "shown", seconds=0.6, interval=0)
        wait_for(lambda: is_running(beta, "shown"))
        for server in servers:
            shown = board(server)
            assert shown["server"] == server.name
            held = next(held for held in shown["running"] if held["job"] == "shown")
            assert held["server"] == "alpha"
            assert 0 < held["remaining"] <= LEASE_SECONDS
            assert next(r for r in shown["runs"] if r["job"] == "shown")["outcome"] == "running"
            assert shown["counts"]["outcomes"]["running"] >= 1
        assert running.result().status == 200
    assert not is_running(beta, "shown")
    assert last_run(beta, "shown")["outcome"] == "done"


def _age(moment: str) -> float:
    return (datetime.now().astimezone() - datetime.fromisoformat(moment)).total_seconds()


def _if_done(server: Server, job: str) -> dict[str, Any] | None:
    reply = run(server, job, seconds=0, interval=0)
    return reply.json if reply.status == 200 else None


def test_what_happens_to_locks_is_counted(servers: list[Server]) -> None:
    assert run(servers[0], "metered", seconds=0.1, interval=0).status == 200

    def page() -> str:
        reply = ask(servers[0], "GET", "/metrics")
        assert reply.status == 200
        return reply.content.decode()

    granted = 'distlocks_acquires_total{backend="default",pattern="job:metered"} 1.0'
    wait_for(lambda: granted in page())
    assert 'distlocks_backend_up{backend="default"} 1.0' in page()
