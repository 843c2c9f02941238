"""The harness itself: a test that trusts a server must be able to trust what starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connections

from tests.servers import finding, processes, session
from tests.servers.base import LOOPBACK, PORTS, ServerError
from tests.servers.children import ChildFailed, Spawner
from tests.servers.mariadb import MariaDBServer
from tests.servers.pgbouncer import PgBouncerServer
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.servers.watchdog import ROOT


def connect(server: PostgresServer, **changes: Any) -> psycopg.Connection:
    return psycopg.connect(server.url, autocommit=True, connect_timeout=2, **changes)


def ask(connection: psycopg.Connection, query: str) -> None:
    """Send a query without waiting for the answer."""
    connection.pgconn.send_query(query.encode())
    connection.pgconn.flush()


def hears_nothing(connection: psycopg.Connection, seconds: float = 0.2) -> bool:
    """Whether no answer comes in that time."""
    time.sleep(seconds)
    connection.pgconn.consume_input()
    return bool(connection.pgconn.is_busy())


def answer(connection: psycopg.Connection) -> bytes | None:
    """The one value of the answer to what was asked."""
    # Waiting inside libpq would keep all other threads waiting, the proxy's too.
    assert processes.wait_until(lambda: not hears_nothing(connection, 0), 10)
    result = connection.pgconn.get_result()
    assert result is not None
    return result.get_value(0, 0)


class TestPostgres:
    def test_it_answers_on_its_port(self, fresh_postgres: PostgresServer) -> None:
        with connect(fresh_postgres) as connection:
            assert connection.execute("SHOW max_connections").fetchone() == ("200",)
            assert connection.execute("SHOW port").fetchone() == (str(fresh_postgres.port),)
        assert fresh_postgres.port in PORTS

    def test_it_runs_beside_the_server_of_the_run(
        self, fresh_postgres: PostgresServer, postgres_server: PostgresServer
    ) -> None:
        assert fresh_postgres.port != postgres_server.port
        with connect(postgres_server) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)

    @pytest.mark.skipif(not processes.PROC.joinpath("net").exists(), reason="reads /proc/net")
    def test_nothing_listens_beyond_loopback(self, fresh_postgres: PostgresServer) -> None:
        addresses = listening(fresh_postgres.pid)
        assert addresses == {("tcp", "0100007F", fresh_postgres.port)}

    def test_what_was_committed_survives_a_kill(self, fresh_postgres: PostgresServer) -> None:
        with connect(fresh_postgres) as connection:
            connection.execute("CREATE TABLE t AS SELECT 42 AS n")
        port, first_pid = fresh_postgres.port, fresh_postgres.pid
        children = processes.descendants(first_pid)
        assert children

        fresh_postgres.kill()

        assert not fresh_postgres.running
        assert not any(processes.is_alive(pid) for pid in children)
        with pytest.raises(psycopg.OperationalError):
            connect(fresh_postgres)

        fresh_postgres.start()
        assert (fresh_postgres.port, fresh_postgres.pid != first_pid) == (port, True)
        with connect(fresh_postgres) as connection:
            assert connection.execute("SELECT n FROM t").fetchone() == (42,)

    def test_it_stops_under_an_open_session_and_starts_again(
        self, fresh_postgres: PostgresServer
    ) -> None:
        with closing(connect(fresh_postgres)) as connection:
            fresh_postgres.stop()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        fresh_postgres.start()
        with connect(fresh_postgres) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)

    def test_a_pause_holds_open_sessions_too(self, fresh_postgres: PostgresServer) -> None:
        with closing(connect(fresh_postgres)) as connection:
            fresh_postgres.pause()
            ask(connection, "SELECT 42")
            assert hears_nothing(connection)
            fresh_postgres.resume()
            assert answer(connection) == b"42"

    def test_a_paused_server_can_be_closed(self, fresh_postgres: PostgresServer) -> None:
        folder, pid = fresh_postgres.folder, fresh_postgres.pid
        fresh_postgres.pause()
        fresh_postgres.close()
        assert not folder.exists()
        assert not processes.is_alive(pid)

    def test_a_server_that_cannot_start_says_why(self, fresh_postgres: PostgresServer) -> None:
        fresh_postgres.stop()
        with fresh_postgres.data.joinpath("postgresql.conf").open("a") as config:
            config.write("no_such_setting = 1\n")
        with pytest.raises(ServerError, match="no_such_setting"):
            fresh_postgres.start()

    def test_a_server_takes_another_port_when_its_own_is_taken(self) -> None:
        program = finding.find([PostgresServer])[PostgresServer]
        server = PostgresServer(program)
        with socket.create_server((LOOPBACK, server.port)), server:
            assert server.running
            with connect(server) as connection:
                assert connection.execute("SHOW port").fetchone() == (str(server.port),)

    def test_somebody_elses_server_is_never_touched(self, postgres_server: PostgresServer) -> None:
        external = PostgresServer(url=postgres_server.url)
        assert not external.owned
        assert external.is_ready()
        for verb in (external.kill, external.pause, external.stop, external.start):
            with pytest.raises(pytest.skip.Exception, match="is not ours"):
                verb()
        external.close()
        assert external.is_ready()

    def test_the_run_uses_the_database_that_its_children_use(
        self, databases: None, spawn: Spawner
    ) -> None:
        names = spawn(
            """
            from django.db import connections
            result = {a: str(connections[a].settings_dict["NAME"]) for a in connections}
            """
        ).result()
        assert names == {a: str(connections[a].settings_dict["NAME"]) for a in connections}
        assert {"default", "deferred", "postgres", "postgres_other"} <= names.keys()


class TestMariaDB:
    def test_it_listens_on_loopback_only_and_keeps_what_was_committed(
        self, mariadb_server: MariaDBServer
    ) -> None:
        server = session.private(MariaDBServer)
        if server is None:
            pytest.skip(f"{MariaDBServer.url_variable} is not ours to kill, and no other is here")
        with server:
            assert server.port != mariadb_server.port
            if processes.PROC.joinpath("net").exists():
                assert listening(server.pid) == {("tcp", "0100007F", server.port)}
            server.ask("CREATE DATABASE kept")
            server.kill()
            server.start()
            assert server.ask("SHOW DATABASES LIKE 'kept'") == (("kept",),)
            folder, pid = server.folder, server.pid
        assert not folder.exists()
        assert not processes.is_alive(pid)


class TestPgBouncer:
    def test_it_passes_a_servers_session_on_with_each_transaction(
        self, pgbouncer: PgBouncerServer, postgres_server: PostgresServer
    ) -> None:
        with (
            psycopg.connect(pgbouncer.url, autocommit=True, prepare_threshold=None) as one,
            psycopg.connect(pgbouncer.url, autocommit=True, prepare_threshold=None) as other,
        ):
            asked = "SELECT pg_backend_pid()"
            assert one.execute(asked).fetchone() == other.execute(asked).fetchone()
            assert one.execute("SHOW port").fetchone() == (str(postgres_server.port),)

    @pytest.mark.skipif(not processes.PROC.joinpath("net").exists(), reason="reads /proc/net")
    def test_nothing_listens_beyond_loopback(self, pgbouncer: PgBouncerServer) -> None:
        assert listening(pgbouncer.pid) == {("tcp", "0100007F", pgbouncer.port)}


class TestFinding:
    def test_the_highest_version_wins(self, tmp_path: Path) -> None:
        for version in ("9", "15", "100"):
            folder = tmp_path / version / "bin"
            folder.mkdir(parents=True)
            folder.joinpath("no-such-server").touch(0o755)

        class Kind(PostgresServer):
            executable = "no-such-server"
            places = (f"{tmp_path}/*/bin",)
            wheel = None

        assert finding.installed(Kind) == tmp_path / "100/bin/no-such-server"

    def test_what_cannot_be_had_is_an_error_with_the_way_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Kind(PostgresServer):
            executable = "no-such-server"
            wheel = None

        monkeypatch.setattr(finding, "install_packages", lambda packages: f"no {packages}")
        with pytest.raises(ServerError) as caught:
            finding.find([Kind])
        assert "apt-get install --no-install-recommends postgresql" in str(caught.value)
        assert "DISTLOCKS_TEST_POSTGRES_URL=" in str(caught.value)
        assert "no {'postgresql'}" in str(caught.value)

    def test_a_server_by_url_that_is_not_there_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session, "_servers", {})
        monkeypatch.setenv(PostgresServer.url_variable, f"postgresql://nobody@{LOOPBACK}:1/x")
        with pytest.raises(ServerError, match="does not answer"):
            session.start()


class TestChildren:
    def test_a_function_returns_its_result(self, spawn: Spawner) -> None:
        assert spawn(double, 21).result() == 42
        assert spawn("tests.integration.test_harness:double", number=4).result() == 8

    def test_a_script_talks_in_lines(self, spawn: Spawner) -> None:
        child = spawn("print('ready'); print(args, input() * times); result = 'done'", 1, times=2)
        child.expect("ready")
        child.send("ho")
        assert child.readline() == "[1] hoho"
        assert child.result() == "done"

    def test_a_failure_carries_the_traceback(self, spawn: Spawner) -> None:
        child = spawn("1 / 0")
        with pytest.raises(ChildFailed, match="ZeroDivisionError"):
            child.result()

    def test_a_failure_that_nobody_asked_for_is_not_lost(self, tmp_path: Path) -> None:
        spawner = Spawner(tmp_path)
        child = spawner("1 / 0")
        assert processes.wait_until(lambda: not child.running, 20)
        with pytest.raises(ChildFailed, match="unnoticed"):
            spawner.close()

    def test_what_is_left_is_ended(self, tmp_path: Path) -> None:
        spawner = Spawner(tmp_path)
        child = spawner("print('ready'); input()")
        child.expect("ready")
        child.pause()
        spawner.close()
        assert not processes.is_alive(child.pid)

    def test_silence_is_an_error(self, spawn: Spawner) -> None:
        child = spawn("input()")
        with pytest.raises(ChildFailed, match="printed nothing"):
            child.readline(timeout=0.1)


class TestProxy:
    @pytest.fixture
    def proxy(self, postgres_server: PostgresServer) -> Iterator[FaultProxy]:
        with FaultProxy(postgres_server.host, postgres_server.port) as proxy:
            yield proxy

    @pytest.fixture
    def client(
        self, proxy: FaultProxy, postgres_server: PostgresServer
    ) -> Iterator[psycopg.Connection]:
        with closing(connect(postgres_server, host=proxy.host, port=proxy.port)) as client:
            yield client

    def test_it_passes(self, proxy: FaultProxy, client: psycopg.Connection) -> None:
        assert client.execute("SELECT repeat('x', 1000000)").fetchone() == ("x" * 1_000_000,)
        assert proxy.connections == 1

    def test_it_delays(self, proxy: FaultProxy, client: psycopg.Connection) -> None:
        proxy.delay = 0.15
        proxy.mode = "delay"
        started = time.monotonic()
        client.execute("SELECT 1")
        assert time.monotonic() - started >= 0.3, "once on the way there, once on the way back"

    def test_a_black_hole_lets_nothing_through_until_it_heals(
        self, proxy: FaultProxy, client: psycopg.Connection
    ) -> None:
        proxy.mode = "blackhole"
        ask(client, "SELECT 42")
        assert hears_nothing(client)
        proxy.mode = "pass"
        assert answer(client) == b"42"

    def test_a_new_connection_into_a_black_hole_hears_nothing(
        self, proxy: FaultProxy, postgres_server: PostgresServer
    ) -> None:
        proxy.mode = "blackhole"
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            connect(postgres_server, host=proxy.host, port=proxy.port)

    def test_only_the_answers_can_be_lost(
        self, proxy: FaultProxy, client: psycopg.Connection, postgres_server: PostgresServer
    ) -> None:
        proxy.answers = "blackhole"
        ask(client, "SELECT pg_advisory_lock(4711)")
        with connect(postgres_server) as other:
            held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711"
            assert processes.wait_until(lambda: other.execute(held).fetchone() == (1,), 5)
        assert hears_nothing(client)

    def test_a_reset_cuts_old_and_new_connections(
        self, proxy: FaultProxy, postgres_server: PostgresServer
    ) -> None:
        with socket.create_connection((proxy.host, proxy.port)) as client:
            assert processes.wait_until(lambda: proxy.connections == 1, 5)
            proxy.mode = "reset"
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        with pytest.raises(psycopg.OperationalError):
            connect(postgres_server, host=proxy.host, port=proxy.port)

        proxy.mode = "pass"
        with connect(postgres_server, host=proxy.host, port=proxy.port) as other:
            assert other.execute("SELECT 1").fetchone() == (1,)

    def test_a_cut_is_over_at_once(
        self, proxy: FaultProxy, client: psycopg.Connection, postgres_server: PostgresServer
    ) -> None:
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            client.execute("SELECT 1")
        with connect(postgres_server, host=proxy.host, port=proxy.port) as other:
            assert other.execute("SELECT 1").fetchone() == (1,)

    def test_a_misspelt_mode_is_refused(self, proxy: FaultProxy) -> None:
        with pytest.raises(ValueError, match="no such mode"):
            proxy.mode = "blackhol"  # type: ignore[assignment]


class TestCleanup:
    def test_a_killed_run_leaves_nothing(self, tmp_path: Path) -> None:
        run = subprocess.Popen(
            [sys.executable, "-c", KILLED_RUN],
            cwd=ROOT,
            env=without_servers(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert run.stdout is not None
        with run.stdout:
            left = json.loads(run.stdout.readline())
            assert all(map(processes.is_alive, left["pids"]))
            assert all(Path(folder).exists() for folder in left["folders"])
            run.send_signal(signal.SIGKILL)
            run.wait(10)

        assert processes.wait_until(lambda: not any(map(processes.is_alive, left["pids"])), 10)
        assert processes.wait_until(lambda: not any(Path(f).exists() for f in left["folders"]), 10)

    def test_an_interrupted_run_ends_its_servers(self, tmp_path: Path) -> None:
        tmp_path.joinpath("test_it.py").write_text(
            "import os, signal\n"
            "def test_it(postgres_server):\n"
            "    print('server', postgres_server.pid, postgres_server.folder, flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n"
        )
        done = nested_pytest("-s", str(tmp_path), env=without_servers())
        assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
        (line,) = (line for line in done.stdout.splitlines() if "server " in line)
        pid, folder = line.split("server ")[1].split()
        assert not processes.is_alive(int(pid))
        assert not Path(folder).exists()

    def test_a_forked_child_ends_nothing_of_its_parents(
        self, postgres_server: PostgresServer
    ) -> None:
        child = subprocess.run(
            [sys.executable, "-c", FORKING_RUN],
            cwd=ROOT,
            env=without_servers(),
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert child.returncode == 0, child.stderr
        assert child.stdout == "True\n"


class TestPlugin:
    def test_a_server_by_url_is_left_as_it_was(
        self, tmp_path: Path, fresh_postgres: PostgresServer
    ) -> None:
        """The nested run makes its databases there, drops them, and neither kills nor ends it."""
        tmp_path.joinpath("conftest.py").write_text("from tests.conftest import *\n")
        tmp_path.joinpath("test_it.py").write_text(
            "from django.db import connections\n"
            "def test_databases(databases, postgres_server):\n"
            "    with connections['postgres_other'].cursor() as cursor:\n"
            "        cursor.execute('SELECT count(*) FROM testapp_account')\n"
            "    assert not postgres_server.owned\n"
            "def test_kills(postgres_server):\n    postgres_server.kill()\n"
            "def test_kills_its_own(fresh_postgres):\n    fresh_postgres.kill()\n"
        )
        listing = "SELECT datname FROM pg_database ORDER BY 1"
        with connect(fresh_postgres) as connection:
            before = connection.execute(listing).fetchall()
            done = nested_pytest(
                str(tmp_path),
                env=without_servers() | {PostgresServer.url_variable: fresh_postgres.url},
            )
            assert "2 passed, 1 skipped" in done.stdout
            assert connection.execute(listing).fetchall() == before

    def test_a_skip_is_a_failure_where_nothing_may_be_skipped(
        self, tmp_path: Path, postgres_server: PostgresServer
    ) -> None:
        tmp_path.joinpath("test_it.py").write_text(
            "import pytest\n"
            "def test_skips():\n    pytest.skip('no such thing here')\n"
            "@pytest.mark.skip(reason='marked')\ndef test_marked():\n    pass\n"
            "@pytest.mark.xfail\ndef test_expected():\n    assert False\n"
        )
        tmp_path.joinpath("test_module.py").write_text(
            "import pytest\npytest.skip('whole module', allow_module_level=True)\n"
        )
        lenient = nested_pytest(str(tmp_path), env=os.environ | {"DISTLOCKS_TEST_NO_SKIPS": ""})
        assert "3 skipped, 1 xfailed" in lenient.stdout
        assert lenient.returncode == 0

        strict = nested_pytest(
            "--continue-on-collection-errors",
            str(tmp_path),
            env=os.environ | {"DISTLOCKS_TEST_NO_SKIPS": "1"},
        )
        assert "1 failed, 1 xfailed, 2 errors" in strict.stdout
        for reason in ("no such thing here", "marked", "whole module"):
            assert reason in strict.stdout
        assert strict.returncode == pytest.ExitCode.TESTS_FAILED

    @pytest.mark.parametrize(
        ("args", "started"),
        [
            ((), True),
            (("tests/integration",), True),
            (("tests/unit", "tests/integration"), True),
            (("tests/unit_of_another_kind",), True),
            (("tests/unit",), False),
            (("tests/unit/test_a.py::test_b", "tests/unit/test_c.py"), False),
            (("--collect-only", "tests/integration"), False),
            (("--markers",), False),
        ],
    )
    def test_servers_start_only_where_tests_need_them(
        self, args: tuple[str, ...], started: bool
    ) -> None:
        done = subprocess.run(
            [sys.executable, "-c", ASKING_RUN, *args],
            cwd=ROOT,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
        )
        assert done.stdout == f"{started}\n", done.stderr


KILLED_RUN = """
import json, time
from tests.servers import finding, session
from tests.servers.children import Spawner
from tests.servers.postgres import PostgresServer

