"""Where the servers are: one, whichever Sentinel names, or a Cluster; how to connect to them."""

from __future__ import annotations

import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import signature
from typing import Any, ClassVar

from redis import ConnectionPool, RedisError
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import Connection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from ...keys import SEPARATOR

# Host and port, or a path and 0.
Address = tuple[str, int]

# What we decide about a connection, whatever its settings say: replies are ours to unpack, and
# requests ours to send again.
_OURS: dict[str, Any] = {
    "decode_responses": False,
    "encoding": "utf-8",
    "protocol": 2,
    "health_check_interval": 0,
    "retry_on_timeout": False,
    "retry_on_error": [],
}
# Seconds to connect, and for an answer, where the settings do not say.
DEFAULT_TIMEOUT = 2.0
CLUSTER_BUCKETS = 256


class Place(ABC):
    """Which server has which bucket."""

    # How many hashes the locks are spread over. On a single server one is as good as many, and
    # its loss is noticed at once.
    buckets: ClassVar[int] = 1
    # Can another server take over from the one that we know?
    can_fail_over: ClassVar[bool] = False

    def __init__(
        self,
        kind: type[Connection],
        settings: Mapping[str, Any],
        max_connections: int | None = None,
    ) -> None:
        self.settings = {
            name: value
            for name, value in settings.items()
            if name not in ("connection_pool", "himport_registry", "event_dispatcher")
            and not name.startswith(("maint", "orig_", "oss_"))
        }
        self.kind = kind
        self.max_connections = max_connections
        for name in ("socket_timeout", "socket_connect_timeout"):
            if self.settings.get(name) is None:
                self.settings[name] = DEFAULT_TIMEOUT

    @property
    def timeout(self) -> float:
        """Seconds within which a server must answer."""
        return float(self.settings["socket_timeout"])

    @property
    def db(self) -> int:
        """The number of the database on the server."""
        return int(self.settings.get("db") or 0)

    def bucket(self, name: str) -> int:
        """In which bucket a key of this name is: the same for all keys of one tree."""
        if self.buckets == 1:
            return 0
        return zlib.crc32(name.partition(SEPARATOR)[0].encode()) % self.buckets

    @abstractmethod
    def address(self, hash_name: bytes) -> Address:
        """Of the server that has this hash. May ask other servers: RedisError, OSError."""

    @abstractmethod
    def known(self, hash_name: bytes) -> Address | None:
        """Its address, if nobody has to be asked."""

    def forget(self, address: Address) -> None:
        """The server there does not answer, or no longer as a primary."""

    def moved(self, hash_name: bytes, address: Address) -> None:
        """A server of a Cluster says that another has the hash."""

    def connect(self, address: Address) -> Connection:
        """A new connection: authenticated, on our database."""
        connection: Any = self.kind(**self._settings_for(address))
        connection.connect()
        found: Connection = connection
        return found

    def _settings_for(self, address: Address) -> dict[str, Any]:
        wanted = {**self.settings, **_OURS, "retry": Retry(NoBackoff(), 0)}
        if issubclass(self.kind, UnixDomainSocketConnection):
            wanted["path"] = address[0]
        else:
            wanted["host"], wanted["port"] = address
        return wanted

    def close(self) -> None:
        """Close what was open for finding out."""

    @abstractmethod
    def __str__(self) -> str:
        """As it is named in messages: without passwords."""


class Single(Place):
    """One server."""

    def __init__(
        self,
        kind: type[Connection],
        settings: Mapping[str, Any],
        max_connections: int | None = None,
    ) -> None:
        super().__init__(kind, settings, max_connections)
        self._address: Address = (
            settings.get("host", "localhost"),
            int(settings.get("port", 6379)),
        )
        if "path" in settings:
            self._address = (settings["path"], 0)

    @classmethod
    def from_pool(cls, pool: ConnectionPool, **more: Any) -> Single:
        """The server of a redis-py pool, whose connections are left alone."""
        return cls(pool.connection_class, {**pool.connection_kwargs, **more}, pool.max_connections)

    def address(self, hash_name: bytes) -> Address:
        return self._address

    known = address

    def __str__(self) -> str:
        host, port = self.address(b"")
        return f"{host}:{port}" if port else host


