"""What `import distlocks` costs those who only import it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.servers.watchdog import ROOT

# Drivers of databases and stores, and what else a program may do without.
HEAVY = ("psycopg", "psycopg2", "sqlite3", "redis", "MySQLdb", "kazoo", "rich", "pytest")

MEASURE = """
import json, sys
import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS={apps!r},
    DATABASES={databases!r},
    # Its tables are not made here.
    DISTLOCKS={{"default": {{"HISTORY_DAYS": 0}}}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()
before = set(sys.modules)
import threading
threads = threading.active_count()
{statements}
json.dump({{"new": sorted(set(sys.modules) - before), "before": sorted(before),
            "all": sorted(sys.modules), "threads": threading.active_count() - threads}}, sys.stdout)
"""


def loaded(
    statements: str, apps: tuple[str, ...] = (), databases: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The modules that the statements load, in a process that has set up Django."""
    script = MEASURE.format(apps=list(apps), databases=databases or {}, statements=statements)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def roots(modules: list[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_an_import_loads_no_driver_and_starts_nothing() -> None:
    found = loaded("import distlocks")
    assert not roots(found["new"]) & {*HEAVY, "asyncio"}
    # Where Django's setup has not loaded them either, they are not there at all.
    assert not roots(found["all"]) & {*HEAVY}
    assert found["threads"] == 0
    # Neither models, which would need installed apps, nor any backend but the base.
    assert "distlocks.models" not in found["new"]
    assert "distlocks.backends.database.backend" not in found["new"]


def test_what_answers_requests_loads_no_tables() -> None:
    found = loaded("import distlocks.http, distlocks.middleware")
    assert not roots(found["all"]) & {*HEAVY, "prometheus_client"}
    assert not [name for name in found["new"] if name.endswith(".models")]
    assert "distlocks.admin" not in found["all"]


def test_the_installed_app_loads_no_driver_either() -> None:
    found = loaded("import distlocks", apps=("distlocks",))
    assert not roots(found["all"]) & {*HEAVY}
    assert found["threads"] == 0
    assert found["new"] == [] or "asyncio" not in roots(found["new"])


def test_a_lock_in_memory_needs_no_driver() -> None:
    found = loaded(
        """
from django.conf import settings
settings.DISTLOCKS = {"default": {"BACKEND": "distlocks.backends.memory.MemoryBackend"}}
from distlocks import db_lock
with db_lock("a"):
    pass
""",
    )
    assert not roots(found["all"]) & {*HEAVY}


def test_a_lock_written_down_asks_for_nothing() -> None:
    """As a decorator does when its module is imported."""
    found = loaded(
        """
from distlocks import db_lock

@db_lock("order:{pk}", ttl=30)
def ship(pk):
    pass
""",
        apps=("distlocks",),
        databases={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "nowhere"}},
    )
    assert "distlocks.backends.database.backend" not in found["new"]
    assert "distlocks.backends.database.listener" not in found["all"]
    assert found["threads"] == 0


def test_on_sqlite_only_sqlite_is_loaded() -> None:
    found = loaded(
        """
from django.core.management import call_command
call_command("migrate", verbosity=0)
from distlocks import db_lock
with db_lock("a"):
    pass
""",
        apps=("distlocks",),
        databases={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    )
    assert roots(found["all"]) & {*HEAVY} == {"sqlite3"}


WITHOUT_EXTRAS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import django
from django.conf import settings

settings.configure(
    SECRET_KEY="only for tests",
    ALLOWED_HOSTS=["testserver"],
    ROOT_URLCONF="tests.urls",
    STATIC_URL="static/",
    USE_TZ=True,
    INSTALLED_APPS=[
        *(f"django.contrib.{{app}}" for app in
          ("contenttypes", "auth", "sessions", "messages", "admin", "staticfiles")),
        "distlocks",
    ],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[{{
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {{"context_processors": [
            "django.template.context_processors.request",
            "django.contrib.auth.context_processors.auth",
            "django.contrib.messages.context_processors.messages",
        ]}},
    }}],
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": {database!r}}}}},
)
django.setup()
from contextlib import suppress
from django.core.management import CommandError, call_command, get_commands
from django.test import Client

call_command("check", fail_level="ERROR")
call_command("migrate", verbosity=0)
from distlocks import db_lock
from django.contrib.auth.models import User

client = Client()
client.force_login(User.objects.create_superuser("olga"))
with db_lock("a"):
    for page in ("lock", "lockrollup", "lockevent"):
        assert client.get(f"/admin/distlocks/{{page}}/").status_code == 200, page
    for name, app in get_commands().items():
        if app == "distlocks" and name not in ("with_lock", "release_lock"):
            # Two of them are for backends that are not configured here, and say so.
            with suppress(CommandError):
                call_command(name)
call_command("with_lock", "a", "--", "true")
db_lock("a").acquire()
call_command("release_lock", "a", "--yes")
"""


def test_without_the_extras_all_of_it_works(tmp_path: Path) -> None:
    """The core needs only Django: its admin, checks, migrations and commands too."""
    missing = {"redis", "django_redis", "psycopg", "kazoo", "prometheus_client"}
    script = WITHOUT_EXTRAS.format(missing=missing, database=str(tmp_path / "db.sqlite3"))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_can_be_imported_before_the_settings_are_there() -> None:
    done = subprocess.run(
        [
            sys.executable,
            *["-W", "error", "-c"],
            "import distlocks, distlocks.testing\n"
            "from distlocks import db_lock, signals\n"
            "from django.conf import settings\n"
            "db_lock('a')\n"
            "assert not settings.configured\n",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
