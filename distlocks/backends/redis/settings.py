"""What the OPTIONS of a Redis backend say: where its servers are, and what it demands of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis import ConnectionPool, RedisError
from redis.connection import Connection, SSLConnection, parse_url
from redis.sentinel import Sentinel, SentinelConnectionPool

from ..given import GivenOptions
from .place import Address, Cluster, Place, Sentinels, Single

if TYPE_CHECKING:
    from .backend import RedisBackend

WHERE = ("url", "sentinels", "cluster", "cache")
NAMES = (
    *WHERE,
    "service",
    "sentinel_settings",
    "connection",
    "db",
    "namespace",
    "max_connections",
    "incarnation_guard",
    "quarantine",
    "failover_lag",
    "min_replicas",
)
GUARDS = ("on", "off")
# Of the 16 that a server has unless it is told otherwise: one that nobody uses by accident, so
# that clearing a cache does not clear the locks.
DATABASE = 15
OTHER_DATABASE = 14
MAX_CONNECTIONS = 100


class Settings(GivenOptions):
    """The OPTIONS of one alias, checked."""

    check = 18

    def __init__(self, backend: RedisBackend) -> None:
        super().__init__(backend)
        self.max_ttl = backend.params.max_ttl
        named = [name for name in WHERE if name in self.options]
        if len(named) != 1:
            self.refuse(
                f"must name its servers by one of {', '.join(WHERE)}, not by "
                f"{' and '.join(named) or 'none'}.",
                "For instance 'url': 'redis://127.0.0.1:6379/1', or 'cache': an alias of CACHES.",
            )
        self.namespace = self._namespace()
        self.guard = self.options.get("incarnation_guard", "on")
        if self.guard not in GUARDS:
            self.refuse(
                f"['incarnation_guard'] = {self.guard!r} is not known.",
                "'on' (the default), or 'off' (a restart or failover may grant a lock twice).",
            )
        self.min_replicas = self._number("min_replicas", 0, 0)
        self.max_connections = self._number("max_connections", None, 2)
        self.failover_lag = self.seconds("failover_lag", 0.0)
        self.quarantine = self.seconds("quarantine", self.max_ttl) + self.failover_lag

    def place(self) -> Place:
        """Where the servers are. Connects to none."""
        connection = self.arguments("redis-py")
        if "db" in self.options:
            connection["db"] = self._number("db", 0, 0)
        if "cache" in self.options:
            return self._from_cache(connection)
        if "url" in self.options:
            return self._from_url(connection)
        if "sentinels" in self.options:
            return self._from_sentinels(connection)
        return self._from_cluster(connection)

    def _from_url(self, connection: dict[str, Any]) -> Place:
        url = self.options["url"]
        try:
            return Single.from_pool(ConnectionPool.from_url(url), **connection)
        except (ValueError, TypeError, AttributeError, RedisError) as error:
            self.refuse(
                f"['url'] is no URL of a Redis server: {error}",
                "For instance 'redis://127.0.0.1:6379/1', 'rediss://…' with TLS, or "
                "'unix:///run/redis.sock?db=1'.",
            )

    def _from_sentinels(self, connection: dict[str, Any]) -> Place:
        service = self.options.get("service")
        if not isinstance(service, str) or not service:
            self.refuse("has 'sentinels' and lacks 'service'.", "For instance 'mymaster'.")
        make_sentinel: Any = Sentinel
        sentinel = make_sentinel(
            self._addresses("sentinels"),
            sentinel_kwargs={
                "socket_timeout": connection.get("socket_timeout", 1.0),
                **self.options.get("sentinel_settings", {}),
            },
        )
        kind = SSLConnection if connection.pop("ssl", False) else Connection
        return Sentinels(sentinel, service, kind, connection)

    def _from_cluster(self, connection: dict[str, Any]) -> Place:
        start = self.options["cluster"]
        kind: type[Connection] = Connection
        if isinstance(start, str):
            try:
                parse: Any = parse_url
                parsed = parse(start)
            except ValueError as error:
                self.refuse(f"['cluster'] is no URL: {error}", "Or give (host, port) pairs.")
            kind = parsed.pop("connection_class", Connection)
            addresses = [(parsed.pop("host", "localhost"), parsed.pop("port", 6379))]
            return Cluster(addresses, kind, {**parsed, **connection})
        if connection.pop("ssl", False):
            kind = SSLConnection
        return Cluster(self._addresses("cluster"), kind, connection)

    def _addresses(self, name: str) -> list[Address]:
        given = self.options[name]
        try:
            addresses = [(str(host), int(port)) for host, port in given]
        except (TypeError, ValueError):
            addresses = []
        if not addresses:
            self.refuse(
                f"[{name!r}] must be a list of (host, port), not {given!r}.",
                "For instance [('10.0.0.1', 26379), ('10.0.0.2', 26379)].",
            )
        return addresses

    def _from_cache(self, connection: dict[str, Any]) -> Place:
        alias = self.options["cache"]
        client = client_of(self, alias)
        pool = getattr(client, "connection_pool", None)
        if hasattr(client, "nodes_manager"):
            nodes = client.nodes_manager.startup_nodes.values()
            settings = {**client.get_connection_kwargs(), **connection}
            kind = SSLConnection if settings.pop("ssl", False) else Connection
            return Cluster([(str(n.host), int(n.port)) for n in nodes], kind, settings)
        if pool is None:
            self.refuse(
                f"['cache'] = {alias!r}: its client {type(client).__name__} is not known.",
                "Name the servers by 'url', 'sentinels' or 'cluster' instead.",
            )
        if "db" not in connection:
            taken = int(pool.connection_kwargs.get("db") or 0)
            connection["db"] = OTHER_DATABASE if taken == DATABASE else DATABASE
        if isinstance(pool, SentinelConnectionPool):
            kind = SSLConnection if "SSL" in pool.connection_class.__name__ else Connection
            settings = {**pool.connection_kwargs, **connection}
            return Sentinels(
                pool.sentinel_manager, pool.service_name, kind, settings, pool.max_connections
            )
        return Single.from_pool(pool, **connection)

    def _namespace(self) -> str:
        namespace = self.options.get("namespace", "distlocks")
        if not is_namespace(namespace):
            self.refuse(
                f"['namespace'] = {namespace!r} must be printable text without braces.",
                "All names in Redis begin with it; the default is 'distlocks'.",
            )
        return str(namespace)

    def _number(self, name: str, default: Any, least: int) -> Any:
        value = self.options.get(name, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(
                f"[{name!r}] must be a whole number of at least {least}, not {value!r}.",
                "Leave it out for the default.",
            )
        return value


def is_namespace(namespace: object) -> bool:
    """Whether names in Redis may begin with it."""
    return (
        isinstance(namespace, str)
        and bool(namespace)
        and namespace.isprintable()
        and not set(namespace) & set("{}")
    )


def client_of(settings: Settings, alias: Any) -> Any:
    """The redis-py client of an alias of CACHES: django-redis' or Django's own."""
    from django.core.cache import InvalidCacheBackendError, caches

    try:
        cache: Any = caches[alias]
    except (InvalidCacheBackendError, TypeError) as error:
        settings.refuse(f"['cache'] = {alias!r} is no alias of CACHES: {error}", "Add it there.")
    found = redis_client(cache)
    if found is None:
        settings.refuse(
            f"['cache'] = {alias!r} is a {type(cache).__name__}, which names no one Redis server.",
            "Name an alias of django_redis.cache.RedisCache or "
            "django.core.cache.backends.redis.RedisCache, or the servers by 'url'.",
        )
    return found


def redis_client(cache: Any) -> Any:
    """The redis-py client that a cache writes by; None if it has none."""
    client: Any = getattr(cache, "client", None)
    if hasattr(client, "get_client"):
        try:
            return client.get_client(write=True)
        except NotImplementedError:
            # django-redis' ShardClient: several servers, each with some of the keys.
            return None
    inner: Any = getattr(cache, "_cache", None)
    if hasattr(inner, "get_client"):
        return inner.get_client(None, write=True)
    return None
