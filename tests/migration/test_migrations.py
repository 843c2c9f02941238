"""The tables: made by the migrations as the models say, with what each database needs."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connections, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from pytest_django.fixtures import Settings

from distlocks import BackendUnavailable, LockTimeout, db_lock, locks
from distlocks.keys import MAX_LENGTH, MAX_PREFIX_LENGTH
from distlocks.models import Lock
from distlocks.renewal import renewer
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.usefixtures("databases")

on_both = pytest.mark.parametrize("using", ["default", "postgres"])


def test_the_models_have_no_change_that_no_migration_makes() -> None:
    out = io.StringIO()
    # Ends with an error if there is one.
    call_command("makemigrations", "distlocks", "--check", "--dry-run", stdout=out)
    assert "No changes detected" in out.getvalue()


def test_there_is_one_line_of_migrations() -> None:
    loader = MigrationLoader(None)
    assert not loader.detect_conflicts()
    names = sorted(name for app, name in loader.disk_migrations if app == "distlocks")
    assert names[0] == "0001_initial"
    assert [name[:4] for name in names] == [f"{n:04d}" for n in range(1, len(names) + 1)]


def test_the_migrations_depend_on_no_other_app() -> None:
    loader = MigrationLoader(None)
    for (app, name), migration in loader.disk_migrations.items():
        if app == "distlocks":
            assert {dependency[0] for dependency in migration.dependencies} <= {"distlocks"}, name


def test_no_table_points_at_another() -> None:
    for model in apps.get_app_config("distlocks").get_models():
        assert not [field for field in model._meta.get_fields() if field.is_relation]


@on_both
def test_nothing_is_left_to_migrate(using: str) -> None:
    executor = MigrationExecutor(connections[using])
    targets = [key for key in executor.loader.graph.leaf_nodes() if key[0] == "distlocks"]
    assert executor.migration_plan(targets) == []


def ask(using: str, query: str, *params: Any) -> list[tuple[Any, ...]]:
    with connections[using].cursor() as cursor:
        cursor.execute(query, params)
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return found


# PostgreSQL


def test_the_primary_key_is_the_only_index() -> None:
    """Any other one would have to be written at every renewal, and end updates in place."""
    found = ask(
        "postgres", "SELECT indexdef FROM pg_indexes WHERE tablename = %s", "distlocks_lock"
    )
    assert [definition.split(" USING ")[1] for (definition,) in found] == ["btree (key)"]


def test_pages_keep_room_for_the_next_version_of_their_rows() -> None:
    (row,) = ask("postgres", "SELECT reloptions FROM pg_class WHERE relname = %s", "distlocks_lock")
    assert row == (["fillfactor=70"],)


def test_updates_stay_on_their_page_and_touch_no_index(key: str) -> None:
    def updates() -> tuple[int, int]:
        ask("postgres", "SELECT pg_stat_clear_snapshot()")
        ((all_of_them, in_place),) = ask(
            "postgres",
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = %s",
            "distlocks_lock",
        )
        return all_of_them, in_place

    lock = Lock(key=key, fencing_token=1, acquired_at=1)
    lock.save(using="postgres")
    with transaction.atomic(using="postgres"):
        before = updates()
        mine = Lock.objects.using("postgres").filter(key=key)
        for number in range(20):
            mine.update(owner_id=f"{number}", expires_at=number, fencing_token=number)
        after = updates()
    assert after[0] - before[0] == 20
    # As long as the page has room: it was not empty.
    assert after[1] - before[1] >= 10
    mine.delete()


def test_keys_are_compared_byte_by_byte() -> None:
    (row,) = ask(
        "postgres",
        "SELECT collation_name, data_type, character_maximum_length"
        " FROM information_schema.columns WHERE table_name = %s AND column_name = 'key'",
        "distlocks_lock",
    )
    assert row == ("C", "character varying", MAX_LENGTH + MAX_PREFIX_LENGTH)


def test_a_search_for_a_prefix_uses_the_primary_key() -> None:
    with transaction.atomic(using="postgres"):
        for other_way in ("enable_seqscan", "enable_bitmapscan"):
            ask("postgres", "SELECT set_config(%s, 'off', true)", other_way)
        plan = ask(
            "postgres",
            "EXPLAIN SELECT * FROM distlocks_lock WHERE key >= 'order:' ORDER BY key LIMIT 10",
        )
    text = "\n".join(line for (line,) in plan)
    assert "Index Scan using distlocks_lock_pkey" in text
    assert "Sort" not in text


# Both


@on_both
def test_the_longest_key_fits(using: str) -> None:
    longest = "🔒" * (MAX_LENGTH + MAX_PREFIX_LENGTH)
    rows = Lock.objects.using(using)
    rows.create(key=longest, fencing_token=1, acquired_at=1)
    assert rows.get(key=longest).key == longest
    rows.filter(key=longest).delete()


@on_both
def test_numbers_reach_as_far_as_tokens_do(using: str, key: str) -> None:
    largest = 2**53
    rows = Lock.objects.using(using)
    rows.create(key=key, fencing_token=largest, acquired_at=largest, expires_at=largest)
    row = rows.get(key=key)
    assert (row.fencing_token, row.acquired_at, row.expires_at) == (largest,) * 3
    rows.filter(key=key).delete()


# From nothing, and back


@pytest.fixture(params=["sqlite", "postgres"])
def empty(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """The alias of a database with nothing in it."""
    like = {"sqlite": "default"}.get(request.param, request.param)
    database = dict(connections[like].settings_dict)
    if request.param == "sqlite":
        database["NAME"] = str(tmp_path / "empty.sqlite3")
    else:
        database["NAME"] = "empty"
        postgres_server.drop("empty")
        with psycopg.connect(postgres_server.url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE empty")
    alias = f"empty_{request.param}"
    monkeypatch.setitem(connections.databases, alias, database)
    yield alias
    connections[alias].close()
    del connections[alias]
    if request.param == "postgres":
        postgres_server.drop("empty")


def migrate(using: str, target: str | None) -> None:
    executor = MigrationExecutor(connections[using])
    executor.migrate([("distlocks", target)])


def tables(using: str) -> set[str]:
    return {
        name
        for name in connections[using].introspection.table_names()
        if name.startswith("distlocks")
    }


def test_the_way_there_and_back_and_there_again(empty: str) -> None:
    for _ in range(2):
        migrate(empty, "0001_initial")
        assert tables(empty) == {"distlocks_lock"}
        migrate(empty, None)
        assert tables(empty) == set()


def test_the_migrations_can_be_written_as_sql(empty: str) -> None:
    out = io.StringIO()
    call_command("sqlmigrate", "distlocks", "0001", database=empty, stdout=out)
    assert 'CREATE TABLE "distlocks_lock"' in out.getvalue()
    if empty == "empty_postgres":
        assert 'COLLATE "C"' in out.getvalue()
        assert "varchar_pattern_ops" not in out.getvalue()
    assert tables(empty) == set()


def test_what_the_migrations_make_is_what_the_models_describe(empty: str) -> None:
    migrate(empty, "0006_history")
    for model in apps.get_app_config("distlocks").get_models():
        with connections[empty].cursor() as cursor:
            described = connections[empty].introspection.get_table_description(
                cursor, model._meta.db_table
            )
        assert {column.name for column in described} == {f.column for f in model._meta.fields}
        nullable = {column.name for column in described if column.null_ok}
        assert nullable == {field.column for field in model._meta.fields if field.null}


@pytest.fixture
def locks_in_empty(empty: str, settings: Settings) -> str:
    """An alias of locks in that database."""
    backend = "distlocks.backends.database.DatabaseBackend"
    settings.DISTLOCKS = {
        **settings.DISTLOCKS,
        "upgraded": {"BACKEND": backend, "OPTIONS": {"using": empty}},
    }
    return "upgraded"


def test_before_the_migration_that_it_needs_an_acquire_says_so(
    empty: str, locks_in_empty: str
) -> None:
    migrate(empty, "0002_guard")
    for options in ({}, {"shared": True}):
        with pytest.raises(BackendUnavailable, match=f"manage.py migrate --database {empty}"):
            db_lock("a", backend=locks_in_empty, **options).acquire()
        # What was refused so plainly was not granted: nothing has to be taken back.
        assert not renewer.releases.pending
    assert "distlocks.W002" in [message.id for message in locks[locks_in_empty].check_store()]


def test_what_is_held_during_a_migration_stays_held(
    empty: str, locks_in_empty: str, key: str
) -> None:
    migrate(empty, "0002_guard")
    with connections[empty].cursor() as cursor:
        cursor.execute(
            "INSERT INTO distlocks_lock (key, owner_id, fencing_token, acquired_at, expires_at,"
            " waiting_until, host, pid, thread, label, metadata)"
            " VALUES (%s, 'old', 7, 0, 9000000000000000, 0, 'web-7', 1, '', '', '{}')",
            [key],
        )
    migrate(empty, "0003_claims")
    with pytest.raises(LockTimeout) as caught:
        db_lock(key, backend=locks_in_empty, timeout=0).acquire()
    (holder,) = caught.value.holders
    assert (holder.owner_id, holder.mode, holder.host) == ("old", "exclusive", "web-7")


def test_locks_are_kept_in_the_database_that_was_migrated(key: str) -> None:
    for backend, using in (("sqlite", "default"), ("postgres", "postgres")):
        with db_lock(key, backend=backend):
            assert Lock.objects.using(using).filter(key=key).exists()
    assert not Lock.objects.using("postgres_other").filter(key=key).exists()
