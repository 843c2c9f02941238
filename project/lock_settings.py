"""Which locks the demo has for the backend that DEMO_BACKEND names, as settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from project.redis_url import address, with_database

PERIODS = {"TTL": 30, "TIMEOUT": 10}
IN_DATABASE = {
    "BACKEND": "distlocks.backends.database.DatabaseBackend",
    **PERIODS,
    "OPTIONS": {"using": "default"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LockSettings:
    """Entries of DISTLOCKS, CACHES and DATABASES."""

    locks: dict[str, Any]
    # For permits, of which some backends have none: the same, or the demo's database.
    turns: dict[str, Any]
    caches: dict[str, Any] = field(default_factory=dict)
    databases: dict[str, Any] = field(default_factory=dict)


def in_database(environment: Mapping[str, str]) -> LockSettings:
    return LockSettings(locks=IN_DATABASE, turns=IN_DATABASE)


def in_redis(environment: Mapping[str, str]) -> LockSettings:
    # Without it, `demo` and `serve` bring a server, and say later where.
    url = environment.get("DEMO_REDIS_URL") or "redis://127.0.0.1:6379"
    try:
        location = with_database(url, 1)
    except ValueError as error:
        raise ValueError(f"DEMO_REDIS_URL is no URL of a Redis server: {error}.") from error
    entry = {
        "BACKEND": "distlocks.backends.redis.RedisBackend",
        **PERIODS,
        "OPTIONS": {"cache": "locks", "db": 1},
    }
    # An alias of the locks' own, with a database of its own: whoever clears a cache clears no lock.
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location}
    return LockSettings(locks=entry, turns=entry, caches={"locks": cache})


def in_redlock(environment: Mapping[str, str]) -> LockSettings:
    given = environment.get("DEMO_REDLOCK_URLS")
    # Without them, `demo` and `serve` bring servers, and say later where.
    urls = given.split(",") if given else [f"redis://127.0.0.1:{6379 + n}" for n in range(5)]
    for url in urls:
        try:
            address(url)
        except ValueError as error:
            raise ValueError(
                f"DEMO_REDLOCK_URLS: {url!r} is no URL of a Redis server: {error}."
            ) from error
    entry = {
        "BACKEND": "distlocks.backends.redlock.RedlockBackend",
        **PERIODS,
        "OPTIONS": {"servers": urls},
    }
    return LockSettings(locks=entry, turns=IN_DATABASE)


def in_advisory_locks(environment: Mapping[str, str]) -> LockSettings:
    url = environment.get("DEMO_POSTGRES_URL", "")
    parts = urlsplit(url)
    if parts.scheme not in ("postgres", "postgresql") or not parts.path.strip("/"):
        raise ValueError(
            "DEMO_POSTGRES_URL must name the database in which the locks are to be: "
            "postgresql://USER:PASSWORD@HOST:5432/DATABASE."
        )
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.strip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "127.0.0.1",
        "PORT": str(parts.port or 5432),
    }
    entry = {
        "BACKEND": "distlocks.backends.advisory.AdvisoryBackend",
        **PERIODS,
        "OPTIONS": {"using": "locks"},
    }
    return LockSettings(locks=entry, turns=IN_DATABASE, databases={"locks": database})


def in_zookeeper(environment: Mapping[str, str]) -> LockSettings:
    hosts = environment.get("DEMO_ZOOKEEPER_HOSTS", "")
    if not hosts:
        raise ValueError(
            "DEMO_ZOOKEEPER_HOSTS must name the servers: HOST:2181,HOST:2181,HOST:2181."
        )
    entry = {
        "BACKEND": "distlocks.backends.zookeeper.ZooKeeperBackend",
        **PERIODS,
        "OPTIONS": {"hosts": hosts, "path": "/distlocks-demo"},
    }
    return LockSettings(locks=entry, turns=entry)


KINDS = {
    "database": in_database,
    "redis": in_redis,
    "redlock": in_redlock,
    "advisory": in_advisory_locks,
    "zookeeper": in_zookeeper,
}


def lock_settings(kind: str, environment: Mapping[str, str]) -> LockSettings:
    """The settings for the kind; ValueError if it is not known, or lacks what it needs."""
    if kind not in KINDS:
        raise ValueError(
            f"DEMO_BACKEND={kind!r} is not known. The demo's locks are in one of: "
            f"{', '.join(KINDS)}."
        )
    return KINDS[kind](environment)
