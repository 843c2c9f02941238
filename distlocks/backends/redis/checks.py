"""What is wrong or unwise about a Redis backend's settings and servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Warning

from ...exceptions import BackendUnavailable
from .place import Address, Cluster, Sentinels
from .settings import redis_client
from .wire import ReplyError, pack

if TYPE_CHECKING:
    from .backend import RedisBackend

# The first with HRANDFIELD, by which records that were left behind are found.
OLDEST = (6, 2)
# Replicas acknowledge each second, and a primary counts them each second.
NOTICED = 2.0
# Of connections that a process needs: one for each bucket that its threads wait beside, and one
# for each thread that talks to a server.
FEW_CONNECTIONS = 8


def check_settings(backend: RedisBackend) -> list[CheckMessage]:
    """What can be told from the settings alone."""
    return [*_shared_databases(backend), *_guard(backend), *_connections(backend)]


def _shared_databases(backend: RedisBackend) -> Iterator[CheckMessage]:
    ours = backend.options.get("cache") if "db" in backend.options else None
    for alias in getattr(settings, "CACHES", {}):
        # Whoever names an alias and its very database has made it for the locks.
        if alias != ours and _database_of(alias) in _databases(backend):
            yield Warning(
                f"The lock backend {backend.alias!r} and the cache {alias!r} share a Redis "
                f"database: clearing the cache frees every lock, and none is granted for the "
                f"MAX_TTL after it.",
                hint="Give the locks a database of their own with 'db' in their OPTIONS, or a "
                "server of their own.",
                id="distlocks.W005",
            )


def _databases(backend: RedisBackend) -> set[tuple[Address, int]]:
    place = backend.place
    if isinstance(place, Cluster):
        return {(address, 0) for address in place.start}
    if isinstance(place, Sentinels):
        return {((place.service, 0), place.db)}
    return {(place.address(b""), place.db)}


def _database_of(alias: str) -> tuple[Address, int] | None:
    from django.core.cache import caches

    try:
        pool = redis_client(caches[alias]).connection_pool
        known: Mapping[str, Any] = pool.connection_kwargs
        if hasattr(pool, "service_name"):
            return (pool.service_name, 0), int(known.get("db") or 0)
        if "path" in known:
            return (known["path"], 0), int(known.get("db") or 0)
        address = known.get("host", "localhost"), int(known.get("port", 6379))
        return address, int(known.get("db") or 0)
    except Exception:
        # No Redis at all, or one whose settings are for Django's checks to complain about.
        return None


def _guard(backend: RedisBackend) -> Iterator[CheckMessage]:
    longest = backend.settings.max_ttl
    if backend.settings.guard == "off":
        yield Warning(
            f"The lock backend {backend.alias!r} has no incarnation guard: a restart, failover, "
            f"flush or eviction of its Redis server may grant a lock that somebody still holds.",
            hint="Leave 'incarnation_guard' out of its OPTIONS.",
            id="distlocks.W006",
        )
    elif backend.settings.quarantine < longest:
        yield Warning(
            f"The lock backend {backend.alias!r} has a quarantine of "
            f"{backend.settings.quarantine:g} s, shorter than its MAX_TTL of {longest:g} s: leases "
            f"from before a restart may still be held when it ends.",
            hint="Leave 'quarantine' out of its OPTIONS; short ones are for tests.",
            id="distlocks.W007",
        )


def _connections(backend: RedisBackend) -> Iterator[CheckMessage]:
    limit = backend.servers.links.limit
    if limit < FEW_CONNECTIONS:
        yield Warning(
            f"The lock backend {backend.alias!r} may have {limit} connections in a process: "
            f"threads that find none free get an error.",
            hint=f"Give it 'max_connections' of {FEW_CONNECTIONS} or more, at least one more than "
            f"there are threads.",
            id="distlocks.W008",
        )


def check_servers(backend: RedisBackend) -> list[CheckMessage]:
    """What the servers say when asked."""
    messages: list[CheckMessage] = []
    asked: set[Address] = set()
    for hash_name in backend.servers.hashes:
        try:
            address = backend.servers.address(hash_name)
            if address not in asked:
                asked.add(address)
                messages += _Server(backend, hash_name, address).messages()
        except BackendUnavailable as error:
            return [*messages, Error(str(error), id="distlocks.E019")]
    return messages


class _Server:
    """One server under inspection."""

    def __init__(self, backend: RedisBackend, hash_name: bytes, address: Address) -> None:
        self.backend = backend
        self.hash_name = hash_name
        host, port = address
        self.name = f"The Redis server {host}:{port} of the lock backend {backend.alias!r}"
        self.refused: list[str] = []

    def messages(self) -> Iterator[CheckMessage]:
        yield from self._version()
        yield from self._eviction()
        yield from self._persistence()
        yield from self._replicas()
        if self.refused:
            yield Info(
                f"{self.name} does not tell {' and '.join(self.refused)}: look there yourself.",
                hint="It has to be durable, not to evict keys, and, with replicas, not to take "
                "writes without them.",
                id="distlocks.I001",
            )

    def _version(self) -> Iterator[CheckMessage]:
        version = self._info("server").get("redis_version", "")
        if version and tuple(map(int, version.split(".")[:2])) < OLDEST:
            yield Error(
                f"{self.name} is version {version}; the oldest that can do is "
                f"{'.'.join(map(str, OLDEST))}.",
                id="distlocks.E020",
            )

    def _eviction(self) -> Iterator[CheckMessage]:
        policy = self._configured("maxmemory-policy")
        if policy.startswith("allkeys-"):
            yield Warning(
                f"{self.name} evicts keys when it is full (maxmemory-policy {policy}). Locks that "
                f"it evicts are not granted twice, but none is granted for the MAX_TTL after it.",
                hint="Set maxmemory-policy to noeviction or one of volatile-*, or give the locks "
                "a server of their own.",
                id="distlocks.W009",
            )

    def _persistence(self) -> Iterator[CheckMessage]:
        if self._configured("appendonly") == "no" and not self._configured("save").strip():
            yield Warning(
                f"{self.name} keeps nothing on disk: when it restarts, the locks are lost. None is "
                f"granted twice, but none at all for the MAX_TTL after it.",
                hint="Set appendonly yes.",
                id="distlocks.W010",
            )

    def _replicas(self) -> Iterator[CheckMessage]:
        replicas = int(self._info("replication").get("connected_slaves", 0))
        wanted = self.backend.settings.min_replicas
        if replicas < wanted:
            yield Error(
                f"{self.name} has {replicas} replicas, and 'min_replicas' is {wanted}: no lock can "
                f"be had.",
                hint="Lower it, or add replicas.",
                id="distlocks.E021",
            )
        if not (replicas or self.backend.place.can_fail_over):
            return
        least = self._configured("min-replicas-to-write")
        if least == "0":
            yield Warning(
                f"{self.name} goes on taking writes when it is cut off from its replicas "
                f"(min-replicas-to-write 0): after a failover, two servers may each grant a lock.",
                hint="Set min-replicas-to-write 1 and min-replicas-max-lag on the servers, and "
                f"'failover_lag' in the OPTIONS to the latter and {NOTICED:g} s.",
                id="distlocks.W011",
            )
        elif least:
            lag = float(self._configured("min-replicas-max-lag") or 0) + NOTICED
            if self.backend.settings.failover_lag < lag:
                yield Warning(
                    f"{self.name} may take writes for {lag:g} s after it was cut off from its "
                    f"replicas (min-replicas-max-lag and {NOTICED:g} s), and 'failover_lag' is "
                    f"{self.backend.settings.failover_lag:g} s.",
                    hint=f"Set 'failover_lag' to {lag:g} in the OPTIONS.",
                    id="distlocks.W012",
                )

    def _configured(self, name: str) -> str:
        """The value of a configuration directive; '' if the server does not tell."""
        reply = self.backend.servers.ask(
            self.hash_name, pack(b"CONFIG", b"GET", name.encode()), or_refusal=True
        )
        if isinstance(reply, ReplyError) or not reply:
            if name not in self.refused:
                self.refused.append(name)
            return ""
        value: bytes = reply[1]
        return value.decode()

    def _info(self, section: str) -> dict[str, str]:
        reply = self.backend.servers.ask(
            self.hash_name, pack(b"INFO", section.encode()), or_refusal=True
        )
        if isinstance(reply, ReplyError):
            self.refused.append(f"INFO {section}")
            return {}
        lines = reply.decode(errors="replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)
