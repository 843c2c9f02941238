"""`manage.py serve` serves two boards and the admin until it is stopped, or gone."""

from __future__ import annotations

import http.cookiejar
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from project.servers import BASE_DIR
from tests.acceptance.client import is_listening, wait_for
from tests.acceptance.conftest import environment


@dataclass(frozen=True, slots=True)
class Serving:
    """A `serve` command that is under way, and what it has said."""

    process: subprocess.Popen[bytes]
    shown: str

    @property
    def boards(self) -> list[str]:
        return re.findall(r"^(?:alpha|beta) +(http://\S+)$", self.shown, re.MULTILINE)

    @property
    def ports(self) -> list[int]:
        return [int(url.rstrip("/").rsplit(":")[-1]) for url in self.boards]

    def line(self, name: str) -> str:
        found = re.search(rf"^{name} +(.+)$", self.shown, re.MULTILINE)
        assert found
        return found[1]


@contextmanager
def serving(folder: Path, store: Mapping[str, str] | None = None) -> Iterator[Serving]:
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "serve", "--ports", "0", "0"],
            cwd=BASE_DIR,
            env=environment(folder / "demo.sqlite3", store),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: "Stop with Ctrl-C" in output.read_text(encoding="utf-8"), 30)
        yield Serving(process, output.read_text(encoding="utf-8"))
    finally:
        process.terminate()
        process.wait(20)


def test_it_serves_until_it_is_stopped(tmp_path: Path) -> None:
    with serving(tmp_path) as one:
        assert len(one.boards) == 2
        for board in one.boards:
            with urllib.request.urlopen(board, timeout=10) as page:
                assert b"Job board" in page.read()

        name, password = one.line("log-in").split(" / ")
        assert b"Locks" in _open_as_admin(one.line("locks"), name, password)
        # There is something to be seen: locks that come and go, and what has happened to them.
        wait_for(lambda: rows(tmp_path, "distlocks_lock WHERE expires_at > 0"))
        wait_for(lambda: rows(tmp_path, "distlocks_lockrollup WHERE acquired > 0"), 30)
        wait_for(lambda: rows(tmp_path, "distlocks_lockevent"), 30)
        kept = tmp_path / "admin-password"
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert kept.read_text(encoding="utf-8").strip() == password
        _assert_stops(one, signal.SIGTERM)

    with serving(tmp_path) as again:
        assert again.line("log-in") == one.line("log-in")
        _assert_stops(again, signal.SIGINT)


def test_its_servers_end_with_it_even_if_it_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as one:
        one.process.kill()
        one.process.wait()
        wait_for(lambda: not any(map(is_listening, one.ports)))


def test_its_redis_lasts_as_long_as_it_does(tmp_path: Path) -> None:
    store = {"DEMO_BACKEND": "redis", "TMPDIR": str(tmp_path)}
    for number in (signal.SIGTERM, signal.SIGKILL):
        with serving(tmp_path, store) as one:
            port = int(one.line("store").rpartition(":")[2])
            assert is_listening(port)
            one.process.send_signal(number)
            one.process.wait(20)
            wait_for(lambda port=port: not is_listening(port))
            wait_for(lambda: not list(tmp_path.glob("distlocks-demo-*")))


def rows(folder: Path, of: str) -> int:
    """How many there are in the demo's database."""
    with closing(sqlite3.connect(folder / "demo.sqlite3")) as connection:
        count: int = connection.execute(f"SELECT count(*) FROM {of}").fetchone()[0]
        return count


def _assert_stops(serve: Serving, number: signal.Signals) -> None:
    serve.process.send_signal(number)
    assert serve.process.wait(20) == 0
    assert not any(map(is_listening, serve.ports))


def _open_as_admin(url: str, name: str, password: str) -> bytes:
    jar = http.cookiejar.CookieJar()
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    with browser.open(url, timeout=10) as page:
        form = page.read().decode()
        log_in_url = page.url
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', form)
    assert token
    fields = {"username": name, "password": password, "csrfmiddlewaretoken": token[1]}
    with browser.open(log_in_url, urllib.parse.urlencode(fields).encode(), timeout=10) as page:
        content: bytes = page.read()
        return content
