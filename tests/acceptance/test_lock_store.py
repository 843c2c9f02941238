"""Where the demo's locks are: what is set wrong is named, and Redis is found or brought."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from project import redis_server
from project.redis_server import running_redis
from project.servers import BASE_DIR, ServerFailed
from tests.acceptance.client import is_listening, wait_for
from tests.acceptance.conftest import environment


@pytest.mark.parametrize(
    ("store", "told"),
    [
        (
            {"DEMO_BACKEND": "postgres"},
            "manage.py: DEMO_BACKEND='postgres' is not known: "
            "the demo's locks are in 'database', 'redis' or 'zookeeper'.\n",
        ),
        (
            {"DEMO_BACKEND": "zookeeper"},
            "manage.py: DEMO_ZOOKEEPER_HOSTS is missing: name servers, as in "
            "'make demo BACKEND=zookeeper DEMO_ZOOKEEPER_HOSTS=127.0.0.1:2181'.\n",
        ),
        (
            {"DEMO_BACKEND": "redis", "DEMO_REDIS_URL": "localhost:6379"},
            "manage.py: DEMO_REDIS_URL is no URL of a Redis server: "
            "it must begin with redis:// or rediss:// and name a host.\n",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_the_right_ones(
    tmp_path: Path, store: dict[str, str], told: str
) -> None:
    ended = _demo(tmp_path, store)
    assert ended.returncode == 1
    assert ended.stderr == told


def test_a_redis_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with running_redis() as url:
        pass
    store = {"DEMO_BACKEND": "redis", "DEMO_REDIS_URL": url}
    ended = _demo(tmp_path, store)
    assert ended.returncode == 1
    assert "The demo could not run: Redis at " + url.removeprefix("redis://") in ended.stdout


def test_a_redis_that_was_there_before_is_waited_for_and_left_alone(tmp_path: Path) -> None:
    with running_redis() as url:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "demo"],
            cwd=BASE_DIR,
            env=environment(
                tmp_path / "demo.sqlite3", {"DEMO_BACKEND": "redis", "DEMO_REDIS_URL": f"{url}/7"}
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process:
            said = process.stdout.readline()
            process.terminate()
        assert "has no memory of locks from before" in said
        assert is_listening(int(url.rpartition(":")[2]))


def test_a_server_that_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "PLACES", ())
    monkeypatch.setattr(redis_server, "WHEEL_MODULE", "no_such_module")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(redis_server, "PROGRAMS", ("old-server", "shim-server", "new-server"))
    _program(tmp_path / "old-server", "echo Redis server v=6.0.16 sha=00000000:0")
    _program(tmp_path / "shim-server", "exit 127")
    assert redis_server.installed() is None
    new = _program(tmp_path / "new-server", "echo Valkey server v=9.1.2 sha=00000000:1")
    assert redis_server.installed() == new


@pytest.mark.parametrize("brings", ["package", "wheel"])
def test_a_server_that_is_missing_is_brought(monkeypatch: pytest.MonkeyPatch, brings: str) -> None:
    asked: list[str] = []

    def install(name: str) -> str:
        asked.append(name)
        return "" if name == brings else f"no {name}"

    monkeypatch.setattr(redis_server, "install_package", lambda: install("package"))
    monkeypatch.setattr(redis_server, "install_wheel", lambda: install("wheel"))
    monkeypatch.setattr(
        redis_server, "installed", lambda: Path("/brought") if brings in asked else None
    )
    assert redis_server.find() == Path("/brought")
    assert asked == (["package"] if brings == "package" else ["package", "wheel"])


def test_without_any_server_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "installed", lambda: None)
    monkeypatch.setattr(redis_server, "install_package", lambda: "no package")
    monkeypatch.setattr(redis_server, "install_wheel", lambda: "no wheel")
    with pytest.raises(ServerFailed) as refused:
        redis_server.find()
    lines = str(refused.value).splitlines()
    assert "    apt-get install --no-install-recommends redis-server" in lines
    assert any("BACKEND=redis DEMO_REDIS_URL=redis://" in line for line in lines)
    assert lines[-2:] == ["no package", "no wheel"]


def test_a_port_that_was_taken_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_redis() as first:
        taken = int(first.rpartition(":")[2])
        free = redis_server._free_port()
        ports = iter([taken, free])
        monkeypatch.setattr(redis_server, "_free_port", lambda: next(ports))
        with running_redis() as second:
            assert second == f"redis://127.0.0.1:{free}"
            assert is_listening(taken)
    wait_for(lambda: not is_listening(free))


def _demo(folder: Path, store: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "demo"],
        cwd=BASE_DIR,
        env=environment(folder / "demo.sqlite3", store),
        capture_output=True,
        text=True,
        timeout=50,
    )


def _program(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)
    return path