folder = session.open_folder()
server = PostgresServer(finding.find([PostgresServer])[PostgresServer]).start()
server.pause()
child = Spawner(folder)("print('ready'); input()", env={"DJANGO_SETTINGS_MODULE": "tests.settings"})
child.expect("ready")
pids, folders = [server.pid, child.pid], [folder, server.folder]
print(json.dumps({"pids": pids, "folders": list(map(str, folders))}), flush=True)
time.sleep(60)
"""

FORKING_RUN = """
import os, sys
from tests.servers import session
from tests.servers.postgres import PostgresServer

session.KINDS = (PostgresServer,)
session.start()
if (child := os.fork()) == 0:
    sys.exit()
os.waitpid(child, 0)
print(session.server(PostgresServer).running and session.server(PostgresServer).is_ready())
"""

# What the plugin would do, without its doing it in every case: a server costs half a second.
ASKING_RUN = """
import sys
import pytest
from tests.servers import plugin

class Asking:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config):
        options = early_config.known_args_namespace
        print(plugin.runs_tests(options) and plugin.needs_servers(options, early_config))
        raise SystemExit

pytest.main(["-c", "/dev/null", "--rootdir", ".", *sys.argv[1:]], plugins=[Asking()])
"""


def double(number: int) -> int:
    return number * 2


def without_servers() -> dict[str, str]:
    """The environment of a run that has to start its own servers."""
    return {k: v for k, v in os.environ.items() if not k.startswith("DISTLOCKS_TEST_")}


def nested_pytest(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A run of pytest of its own, with this project's configuration."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "no:cacheprovider", *args],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def open_files(pid: int) -> list[str]:
    """What a process has open; nothing of what was closed, or had ended, while it was read."""
    targets = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                targets.append(os.readlink(entry))
    return targets


def listening(pid: int) -> set[tuple[str, str, int]]:
    """Protocol, address and port of every socket on which a process or one below it listens."""
    inodes = set()
    for member in [pid, *processes.descendants(pid)]:
        for target in open_files(member):
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            # 0A: listening. UDP has no such state, but a connected socket hears its peer only.
            waits = fields[3] == "0A" if protocol.startswith("tcp") else fields[2].endswith(":0000")
            if fields[9] in inodes and waits:
                address, port = fields[1].split(":")
                found.add((protocol, address, int(port, 16)))
    return found
