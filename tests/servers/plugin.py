"""Starts the servers before pytest-django loads the settings, and ends them with the run."""

import argparse
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.servers import finding, session
from tests.servers.base import ServerError
from tests.servers.mariadb import MariaDBServer
from tests.servers.pgbouncer import PgBouncerServer
from tests.servers.postgres import PostgresServer

# In these folders no test talks to a server.
WITHOUT_SERVERS = ("tests/unit",)
NO_SKIPS_VARIABLE = "DISTLOCKS_TEST_NO_SKIPS"
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


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
    server = session.server(PostgresServer)
    if server.owned:
        assert server.running, "an earlier test has ended the run's PostgreSQL"
    return server


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
    server = session.server(MariaDBServer)
    if server.owned:
        assert server.running, "an earlier test has ended the run's MariaDB"
    return server


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
