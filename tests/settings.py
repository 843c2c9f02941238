"""Settings of the test run, and of the processes that it starts."""

import os
from pathlib import Path

from tests.servers import mariadb, postgres

# Set by tests.servers.plugin. Without it (mypy, makemigrations) nothing is worth keeping.
RUN_FOLDER = os.environ.get("DISTLOCKS_TEST_DIR")
POSTGRES_URL = os.environ.get(postgres.PostgresServer.url_variable)
MARIADB_URL = os.environ.get(mariadb.MariaDBServer.url_variable)

SECRET_KEY = "only for tests"
DEBUG = False
USE_TZ = True
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.admin",
    "django.contrib.staticfiles",
    "distlocks",
    "tests.testapp",
]
MIDDLEWARE = [
    "tests.browser.policy.StrictPolicy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
# Only the app's own migrations are under test; the tables of the others come up faster without.
MIGRATION_MODULES = dict.fromkeys(["contenttypes", "auth", "sessions", "admin"])


def _sqlite(name: str, **options: object) -> dict[str, object]:
    path = str(Path(RUN_FOLDER, f"{name}.sqlite3")) if RUN_FOLDER else ":memory:"
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "OPTIONS": options,
        # The same file under test, so that processes that the tests start use the same database.
        "TEST": {"NAME": path},
    }


DATABASES = {
    "default": _sqlite(
        "default",
        transaction_mode="IMMEDIATE",
        init_command="PRAGMA journal_mode=wal; PRAGMA synchronous=normal",
    ),
    # As Django sets it up when nobody says anything.
    "deferred": _sqlite("deferred"),
}
DISTLOCKS = {
    "default": {
        "BACKEND": "distlocks.backends.database.DatabaseBackend",
        "OPTIONS": {"using": "default"},
    },
    "portable_sqlite": {
        "BACKEND": "distlocks.backends.database.DatabaseBackend",
        "OPTIONS": {"using": "default", "dialect": "portable"},
    },
    "memory": {"BACKEND": "distlocks.backends.memory.MemoryBackend"},
}
DISTLOCKS["sqlite"] = DISTLOCKS["default"]

# One name for each run: several may share a server that was given by URL.
_name = Path(RUN_FOLDER or "").name.replace("-", "_")
if RUN_FOLDER and POSTGRES_URL:
    DATABASES["postgres"] = postgres.database_settings(POSTGRES_URL, _name)
    DATABASES["postgres_other"] = postgres.database_settings(POSTGRES_URL, f"{_name}_other")
    DISTLOCKS["postgres"] = {
        "BACKEND": "distlocks.backends.database.DatabaseBackend",
        "OPTIONS": {"using": "postgres"},
    }
    DISTLOCKS["portable_postgres"] = {
        "BACKEND": "distlocks.backends.database.DatabaseBackend",
        "OPTIONS": {"using": "postgres", "dialect": "portable"},
    }
    DISTLOCKS["advisory"] = {
        "BACKEND": "distlocks.backends.advisory.AdvisoryBackend",
        "OPTIONS": {"using": "postgres"},
    }
    DISTLOCKS["advisory_free"] = {
        "BACKEND": "distlocks.backends.advisory.AdvisoryBackend",
        "OPTIONS": {"using": "postgres", "on_session_end": "free"},
    }
if RUN_FOLDER and MARIADB_URL:
    import pymysql

    # Django knows only the name of the other driver, which has to be compiled.
    pymysql.install_as_MySQLdb()
    DATABASES["mariadb"] = mariadb.database_settings(MARIADB_URL, _name)
    DISTLOCKS["mariadb"] = {
        "BACKEND": "distlocks.backends.database.DatabaseBackend",
        "OPTIONS": {"using": "mariadb"},
    }
    DISTLOCKS["portable_mariadb"] = {
        "BACKEND": "distlocks.backends.database.DatabaseBackend",
        "OPTIONS": {"using": "mariadb", "dialect": "portable"},
    }

