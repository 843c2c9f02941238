"""Django's settings under the benchmarks, in their process and in those that it starts."""

import os
from importlib.util import find_spec
from pathlib import Path

from tests.servers.postgres import database_settings

FOLDER = Path(os.environ["DISTLOCKS_TEST_DIR"])
URL = os.environ["DISTLOCKS_TEST_POSTGRES_URL"]

SECRET_KEY = "only for benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PEERS = ("pgactivity", "pglock", "db_mutex")
INSTALLED_APPS = ["distlocks", *(peer for peer in PEERS if find_spec(peer))]

DATABASES = {
    # One name for each run: several may share a server that was given by URL.
    "default": database_settings(URL, FOLDER.name.replace("-", "_")),
    "sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(FOLDER / "bench.sqlite3"),
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=wal; PRAGMA synchronous=normal",
        },
    },
}
BACKEND = "distlocks.backends.database.DatabaseBackend"
DISTLOCKS = {
    "default": {"BACKEND": BACKEND},
    "sqlite": {"BACKEND": BACKEND, "OPTIONS": {"using": "sqlite"}},
}
# What is lost on purpose is counted, and need not be read as well.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "loggers": {"distlocks": {"level": "ERROR"}},
}
