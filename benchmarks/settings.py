"""Django's settings under the benchmarks, in their process and in those that it starts."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.servers.postgres import database_settings

FOLDER = Path(os.environ["DISTLOCKS_TEST_DIR"])
# Of the servers that the chosen benchmarks need.
POSTGRES_URL = os.environ.get("DISTLOCKS_TEST_POSTGRES_URL")
REDIS_URL = os.environ.get("DISTLOCKS_TEST_REDIS_URL")

SECRET_KEY = "only for benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PEERS = ("pgactivity", "pglock", "db_mutex")
# The admin's pages are measured too.
ADMIN = ("contenttypes", "auth", "sessions", "messages", "admin")
INSTALLED_APPS = [
    "distlocks",
    *(f"django.contrib.{name}" for name in ADMIN),
    *(peer for peer in PEERS if find_spec(peer)),
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
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
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"

SQLITE = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": str(FOLDER / "bench.sqlite3"),
    "OPTIONS": {
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode=wal; PRAGMA synchronous=normal",
    },
}
BACKEND = "distlocks.backends.database.DatabaseBackend"
DATABASES: dict[str, Any] = {"default": SQLITE}
DISTLOCKS: dict[str, Any] = {"default": {"BACKEND": BACKEND}}
if POSTGRES_URL:
    # One name for each run: several may share a server that was given by URL.
    name = FOLDER.name.replace("-", "_")
    DATABASES = {"default": database_settings(POSTGRES_URL, name), "sqlite": SQLITE}
    DISTLOCKS["sqlite"] = {"BACKEND": BACKEND, "OPTIONS": {"using": "sqlite"}}
    ADVISORY = {"BACKEND": "distlocks.backends.advisory.AdvisoryBackend"}
    DISTLOCKS["advisory"] = ADVISORY
    DISTLOCKS["advisory_free"] = {**ADVISORY, "OPTIONS": {"on_session_end": "free"}}
# Of the peers' clients: who waits in the server keeps a connection for as long as it takes. By
# itself, redis-py raises for the hundred and first, and for who waits longer than five seconds.
CLIENT = {"max_connections": 10_000, "socket_timeout": None}
if REDIS_URL:
    DISTLOCKS["redis"] = {
        "BACKEND": "distlocks.backends.redis.RedisBackend",
        "TTL": 30,
        "MAX_TTL": 30,
        # A server that has just been started has forgotten nobody's lease here.
        "OPTIONS": {"url": REDIS_URL, "quarantine": 0},
    }
    DISTLOCKS["fastpath"] = {
        "BACKEND": "distlocks.backends.fastpath.FastPathBackend",
        "OPTIONS": {"redis": "redis", "database": "default"},
    }
    if find_spec("django_redis"):
        CACHES = {
            "default": {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": REDIS_URL,
                "OPTIONS": {"CONNECTION_POOL_KWARGS": CLIENT},
            },
        }
for _alias in ("default", "redis"):
    if _alias in DISTLOCKS:
        DISTLOCKS[f"{_alias}_unrecorded"] = {**DISTLOCKS[_alias], "HISTORY_DAYS": 0}
# What is lost on purpose is counted, and need not be read as well.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "loggers": {name: {"level": "ERROR"} for name in ("distlocks", "redis_lock", "pottery")},
}