# Where each kind of Redis is, once it runs: those that not every test needs are started later.
REDIS_BACKEND = "distlocks.backends.redis.RedisBackend"
REDIS_URL = os.environ.get("DISTLOCKS_TEST_REDIS_URL")
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}


def redis_stores() -> dict[str, dict[str, object]]:
    """The aliases on the Redis servers that the environment names."""
    found: dict[str, dict[str, object]] = {}
    if url := os.environ.get("DISTLOCKS_TEST_REDIS_URL"):
        found["redis"] = {"url": url, "db": 1}
        found["redis_cache"] = {"cache": "django_redis", "db": 2}
        found["redis_django"] = {"cache": "django"}
    if url := os.environ.get("DISTLOCKS_TEST_VALKEY_URL"):
        found["valkey"] = {"url": url, "db": 1}
    if addresses := os.environ.get("DISTLOCKS_TEST_SENTINELS"):
        service, _, sentinels = addresses.partition("@")
        found["redis_sentinel"] = {"sentinels": _addresses(sentinels), "service": service}
    if addresses := os.environ.get("DISTLOCKS_TEST_CLUSTER"):
        found["redis_cluster"] = {"cluster": _addresses(addresses)}
    # A run may share its server with others.
    entries: dict[str, dict[str, object]] = {
        alias: {"BACKEND": REDIS_BACKEND, "OPTIONS": {**options, "namespace": _name or "test"}}
        for alias, options in found.items()
    }
    if urls := os.environ.get("DISTLOCKS_TEST_REDLOCK"):
        entries["redlock"] = {
            "BACKEND": "distlocks.backends.redlock.RedlockBackend",
            "OPTIONS": {"servers": urls.split(","), "namespace": _name or "test"},
        }
    return entries


def _addresses(text: str) -> list[tuple[str, int]]:
    pairs = [address.rpartition(":") for address in text.split(",")]
    return [(host, int(port)) for host, _, port in pairs]


if RUN_FOLDER and REDIS_URL:
    CACHES["django_redis"] = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": f"{REDIS_URL.removesuffix('/0')}/3",
        "OPTIONS": {"CONNECTION_POOL_KWARGS": {"decode_responses": True}},
    }
    CACHES["django"] = {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": f"{REDIS_URL.removesuffix('/0')}/4",
    }
if RUN_FOLDER:
    DISTLOCKS |= redis_stores()


def zookeeper_stores() -> dict[str, dict[str, object]]:
    """The alias on the ensemble that the environment names, once it runs."""
    hosts = os.environ.get("DISTLOCKS_TEST_ZOOKEEPER")
    if not hosts:
        return {}
    return {
        "zookeeper": {
            "BACKEND": "distlocks.backends.zookeeper.ZooKeeperBackend",
            # On a busy machine three servers now and then take seconds for one write.
            "OPTIONS": {"hosts": hosts, "path": f"/{_name or 'test'}", "timeout": 20},
        }
    }


if RUN_FOLDER:
    DISTLOCKS |= zookeeper_stores()


def fast_path(database: str, **options: object) -> dict[str, object]:
    """An alias over the Redis server of the run and the database of another alias."""
    return {
        "BACKEND": "distlocks.backends.fastpath.FastPathBackend",
        "OPTIONS": {"redis": "redis", "database": database, **options},
    }


if RUN_FOLDER and REDIS_URL:
    DISTLOCKS["fastpath"] = fast_path("postgres")
    # While the database grants.
    for _alias in ("sqlite", "portable_sqlite", "postgres", "portable_postgres", "mariadb"):
        if _alias in DISTLOCKS:
            DISTLOCKS[f"fastpath_on_{_alias}"] = fast_path(_alias, namespace=f"{_name}.{_alias}")

# In the test's own process nothing is written before the test asks for it; in those that it starts,
# what happens to locks is kept in the database of this name, or "off".
HISTORY = os.environ.get("DISTLOCKS_TEST_HISTORY")
for _entry in DISTLOCKS.values() if HISTORY else ():
    if HISTORY == "off":
        _entry["HISTORY_DAYS"] = 0
    else:
        _entry["HISTORY_DATABASE"] = HISTORY
