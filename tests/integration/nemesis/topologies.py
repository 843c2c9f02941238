"""How the Redis servers stand together, and what can be done to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer
from tests.servers.redis_groups import ClusterGroup, IndependentGroup, SentinelGroup
from tests.settings import REDIS_BACKEND

# Seconds: how long a worker waits for an answer.
SOCKET_TIMEOUT = 0.6
# Seconds: min-replicas-max-lag, and until a primary has noticed.
LAG, NOTICED = 1, 2


class Topology(ABC):
    """Servers of the tests' own that hold the locks of one alias."""

    name: ClassVar[str]
    # The class of the alias, and what its OPTIONS have beside where the servers are.
    backend: ClassVar[str] = REDIS_BACKEND
    more_options: ClassVar[dict[str, Any]] = {}
    # Does a grant tell when it was made, by a clock that was read at that moment?
    dates_grants: ClassVar[bool] = True
    # Seconds for which a worker may wait; None is for ever. Where others may overtake it, it would
    # not hear of an order to hold a key while one of them keeps the key that it is after.
    timeouts: ClassVar[tuple[float | None, ...]] = (0, 0.5, 3, None)

    @property
    @abstractmethod
    def primaries(self) -> list[RedisServer]:
        """The servers that grant locks now."""

    @abstractmethod
    def primary_of(self, hash_name: bytes) -> RedisServer:
        """The server that has the locks of this hash now."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Where the servers are, as OPTIONS of an alias say it."""

    def options_of_workers(self) -> dict[str, Any]:
        """The same for the workers, who may have to go through something."""
        return {**self.options(), "connection": {"socket_timeout": SOCKET_TIMEOUT}}

    def fail_over(self, hash_name: bytes) -> None:
        """Kill the server that has the hash; return when another has taken over."""
        raise NotImplementedError

    def heal(self) -> None:
        """Have everything run again as it should."""

    def remains(self, backend: Any) -> list[Any]:
        """After a sweep: what is still taken, or lies about for ever."""
        found: list[Any] = []
        for server in self.primaries:
            with server.client() as client:
                for name in client.scan_iter(match=f"{{{backend.settings.namespace}*", count=1000):
                    if name not in backend.servers.hashes:
                        if client.ttl(name) < 0:
                            found.append(name)
                        continue
                    found += _taken(client, name)
        return found


def _taken(client: Any, hash_name: bytes) -> list[Any]:
    # Freed, reserved and cooling ones are remembered for a while.
    return [
        (hash_name, field, value)
        for field, value in client.hgetall(hash_name).items()
        if field[:2] == b"\x01q" or value[48:49] == b"E"
    ]


class Alone(Topology):
    """One server."""

    name = "alone"

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    @property
    def primaries(self) -> list[RedisServer]:
        return [self.server]

    def primary_of(self, hash_name: bytes) -> RedisServer:
        return self.server

    def options(self) -> dict[str, Any]:
        return {"url": self.server.url}


class Proxied(Alone):
    """One server, with a proxy between it and the workers."""

    name = "proxied"

    def __init__(self, server: RedisServer, proxy: FaultProxy) -> None:
        super().__init__(server)
        self.proxy = proxy

    def options_of_workers(self) -> dict[str, Any]:
        return {
            "url": f"redis://{self.proxy.host}:{self.proxy.port}/0",
            "connection": {"socket_timeout": SOCKET_TIMEOUT},
        }

    def heal(self) -> None:
        self.proxy.mode = "pass"


class Trio(Topology):
    """A primary and two replicas under Sentinel.

    On a busy machine, Sentinel may depose a primary that lives: none takes writes without replicas.
    """

    name = "sentinel"

    def __init__(self, group: SentinelGroup) -> None:
        self.group = group
        for server in group.servers:
            server.ask("CONFIG", "SET", "min-replicas-max-lag", LAG)
            server.ask("CONFIG", "SET", "min-replicas-to-write", 1)
            server.ask("CONFIG", "REWRITE")

    @property
    def primaries(self) -> list[RedisServer]:
        return [self.group.master()]

    def primary_of(self, hash_name: bytes) -> RedisServer:
        return self.group.master()

    def options(self) -> dict[str, Any]:
        return {
            "sentinels": self.group.sentinels,
            "service": self.group.service,
            "failover_lag": LAG + NOTICED,
        }

    def fail_over(self, hash_name: bytes) -> None:
        self.group.failover()

    def heal(self) -> None:
        self.group.heal()


class Six(Topology):
    """A Cluster: three primaries, and a replica of each."""

    name = "cluster"

    def __init__(self, group: ClusterGroup) -> None:
        self.group = group

    @property
    def primaries(self) -> list[RedisServer]:
        return list({self.group.master_of(slot) for slot in (0, 8000, self.group.slots - 1)})

    def primary_of(self, hash_name: bytes) -> RedisServer:
        return self.group.master_of(hash_name)

    def options(self) -> dict[str, Any]:
        return {"cluster": self.group.startup_nodes}

    def fail_over(self, hash_name: bytes) -> None:
        self.group.failover(hash_name)

    def heal(self) -> None:
        self.group.heal()


class Five(Topology):
    """Servers that know nothing of each other, each with a proxy between it and the workers."""

    name = "quorum"
    backend = "distlocks.backends.redlock.RedlockBackend"
    more_options: ClassVar[dict[str, Any]] = {"clock_skew": 0.1}
    # The time of asking is proposed for it.
    dates_grants = False
    timeouts = (0, 0.5, 3)

    def __init__(self, group: IndependentGroup, proxies: Sequence[FaultProxy]) -> None:
        self.group = group
        self.proxies = proxies

    @property
    def primaries(self) -> list[RedisServer]:
        return self.group.members

    def primary_of(self, hash_name: bytes) -> RedisServer:
        return self.group.members[0]

    def options(self) -> dict[str, Any]:
        return {"servers": [member.url for member in self.group.members]}

    def options_of_workers(self) -> dict[str, Any]:
        urls = [f"redis://{proxy.host}:{proxy.port}/0" for proxy in self.proxies]
        return {"servers": urls, "node_timeout": SOCKET_TIMEOUT / 2}

    def heal(self) -> None:
        self.group.heal()
        for proxy in self.proxies:
            proxy.mode = "pass"

    def remains(self, backend: Any) -> list[Any]:
        found: list[Any] = []
        for node, server in zip(backend.nodes, self.group.members, strict=True):
            with server.client() as client:
                found += _taken(client, node.hash_name)
        return found
