"""Settings of the demo project. Everything it keeps lies beside its database, by default in var/.

From the environment: DEMO_DATABASE (path of the SQLite file), DEMO_SERVER_NAME (this server
process' label), DEMO_PEERS (all servers, as "alpha=http://127.0.0.1:8001,beta=…"),
DEMO_LEASE_SECONDS, DEMO_INTERVAL_SECONDS, DEMO_JOB_LIMIT and DEMO_TURN_SECONDS; DEMO_BACKEND (where
the locks are: "database", "redis", "redlock", "advisory" or "zookeeper"), and where their servers
are: DEMO_REDIS_URL (a server whose database 1 they may have) and DEMO_REDLOCK_URLS (several, with
commas), of which `demo` and `serve` bring their own when nothing is set; DEMO_POSTGRES_URL (a
database) for advisory locks; DEMO_ZOOKEEPER_HOSTS.
"""

from __future__ import annotations

import os
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured
from django.core.management.utils import get_random_secret_key

from project.kept import kept
from project.lock_settings import lock_settings

BASE_DIR = Path(__file__).resolve().parent.parent
DATABASE = Path(os.environ.get("DEMO_DATABASE") or BASE_DIR / "var" / "demo.sqlite3").absolute()
DATABASE.parent.mkdir(parents=True, exist_ok=True)

SECRET_KEY = kept(DATABASE.parent / "secret-key", get_random_secret_key)
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]"]

INSTALLED_APPS = [
    "project.jobs",
    "distlocks",
    "distlocks.contrib.prometheus",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "project.security.ContentSecurityPolicyMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "project.urls"
WSGI_APPLICATION = "project.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
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

# Readers never wait for the writer (WAL), and a transaction that will write says so at its start
# (IMMEDIATE), so that none fails half-way because another one wrote first.
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATABASE,
        "OPTIONS": {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

LOCKS_IN = os.environ.get("DEMO_BACKEND") or "database"
try:
    _locks = lock_settings(LOCKS_IN, os.environ)
except ValueError as error:
    raise ImproperlyConfigured(str(error)) from error
DISTLOCKS = {"default": _locks.locks, "turns": _locks.turns}
DATABASES |= _locks.databases
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    **_locks.caches,
}

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
# Cookies do not know ports: other sites on this host would read "sessionid" as theirs.
SESSION_COOKIE_NAME = "distlocks_demo_session"
CSRF_COOKIE_NAME = "distlocks_demo_csrf"
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Strict"
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "project" / "static"]
# Straight from the apps' folders: a demo needs no collectstatic. No caching, so that a reload
# shows what the files hold now.
WHITENOISE_USE_FINDERS = True
WHITENOISE_MAX_AGE = 0

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = False

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "json": {
            "()": "pythonjsonlogger.json.JsonFormatter",
            "fmt": "%(levelname)s %(message)s",
            "rename_fields": {"levelname": "level", "message": "event"},
            "timestamp": "at",
        },
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
    "loggers": {
        "project": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
        "distlocks": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
        # The job runner logs its own refusals, as events with a reason. Here only what Django
        # itself reports as an error, such as an unexpected exception in a view.
        "django": {"handlers": ["stderr"], "level": "ERROR", "propagate": False},
    },
}

SERVER_NAME = os.environ.get("DEMO_SERVER_NAME", "local")[:64]
PEERS = dict(peer.split("=", 1) for peer in os.environ.get("DEMO_PEERS", "").split(",") if peer)

JOB_LEASE_SECONDS = float(os.environ.get("DEMO_LEASE_SECONDS", "10"))
JOB_DEFAULT_INTERVAL = float(os.environ.get("DEMO_INTERVAL_SECONDS", "5"))
# So many jobs run at once over all servers; how long one waits for its turn.
JOB_LIMIT = int(os.environ.get("DEMO_JOB_LIMIT", "4"))
JOB_TURN_SECONDS = float(os.environ.get("DEMO_TURN_SECONDS", "20"))
# What a client is told to wait when the lock store cannot be reached.
JOB_STORE_RETRY_SECONDS = 5
