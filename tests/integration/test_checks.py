"""System checks that ask real databases, and what a lock says when nobody asked them before."""

import itertools
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, run_checks
from django.core.management import call_command
from django.db import connections, transaction
from django.db.backends.signals import connection_created
from django.test import override_settings

from distlocks import BackendUnavailable, db_lock, locks
from distlocks.checks import check_settings, check_stores
from distlocks.renewal import renewer
from tests.servers.base import free_port
from tests.servers.children import Spawner
from tests.servers.postgres import PostgresServer
from tests.testapp.models import Account

pytestmark = pytest.mark.usefixtures("databases")

NUMBERS = itertools.count(1)
DATABASE = "distlocks.backends.database.DatabaseBackend"


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Adds a database alias and a lock alias of the same name, instead of all other lock aliases.

    Like the project's SQLite database, or like its PostgreSQL, but for the changes.
    """
    names: list[str] = []

    def add(like: str, **changes: Any) -> str:
        # Never one that a thread of another test still knows otherwise.
        name = f"added_{next(NUMBERS)}"
        monkeypatch.setitem(
            connections.databases, name, dict(connections[like].settings_dict) | changes
        )
        names.append(name)
        return name

    yield add
    # What could not be had is given back in the background, as long as there is such an alias.
    renewer.releases.settle()
    renewer.releases.give_up()
    locks.close_all()
    for name in names:
        # A connection that could not be opened cannot be closed either.
        with suppress(Exception):
            connections[name].close()
        del connections[name]


@contextmanager
def locking_in(using: str, **options: Any) -> Iterator[None]:
    aliases = {"default": {"BACKEND": DATABASE, "OPTIONS": {"using": using} | options}}
    with override_settings(DISTLOCKS=aliases):
        yield


def found(using: str, **options: Any) -> list[str]:
    """The ids of what both checks find."""
    with locking_in(using, **options):
        messages = [*check_settings(), *check_stores(databases=[using])]
    return [str(message.id) for message in messages]


def message_of(using: str, number: str) -> CheckMessage:
    with locking_in(using):
        for message in [*check_settings(), *check_stores(databases=[using])]:
            if message.id == f"distlocks.{number}":
                return message
    raise AssertionError(f"there is no {number}")


def sqlite_without_locks(added: Callable[..., str], tmp_path: Path, **options: Any) -> str:
    """A database in use, by others."""
    path = tmp_path / "checked.sqlite3"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE somebody_elses (n)")
    connection.close()
    return added("default", NAME=str(path), OPTIONS=options)


WAL = {"transaction_mode": "IMMEDIATE", "init_command": "PRAGMA journal_mode=wal"}


def test_a_database_that_is_as_it_should_be() -> None:
    assert found("postgres") == []
    assert found("default") == []
    assert found("postgres", dialect="portable") == []


def test_a_database_without_the_table(added: Callable[..., str], tmp_path: Path) -> None:
    using = sqlite_without_locks(added, tmp_path, **WAL)
    assert found(using) == ["distlocks.W002"]
    message = message_of(using, "W002")
    assert isinstance(message, Warning)
    assert repr(using) in message.msg
    assert f"manage.py migrate --database {using}" in str(message.hint)
    assert "allow_migrate" in str(message.hint)
    call_command("migrate", database=using, verbosity=0, run_syncdb=True)
    assert found(using) == []


def test_a_postgresql_without_the_table(
    added: Callable[..., str], postgres_server: PostgresServer
) -> None:
    using = added("postgres", NAME="checked")
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS checked")
        connection.execute("CREATE DATABASE checked")
    # A database with nothing in it is about to be migrated.
    assert found(using) == []
    with connections[using].cursor() as cursor:
        cursor.execute("CREATE TABLE somebody_elses (n int)")
    assert found(using) == ["distlocks.W002"]
    call_command("migrate", database=using, verbosity=0, run_syncdb=True)
    assert found(using) == []
    connections[using].close()
    postgres_server.drop("checked")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (WAL, []),
        (WAL | {"transaction_mode": "EXCLUSIVE"}, []),
        (WAL | {"transaction_mode": "DEFERRED"}, ["distlocks.W001"]),
        ({"init_command": WAL["init_command"]}, ["distlocks.W001"]),
        ({"transaction_mode": "IMMEDIATE"}, ["distlocks.W003"]),
        ({}, ["distlocks.W001", "distlocks.W003"]),
    ],
)
def test_modes_of_sqlite_in_which_writers_suffer(
    added: Callable[..., str], tmp_path: Path, options: dict[str, Any], expected: list[str]
) -> None:
    using = sqlite_without_locks(added, tmp_path, **options)
    call_command("migrate", database=using, verbosity=0, run_syncdb=True)
    assert found(using) == expected


def test_the_hints_on_sqlite_name_what_to_write(added: Callable[..., str], tmp_path: Path) -> None:
    using = sqlite_without_locks(added, tmp_path)
    for number in ("W001", "W003"):
        message = message_of(using, number)
        assert isinstance(message, Warning)
        assert repr(using) in message.msg
        # What the hint says, done, makes the warning go away.
        namespace: dict[str, Any] = {}
        exec(str(message.hint).removeprefix("Give the database ").rstrip("."), namespace)
        options = connections.databases[using]["OPTIONS"] | namespace["OPTIONS"]
        connections[using].close()
        del connections[using]
        connections.databases[using]["OPTIONS"] = options
        assert f"distlocks.{number}" not in found(using)


@pytest.mark.parametrize("dialect", ["auto", "portable"])
def test_a_database_in_memory_has_a_journal_of_its_own(
    added: Callable[..., str], dialect: str
) -> None:
    using = added("default", NAME=":memory:", OPTIONS={"transaction_mode": "IMMEDIATE"})
    assert found(using, dialect=dialect) == []


def test_a_check_changes_no_file(added: Callable[..., str], tmp_path: Path) -> None:
    using = sqlite_without_locks(added, tmp_path)
    path = tmp_path / "checked.sqlite3"
    before = path.read_bytes()
    assert "distlocks.W003" in found(using)
    assert path.read_bytes() == before


def test_a_server_that_cannot_be_reached(added: Callable[..., str]) -> None:
    using = added("postgres", PORT=str(free_port()))
    assert found(using) == ["distlocks.E016"]
    message = message_of(using, "E016")
    assert isinstance(message, Error)
    assert repr(using) in message.msg
    assert "refused" in message.msg


@pytest.mark.parametrize("like", ["postgres", "mariadb"])
def test_a_server_that_is_down_is_no_matter_to_the_check_of_the_settings(
    added: Callable[..., str], like: str
) -> None:
    """It runs before nearly every command, where images are built without a database too."""
    using = added(like, PORT=str(free_port()))
    with locking_in(using):
        assert check_settings() == []
        # Asked, it is an error that the check reports, and does not fail of.
        assert [message.id for message in check_stores(databases=[using])] == ["distlocks.E016"]


@pytest.mark.parametrize("like", ["postgres", "mariadb"])
def test_a_server_that_is_down_when_the_first_lock_is_asked_for(
    added: Callable[..., str], like: str
) -> None:
    """Nothing is known of it yet, not even what kind of server it is."""
    using = added(like, PORT=str(free_port()))
    with locking_in(using):
        for attempt in (db_lock("a", timeout=0).acquire, locks["default"].holders):
            with pytest.raises(BackendUnavailable, match=using):
                attempt()


def test_a_file_that_cannot_be_opened(added: Callable[..., str], tmp_path: Path) -> None:
    using = added("default", NAME=str(tmp_path / "no" / "such" / "folder" / "x.sqlite3"))
    assert found(using) == ["distlocks.E016"]
    assert "unable to open database file" in message_of(using, "E016").msg


def test_a_portable_store_needs_unambiguous_times() -> None:
    with override_settings(USE_TZ=False):
        assert found("default", dialect="portable") == ["distlocks.E015"]
        assert found("default") == []


def test_an_app_that_is_not_installed() -> None:
    apps = [app for app in settings.INSTALLED_APPS if app != "distlocks"]
    with override_settings(INSTALLED_APPS=apps):
        with locking_in("default"):
            (message,) = check_settings()
        assert message.id == "distlocks.E014"
        assert "add 'distlocks' to INSTALLED_APPS" in message.msg


# Which databases a check may ask


@contextmanager
def opened() -> Iterator[list[str]]:
    """The aliases to which a connection is opened."""
    found: list[str] = []

    def note(connection: Any, **_: Any) -> None:
        found.append(connection.alias)

    connections.close_all()
    connection_created.connect(note)
    try:
        yield found
    finally:
        connection_created.disconnect(note)


@pytest.mark.parametrize("databases", [None, [], ["deferred"], ["postgres_other"]])
def test_a_database_that_was_not_named_is_not_asked(databases: list[str] | None) -> None:
    with locking_in("postgres"), opened() as asked:
        assert check_settings() == []
        assert check_stores(databases=databases) == []
    assert asked == []


def test_of_several_stores_only_the_named_are_asked() -> None:
    with opened() as asked:
        check_settings()
        assert check_stores(databases=["postgres"]) == []
    assert set(asked) == {"postgres"}


def test_the_settings_are_checked_without_any_database() -> None:
    with opened() as asked:
        run_checks(tags=["distlocks"])
    assert asked == []


def test_django_runs_both(added: Callable[..., str], tmp_path: Path) -> None:
    using = sqlite_without_locks(added, tmp_path)
    with locking_in(using):
        plain = [message.id for message in run_checks()]
        asking = [message.id for message in run_checks(tags=[Tags.database], databases=[using])]
    assert "distlocks.W001" in plain
    assert {"distlocks.W002", "distlocks.W003"} <= {*asking}
    assert not {"distlocks.W002", "distlocks.W003"} & {*plain}


def test_stores_are_not_asked_while_the_settings_are_wrong() -> None:
    wrong = {"default": {"BACKEND": DATABASE, "TTL": -1}}
    with override_settings(DISTLOCKS=wrong), opened() as asked:
        assert check_stores(databases=["default"]) == []
    assert asked == []


@pytest.mark.parametrize("command", ["check --database {}", "migrate --database {} --run-syncdb"])
def test_the_commands_get_through_before_there_is_a_table(
    added: Callable[..., str], tmp_path: Path, command: str
) -> None:
    """A warning must not keep the migration from being run."""
    using = sqlite_without_locks(added, tmp_path, **WAL)
    with locking_in(using):
        call_command(*command.format(using).split(), verbosity=0)


def test_a_database_that_is_down_fails_the_check_command(
    spawn: Spawner,
) -> None:
    child = spawn(
        """
        from django.core.management import call_command
        from django.core.management.base import SystemCheckError
        try:
            call_command("check", "--database", "postgres")
        except SystemCheckError as error:
            result = str(error)
        """,
        env={
            PostgresServer.url_variable: f"postgresql://postgres@127.0.0.1:{free_port()}/postgres"
        },
    )
    assert "distlocks.E016" in child.result()


# At run time


@pytest.fixture(params=["sqlite", "postgres", "portable on sqlite"])
def bare(
    request: pytest.FixtureRequest,
    added: Callable[..., str],
    tmp_path: Path,
    postgres_server: PostgresServer,
) -> Iterator[str]:
    """The alias of a database without the tables of distlocks, which the default lock uses."""
    kind = request.param
    dialect = "portable" if kind.startswith("portable") else "auto"
    if kind.endswith("sqlite"):
        using = sqlite_without_locks(added, tmp_path, **WAL)
    else:
        with psycopg.connect(postgres_server.url, autocommit=True) as connection:
            connection.execute("DROP DATABASE IF EXISTS bare")
            connection.execute("CREATE DATABASE bare")
        using = added("postgres", NAME="bare")
    with locking_in(using, dialect=dialect):
        yield using
    if kind.endswith("postgres"):
        connections[using].close()
        postgres_server.drop("bare")


def assert_says_what_to_do(error: BackendUnavailable, using: str) -> None:
    assert f"The database {using!r} lacks the tables of distlocks" in str(error)
    assert f"manage.py migrate --database {using}" in str(error)


def test_without_the_table_every_verb_says_what_to_do(bare: str) -> None:
    backend = locks["default"]
    verbs: list[Callable[[], object]] = [
        db_lock("a").acquire,
        db_lock("a", timeout=0).try_acquire,
        db_lock("a", "b").acquire,
        backend.holders,
        lambda: backend.force_release("a"),
        lambda: list(backend.sweep(older_than=3600, batch_size=10)),
    ]
    for verb in verbs:
        with pytest.raises(BackendUnavailable) as caught:
            verb()
        assert_says_what_to_do(caught.value, bare)


async def test_so_do_the_asynchronous_ones(bare: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        await db_lock("a").aacquire()
    assert_says_what_to_do(caught.value, bare)


def test_the_body_does_not_run(bare: str) -> None:
    with pytest.raises(BackendUnavailable), db_lock("a"):
        pytest.fail("the body ran")


def test_inside_a_transaction_it_is_the_same(bare: str) -> None:
    with transaction.atomic(using=bare), pytest.raises(BackendUnavailable) as caught:
        db_lock("a", timeout=0).acquire()
    assert_says_what_to_do(caught.value, bare)


def test_after_the_migration_the_same_process_can_lock(bare: str) -> None:
    with pytest.raises(BackendUnavailable):
        db_lock("a").acquire()
    call_command("migrate", database=bare, verbosity=0, run_syncdb=True)
    with db_lock("a", timeout=0):
        assert Account.objects.using(bare).count() == 0
