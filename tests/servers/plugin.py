"""Starts the servers before pytest-django loads the settings, and ends them with the run."""

import argparse
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.servers import finding, session
from tests.servers.base import Server, ServerError
from tests.servers.mariadb import MariaDBServer
from tests.servers.pgbouncer import PgBouncerServer
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer, ValkeyServer
from tests.servers.redis_groups import ClusterGroup, RedisGroup, SentinelGroup

# In these folders no test talks to a server.
WITHOUT_SERVERS = ("tests/unit",)
NO_SKIPS_VARIABLE = "DISTLOCKS_TEST_NO_SKIPS"
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
AnyServer = TypeVar("AnyServer", bound=Server)
Group = TypeVar("Group", bound=RedisGroup)


# A wrapper, and the outermost: pytest-django loads the settings in this hook.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, Any, Any]:
    # A shell that starts a job in the background has it ignore what the tests send around.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    options = early_config.known_args_namespace
    if runs_tests(options) and not distributes(options):
        session.open_folder()
        if not needs_servers(options, early_config):
            session.do_without()
        else:
            try:
                session.start()
            except ServerError as error:
                # Not a skip: a run without its servers would look like a run that passed.
                raise pytest.UsageError(str(error)) from None
    return (yield)


def pytest_unconfigure() -> None:
    session.close()


def pytest_report_header() -> list[str]:
    return [
        f"{server.name}: {server.url if server.owned else 'of ' + server.url_variable}"
        for server in session.running()
    ]


def runs_tests(options: argparse.Namespace) -> bool:
    """Whether pytest was asked to run tests and not just to tell something."""
    only_telling = ("collectonly", "help", "version", "markers", "showfixtures", "cacheshow")
    return not any(getattr(options, option, None) for option in only_telling)


def distributes(options: argparse.Namespace) -> bool:
    """Whether the tests run in workers of pytest-xdist, each of which starts its own servers."""
    in_worker = "PYTEST_XDIST_WORKER" in os.environ
    return bool(getattr(options, "numprocesses", None)) and not in_worker


def needs_servers(options: argparse.Namespace, config: pytest.Config) -> bool:
    """Whether a test that may run lies outside the folders that need no server."""
    exempt = [config.rootpath / folder for folder in WITHOUT_SERVERS]
    paths = [
        Path(config.invocation_params.dir, argument.split("::")[0]).resolve()
        for argument in options.file_or_dir
    ]
    return not paths or not all(any(path.is_relative_to(e) for e in exempt) for path in paths)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _no_skip((yield))


def _no_skip(report: Report) -> Report:
    # An expected failure is reported as skipped too, and is none.
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get(NO_SKIPS_VARIABLE):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}\n({NO_SKIPS_VARIABLE} is set: nothing may be skipped)"
    return report


@pytest.fixture
def postgres_server() -> PostgresServer:
    """The run's PostgreSQL. A test that pauses it resumes it; one that kills takes its own."""
    return _running(session.server(PostgresServer))


@pytest.fixture
def fresh_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL of the test's own, running, to be killed at will."""
    server = session.private(PostgresServer)
    if server is None:
        pytest.skip(
            f"{PostgresServer.url_variable} is not ours to kill, and no other PostgreSQL is here"
        )
    with server:
        yield server


@pytest.fixture
def mariadb_server() -> MariaDBServer:
    """The run's MariaDB. A test that pauses it resumes it."""
    return _running(session.server(MariaDBServer))


@pytest.fixture(scope="session")
def pgbouncer() -> Iterator[PgBouncerServer]:
    """A PgBouncer in front of the run's PostgreSQL, started for the tests that ask for it."""
    target = session.server(PostgresServer)
    if url := os.environ.get(PgBouncerServer.url_variable):
        yield PgBouncerServer(url=url, target=target)
        return
    program = finding.find([PgBouncerServer])[PgBouncerServer]
    with PgBouncerServer(program, target=target) as server:
        yield server


@pytest.fixture
def redis_server() -> RedisServer:
    """The run's Redis. A test that pauses it resumes it; one that kills takes its own."""
    return _running(session.server(RedisServer))


@pytest.fixture
def make_redis() -> Iterator[Callable[..., RedisServer]]:
    """Starts further Redis servers of the test's own, with arguments for their command lines."""
    with ExitStack() as started:

        def make(*arguments: str) -> RedisServer:
            server = session.private(RedisServer, arguments=arguments)
            if server is None:
                pytest.skip(session.without_program("a Redis of the test's own"))
            return started.enter_context(server)

        yield make


@pytest.fixture
def fresh_redis(make_redis: Callable[..., RedisServer]) -> RedisServer:
    """A Redis of the test's own, running, to be killed at will."""
    return make_redis()


@pytest.fixture
def valkey_server() -> ValkeyServer:
    """The run's Valkey. A test that pauses it resumes it; one that kills takes its own."""
    return _running(session.on_demand(ValkeyServer))


@pytest.fixture
def fresh_valkey() -> Iterator[ValkeyServer]:
    """A Valkey of the test's own, running, to be killed at will."""
    server = session.private(ValkeyServer)
    if server is None:
        pytest.skip(f"{ValkeyServer.url_variable} is not ours to kill, and no other Valkey is here")
    with server:
        yield server


@pytest.fixture
def redis_sentinel() -> SentinelGroup:
    """The run's Redis under Sentinel. A test that fails it over takes its own."""
    return _whole(session.group(SentinelGroup), SentinelGroup)


@pytest.fixture
def fresh_redis_sentinel() -> Iterator[SentinelGroup]:
    """A master, two replicas and three Sentinels of the test's own, to be killed at will."""
    with _own(SentinelGroup) as group:
        yield group


@pytest.fixture
def redis_cluster() -> ClusterGroup:
    """The run's Redis Cluster. A test that fails it over takes its own."""
    return _whole(session.group(ClusterGroup), ClusterGroup)


@pytest.fixture
def fresh_redis_cluster() -> Iterator[ClusterGroup]:
    """A cluster of six nodes of the test's own, to be killed at will."""
    with _own(ClusterGroup) as group:
        yield group


def _running(server: AnyServer) -> AnyServer:
    if server.owned:
        assert server.running, f"an earlier test has ended the run's {server.name}"
    return server


def _whole(group: Group | None, kind: type[Group]) -> Group:
    if group is None:
        pytest.skip(session.without_program(kind.name))
    assert group.running, f"an earlier test has ended a part of {group.name}"
    return group


def _own(kind: type[Group]) -> Group:
    group = session.private_group(kind)
    if group is None:
        pytest.skip(session.without_program(kind.name))
    return group