class Sentinels(Place):
    """Whichever server the Sentinels name as the primary of a service."""

    can_fail_over = True

    def __init__(
        self,
        # redis-py's types leave it out.
        sentinel: Any,
        service: str,
        kind: type[Connection],
        settings: Mapping[str, Any],
        max_connections: int | None = None,
    ) -> None:
        super().__init__(
            kind,
            {name: value for name, value in settings.items() if name not in ("host", "port")},
            max_connections,
        )
        self.sentinel = sentinel
        self.service = service
        self._mutex = threading.Lock()
        self._primary: Address | None = None

    def address(self, hash_name: bytes) -> Address:
        primary = self._primary
        if primary is None:
            with self._mutex:
                primary = self._primary
                if primary is None:
                    host, port = self.sentinel.discover_master(self.service)
                    primary = self._primary = (str(host), int(port))
        return primary

    def known(self, hash_name: bytes) -> Address | None:
        return self._primary

    def forget(self, address: Address) -> None:
        with self._mutex:
            if self._primary == address:
                self._primary = None

    def close(self) -> None:
        for client in self.sentinel.sentinels:
            client.close()

    def __str__(self) -> str:
        return f"the primary of {self.service!r}"


class Cluster(Place):
    """A Cluster: the locks of one tree are on one of its servers."""

    buckets = CLUSTER_BUCKETS
    can_fail_over = True

    def __init__(
        self,
        start: list[Address],
        kind: type[Connection],
        settings: Mapping[str, Any],
        max_connections: int | None = None,
    ) -> None:
        super().__init__(
            kind,
            {name: value for name, value in settings.items() if name not in ("host", "port", "db")},
            max_connections,
        )
        self.start = start
        self._mutex = threading.Lock()
        self._client: RedisCluster | None = None
        self._addresses: dict[bytes, Address] = {}

    def address(self, hash_name: bytes) -> Address:
        address = self._addresses.get(hash_name)
        if address is None:
            with self._mutex:
                if self._client is None:
                    self._client = self._ask_around()
                node = self._client.nodes_manager.get_node_from_slot(key_slot(hash_name))
                address = self._addresses[hash_name] = (str(node.host), int(node.port))
        return address

    def known(self, hash_name: bytes) -> Address | None:
        return self._addresses.get(hash_name)

    def _ask_around(self) -> RedisCluster:
        make_node: Any = ClusterNode
        known = signature(RedisCluster.__init__).parameters
        accepted = signature(self.kind.__init__).parameters
        settings = {
            name: value
            for name, value in self.settings.items()
            if name in known or name in accepted or name.startswith(("ssl_", "socket_"))
        }
        return RedisCluster(
            startup_nodes=[make_node(host, port) for host, port in self.start],
            **{**settings, "ssl": "SSL" in self.kind.__name__, "decode_responses": False},
        )

    def forget(self, address: Address) -> None:
        with self._mutex:
            self._addresses.clear()
            client: Any = self._client
            self._client = None
        if client is not None:
            # Those that have come since may be the ones left.
            self.start = list(
                dict.fromkeys(
                    [*self.start, *((str(n.host), int(n.port)) for n in client.get_nodes())]
                )
            )
            client.close()

    def moved(self, hash_name: bytes, address: Address) -> None:
        self._addresses[hash_name] = address

    def close(self) -> None:
        self.forget(("", 0))

    def __str__(self) -> str:
        return "the Cluster of " + ", ".join(f"{host}:{port}" for host, port in self.start[:3])


# What redis-py raises when it cannot find out or connect.
UNREACHABLE = (RedisError, OSError, MasterNotFoundError, RedisClusterException)
