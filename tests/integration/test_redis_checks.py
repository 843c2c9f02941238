"""What the system checks say of Redis backends and their servers; manage.py lock_quarantine."""

from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
from django.conf import settings
from django.core.checks import CheckMessage, run_checks
from django.core.management import CommandError, call_command
from django.test import override_settings
from django_redis import pool

from distlocks import BackendUnavailable, LockTimeout, db_lock, locks
from distlocks.backends.redis import RedisBackend
from distlocks.backends.redis.place import Sentinels
from tests.servers.base import free_port
from tests.servers.redis import RedisServer
from tests.servers.redis_groups import SentinelGroup

REDIS = "distlocks.backends.redis.RedisBackend"
Use = Callable[..., None]


@pytest.fixture
def use() -> Iterator[Use]:
    """Makes a Redis backend the only one."""
    active: list[override_settings] = []

    def use(caches: dict[str, Any] | None = None, max_ttl: float = 30, **options: Any) -> None:
        entry = {"BACKEND": REDIS, "OPTIONS": options, "TTL": 1, "MAX_TTL": max_ttl}
        change = override_settings(
            DISTLOCKS={"default": entry}, CACHES=caches or {"default": settings.CACHES["default"]}
        )
        change.enable()
        active.append(change)

    yield use
    locks.close_all()
    for change in reversed(active):
        change.disable()


def found(deploy: bool = False) -> dict[str | None, CheckMessage]:
    messages = run_checks(tags=["distlocks"], include_deployment_checks=deploy)
    return {message.id: message for message in messages}


class TestOfSettings:
    def test_ordinary_ones_are_silent_and_ask_nobody(self, use: Use) -> None:
        use(url=f"redis://127.0.0.1:{free_port()}/1")
        assert found() == {}

    @pytest.mark.parametrize("kind", ["django", "django_redis"])
    def test_a_cache_in_the_same_database_is_warned_of(self, use: Use, kind: str) -> None:
        cache = settings.CACHES[kind]
        use({"default": cache}, url=cache["LOCATION"])
        warning = found()["distlocks.W005"]
        assert "'default' share a Redis database" in warning.msg

    def test_an_alias_that_was_made_for_the_locks_is_not(self, use: Use) -> None:
        cache = settings.CACHES["django_redis"]
        use({"locks": cache}, cache="locks", db=3)
        assert found() == {}
        use({"locks": cache, "default": cache}, cache="locks", db=3)
        assert [*found()] == ["distlocks.W005"]

    def test_a_cache_on_the_same_server_elsewhere_is_not(self, use: Use) -> None:
        cache = settings.CACHES["django_redis"]
        use({"default": cache}, cache="default")
        assert found() == {}

    def test_less_safety_is_named(self, use: Use) -> None:
        url = f"redis://127.0.0.1:{free_port()}/1"
        use(url=url, incarnation_guard="off")
        assert [*found()] == ["distlocks.W006"]
        use(url=url, quarantine=3)
        assert [*found()] == ["distlocks.W007"]
        use(url=url, max_connections=2)
        assert [*found()] == ["distlocks.W008"]


class TestOfServers:
    def test_a_server_without_persistence(self, use: Use, redis_server: RedisServer) -> None:
        use(url=redis_server.url)
        assert "keeps nothing on disk" in found(deploy=True)["distlocks.W010"].msg

    def test_a_server_that_evicts(self, use: Use, fresh_redis: RedisServer) -> None:
        fresh_redis.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        fresh_redis.ask("CONFIG", "SET", "appendonly", "yes")
        use(url=fresh_redis.url)
        warning = found(deploy=True)
        assert [*warning] == ["distlocks.W009"]
        assert "allkeys-lru" in warning["distlocks.W009"].msg

    def test_too_few_replicas(self, use: Use, redis_server: RedisServer) -> None:
        use(url=redis_server.url, min_replicas=2)
        assert "has 0 replicas" in found(deploy=True)["distlocks.E021"].msg

    def test_a_primary_that_writes_without_its_replicas(
        self, use: Use, redis_sentinel: SentinelGroup
    ) -> None:
        options = {"sentinels": redis_sentinel.sentinels, "service": redis_sentinel.service}
        use(**options)
        assert "min-replicas-to-write 0" in found(deploy=True)["distlocks.W011"].msg
        primary = redis_sentinel.master()
        primary.ask("CONFIG", "SET", "min-replicas-to-write", "1")
        try:
            assert "may take writes for 12 s" in found(deploy=True)["distlocks.W012"].msg
            use(**options, failover_lag=12)
            assert not {"distlocks.W011", "distlocks.W012"} & {*found(deploy=True)}
        finally:
            primary.ask("CONFIG", "SET", "min-replicas-to-write", "0")

    def test_one_that_is_down(self, use: Use) -> None:
        port = free_port()
        use(url=f"redis://127.0.0.1:{port}/0")
        assert f"127.0.0.1:{port}" in found(deploy=True)["distlocks.E019"].msg

    def test_one_that_does_not_tell(self, use: Use, fresh_redis: RedisServer) -> None:
        fresh_redis.ask("ACL", "SETUSER", "default", "-config")
        use(url=fresh_redis.url)
        assert "does not tell" in found(deploy=True)["distlocks.I001"].msg


