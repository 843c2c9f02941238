"""What an advisory backend refuses, by number and with the way out."""

import subprocess
import sys
from typing import Any

import pytest
from django.conf import settings
from django.core.checks import run_checks
from django.db import connections
from django.db.backends.postgresql import psycopg_any
from django.test import override_settings

from distlocks import BackendUnavailable, NotSupported, db_lock, locks
from distlocks.checks import check_settings, check_stores
from distlocks.conf import InvalidSetting
from tests.integration.advisory.conftest import Way
from tests.servers.postgres import PostgresServer
from tests.servers.watchdog import ROOT

pytestmark = pytest.mark.usefixtures("databases")


def configured(**options: Any) -> override_settings:
    entry = {**settings.DISTLOCKS["advisory"]}
    entry["OPTIONS"] = {**entry["OPTIONS"], **options}
    return override_settings(DISTLOCKS={**settings.DISTLOCKS, "advisory": entry})


@pytest.mark.parametrize(
    ("options", "check_id", "words"),
    [
        ({"using": "nowhere"}, "distlocks.E011", "Configured are"),
        ({"using": "default"}, "distlocks.E030", "only PostgreSQL"),
        ({"using": "mariadb"}, "distlocks.E030", "DatabaseBackend"),
        ({"max_sessions": 0}, "distlocks.E032", "from 1 to"),
        ({"max_sessions": True}, "distlocks.E032", "from 1 to"),
        ({"max_sessions": "10"}, "distlocks.E032", "a session of the server's"),
        ({"on_session_end": "later"}, "distlocks.E035", "waits out the lease"),
        ({"transactional": 1}, "distlocks.E033", "True or False"),
        ({"dialect": "auto"}, "distlocks.E010", "max_sessions"),
    ],
)
def test_what_is_wrong_is_refused(options: dict[str, Any], check_id: str, words: str) -> None:
    with configured(**options):
        with pytest.raises(InvalidSetting, match=words) as caught:
            _ = locks["advisory"]
        assert caught.value.check_id == check_id
        assert check_id in [message.id for message in check_settings()]


def test_the_older_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psycopg_any, "is_psycopg3", False)
    with configured(), pytest.raises(InvalidSetting, match=r"distlocks\[advisory\]") as caught:
        _ = locks["advisory"]
    assert caught.value.check_id == "distlocks.E031"


WITHOUT_A_DRIVER = """
import sys
sys.modules["psycopg"] = sys.modules["psycopg2"] = None
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["distlocks"],
    DATABASES={
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
        "pg": {"ENGINE": "django.db.backends.postgresql", "NAME": "none"},
    },
    DISTLOCKS={
        "default": {
            "BACKEND": "distlocks.backends.advisory.AdvisoryBackend",
            "OPTIONS": {"using": "pg"},
        },
    },
)
import django
django.setup()
from distlocks.checks import check_settings
print(*[f"{message.id} {message.hint}" for message in check_settings()])
"""


def test_so_is_none_at_all() -> None:
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_DRIVER],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert said == "distlocks.E031 Install distlocks[advisory].\n"


def test_one_that_is_right_has_nothing_to_say() -> None:
    with configured():
        assert [m for m in run_checks(databases=["postgres"]) if "advisory" in m.msg] == []


def test_more_sessions_than_the_server_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with configured(max_sessions=150):
        messages = check_stores(databases=["postgres"])
    assert [m.id for m in messages if "'advisory'" in m.msg] == ["distlocks.W030"]


def test_a_missing_table_is_told_by_check_and_by_verb(
    way: Way, fresh_postgres: PostgresServer, key: str
) -> None:
    place = {"HOST": fresh_postgres.host, "PORT": str(fresh_postgres.port), "NAME": "postgres"}
    store = way("bare", **place)
    with connections[store.using].cursor() as cursor:
        cursor.execute("CREATE TABLE other (id int)")
    (message,) = store.backend.check_store()
    assert message.id == "distlocks.W002"
    with pytest.raises(BackendUnavailable, match="lacks the tables"):
        store.lock(key, timeout=0).acquire()
    fresh_postgres.kill()
    (message,) = store.backend.check_store()
    assert message.id == "distlocks.E016"


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [(("k",), {"limit": 2}, "permits"), ((("a", "b"),), {}, "tree keys")],
)
def test_claims_that_there_are_not(keys: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(NotSupported, match=words):
        db_lock(*keys, backend="advisory", timeout=0, **options).acquire()