class TestOfPermissions:
    def test_without_info_nothing_is_granted(
        self, use: Use, fresh_redis: RedisServer, key: str
    ) -> None:
        fresh_redis.ask("ACL", "SETUSER", "default", "-info")
        use(url=fresh_redis.url)
        with pytest.raises(
            BackendUnavailable, match=r"refuses INFO.*'incarnation_guard'"
        ) as caught:
            db_lock(key).acquire()
        assert not caught.value.in_doubt

    def test_unless_the_guard_is_switched_off_by_name(
        self, use: Use, fresh_redis: RedisServer, key: str
    ) -> None:
        fresh_redis.ask("ACL", "SETUSER", "default", "-info")
        use(url=fresh_redis.url, incarnation_guard="off")
        with db_lock(key):
            pass

    def test_a_wrong_password_is_said_to_be_one(
        self, use: Use, fresh_redis: RedisServer, key: str
    ) -> None:
        use(url=f"redis://:wrong@127.0.0.1:{fresh_redis.port}/0")
        with pytest.raises(BackendUnavailable, match=r"WRONGPASS|AUTH|password"):
            db_lock(key).acquire()


class TestQuarantine:
    def test_a_new_server_grants_nothing_until_all_leases_have_ended(
        self, use: Use, fresh_redis: RedisServer, key: str
    ) -> None:
        use(url=fresh_redis.url, max_ttl=600)
        with pytest.raises(LockTimeout, match=r"memory of locks is new .* grants again in \d+"):
            db_lock(key, timeout=0).acquire()

    def test_who_waits_waits_through_it(self, use: Use, fresh_redis: RedisServer, key: str) -> None:
        use(url=fresh_redis.url, max_ttl=1)
        with db_lock(key, timeout=20) as lease:
            assert lease.waited > 0.5

    def test_the_command_tells_and_ends_it(
        self, use: Use, fresh_redis: RedisServer, key: str
    ) -> None:
        use(url=fresh_redis.url, max_ttl=600)
        said = StringIO()
        call_command("lock_quarantine", stdout=said)
        assert "in quarantine, grants locks again in" in said.getvalue()
        call_command("lock_quarantine", end=True, interactive=False, stdout=said)
        assert "quarantine ended" in said.getvalue()
        with db_lock(key, timeout=0):
            pass
        call_command("lock_quarantine", stdout=said)
        assert said.getvalue().endswith("default: grants locks.\n")

    def test_it_asks_first(
        self, use: Use, fresh_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(url=fresh_redis.url, max_ttl=600)
        said = StringIO()
        monkeypatch.setattr("builtins.input", lambda prompt: "no")
        call_command("lock_quarantine", end=True, stdout=said)
        assert "in quarantine, grants locks again" in said.getvalue()
        monkeypatch.setattr("builtins.input", lambda prompt: "yes")
        call_command("lock_quarantine", end=True, stdout=said)
        assert "quarantine ended" in said.getvalue()

    def test_errors_name_what_is_wrong(self, use: Use) -> None:
        use(url=f"redis://127.0.0.1:{free_port()}/0")
        with pytest.raises(CommandError, match="no lock backend 'other'"):
            call_command("lock_quarantine", backend=["other"])
        with pytest.raises(CommandError, match="does not answer"):
            call_command("lock_quarantine")
        memory = {"default": {"BACKEND": "distlocks.backends.memory.MemoryBackend"}}
        with override_settings(DISTLOCKS=memory):
            with pytest.raises(CommandError, match="'default' knows no quarantine"):
                call_command("lock_quarantine", backend=["default"])
            with pytest.raises(CommandError, match="No configured lock backend"):
                call_command("lock_quarantine")


class TestCachesOfOtherKinds:
    def test_one_that_asks_sentinels(
        self, use: Use, redis_sentinel: SentinelGroup, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": f"redis://{redis_sentinel.service}/2",
            "OPTIONS": {
                "CLIENT_CLASS": "django_redis.client.SentinelClient",
                "SENTINELS": redis_sentinel.sentinels,
            },
        }
        monkeypatch.setattr(
            settings,
            "DJANGO_REDIS_CONNECTION_FACTORY",
            "django_redis.pool.SentinelConnectionFactory",
            raising=False,
        )
        monkeypatch.setattr(pool, "_connection_factory", None, raising=False)
        use({"default": cache}, cache="default", quarantine=0)
        backend = locks["default"]
        assert isinstance(backend, RedisBackend)
        assert isinstance(backend.place, Sentinels)
        assert backend.place.db == 15
        with db_lock(key):
            pass
        primary = redis_sentinel.master()
        assert backend.place.known(b"") == (primary.host, primary.port)

    def test_one_whose_keys_are_spread_is_refused(
        self, use: Use, redis_server: RedisServer
    ) -> None:
        cache = {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": [redis_server.url, redis_server.url],
            "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
        }
        use({"default": cache}, cache="default")
        assert "which names no one Redis server" in found()["distlocks.E018"].msg
