"""Redis servers that look after one another: replicas under Sentinel, and Redis Cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

from tests.servers import processes
from tests.servers.base import LOOPBACK, Server, ServerError, free_port
from tests.servers.redis import RedisServer

Address = tuple[str, int]


class RedisGroup(ABC):
    """Several servers, all of them ours. Any of them may be killed, paused and started again."""

    # In messages.
    name: ClassVar[str]
    # Names an environment variable: the addresses of the run's own group, for the settings.
    variable: ClassVar[str]
    made_of: ClassVar[type[Server]] = RedisServer

    # What a subclass says.

    @abstractmethod
    def __init__(self, program: Path) -> None:
        """Choose the members and their ports; nothing runs yet."""

    @property
    @abstractmethod
    def members(self) -> list[RedisServer]:
        """Every server of the group."""

    @property
    @abstractmethod
    def addresses(self) -> str:
        """What `variable` holds."""

    @abstractmethod
    def form(self) -> None:
        """Start the members and tell them of each other, once."""

    @abstractmethod
    def is_settled(self) -> bool:
        """Whether all that run agree on who does what, and every replica is in sync."""

    @abstractmethod
    def heal(self, timeout: float = 30) -> None:
        """Start again what was killed, as a replica where another took over; return when settled.

        To see what an old master does that has not yet heard of it, `start` it instead.
        """

    # What a test sees.

    @property
    def running(self) -> bool:
        """Whether all members run."""
        return all(member.running for member in self.members)

    def start(self, timeout: float = 30) -> Self:
        """Start the group; return when it is settled."""
        try:
            self.form()
            self.wait_settled(timeout)
        except BaseException:
            self.close()
            raise
        return self

    def wait_settled(self, timeout: float = 30) -> None:
        """Wait until a member could fail now and the others would know what to do."""
        self.wait_for(self.is_settled, "settle", timeout)

    def close(self) -> None:
        """End all members and remove their data."""
        # In no order: one that ends in order waits for its replicas.
        for member in self.members:
            if member.running:
                member.kill()
        for member in self.members:
            member.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # How it is done.

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = 30) -> None:
        """Wait for what the members will do; while one does not answer, it is not done."""
        from redis import RedisError

        def came_true() -> bool:
            try:
                return condition()
            except RedisError:
                return False

        if not processes.wait_until(came_true, timeout, 0.05):
            self._fail(f"did not {what} within {timeout} s")

    def _fail(self, what: str) -> NoReturn:
        logs = "\n".join(f"{m.name} {m.port}:\n{m.log[-1000:]}" for m in self.members)
        raise ServerError(f"{self.name} {what}. They said:\n{logs}")


class SentinelServer(RedisServer):
    """A Sentinel. What it has learnt stays with it over a restart."""

    name = "Redis Sentinel"

    def __init__(self, program: Path, *, service: str, master: RedisServer) -> None:
        super().__init__(program)
        self._service = service
        self._master = master

    def prepare(self) -> None:
        service = self._service
        self._write_config(
            f"sentinel monitor {service} {self._master.host} {self._master.port} 2\n"
            # Beside other tests on two processors, a server is now and then silent for a second.
            f"sentinel down-after-milliseconds {service} 1500\n"
            f"sentinel failover-timeout {service} 2000\n"
        )

    def command(self) -> list[str]:
        return [str(self.program), str(self._config), *self._place, "--sentinel"]

    def opinion(self) -> dict[str, Any]:
        """What it thinks of the master: status, address, slaves, sentinels."""
        found = self.info("sentinel")["master0"]
        assert isinstance(found, dict)
        return found

    def replicas(self) -> list[dict[bytes, bytes]]:
        """What it knows of each replica."""
        found = self.ask("SENTINEL", "REPLICAS", self._service)
        return [dict(zip(pairs[::2], pairs[1::2], strict=True)) for pairs in found]


class SentinelGroup(RedisGroup):
    """A master and its replicas, watched by three Sentinels, two of which decide."""

    name = "The Sentinel group"
    variable = "DISTLOCKS_TEST_SENTINELS"
    service = "distlocks"

    def __init__(self, program: Path, *, replicas: int = 2) -> None:
        self.servers = [RedisServer(program) for _ in range(1 + replicas)]
        self.sentinel_servers = [
            SentinelServer(program, service=self.service, master=self.servers[0]) for _ in range(3)
        ]

    @property
    def members(self) -> list[RedisServer]:
        return [*self.sentinel_servers, *self.servers]

    @property
    def sentinels(self) -> list[Address]:
        return [(sentinel.host, sentinel.port) for sentinel in self.sentinel_servers]

    @property
    def addresses(self) -> str:
        return f"{self.service}@{_joined(self.sentinels)}"

    def master(self) -> RedisServer:
        """The server that most of the Sentinels that answer name now."""
        from redis import RedisError

        named: Counter[str] = Counter()
        for sentinel in self.sentinel_servers:
            if sentinel.running:
                try:
                    named[sentinel.opinion()["address"]] += 1
                except RedisError:
                    continue  # paused, say
        if not named:
            self._fail("has no Sentinel that answers")
        return self._server_at(named.most_common(1)[0][0])

    def failover(self, timeout: float = 15) -> RedisServer:
        """Kill the master; the new one, which all Sentinels name and which knows that it is."""
        self.wait_settled()
        old = self.master()
        old.kill()

        def another_is_named() -> bool:
            named = {s.opinion()["address"] for s in self.sentinel_servers if s.running}
            if len(named) != 1:
                return False
            new = self._server_at(*named)
            return new is not old and new.info("replication")["role"] == "master"

        self.wait_for(another_is_named, "fail over", timeout)
        return self.master()

    def form(self) -> None:
        _start_all(self.servers)
        master, *replicas = self.servers
        for replica in replicas:
            replica.replicate(master)
        # A Sentinel that finds a replica without its master looks again only after ten seconds.
        self.wait_for(lambda: all(r.is_replica_in_sync() for r in replicas), "replicate")
        _start_all(self.sentinel_servers)

    def is_settled(self) -> bool:
        sentinels = [sentinel for sentinel in self.sentinel_servers if sentinel.running]
        opinions = [sentinel.opinion() for sentinel in sentinels]
        known = {"slaves": len(self.servers) - 1, "sentinels": len(self.sentinel_servers)}
        if len({opinion["address"] for opinion in opinions}) != 1:
            return False
        if not all(({"status": "ok"} | known).items() <= opinion.items() for opinion in opinions):
            return False
        master = self._server_at(opinions[0]["address"])
        replicas = [s for s in self.servers if s.running and s is not master]
        usable = {str(replica.port).encode() for replica in replicas}
        return (
            master.info("replication")["role"] == "master"
            and all(r.is_replica_in_sync() for r in replicas)
            and all(usable == self._usable(sentinel, master) for sentinel in sentinels)
        )

    def heal(self, timeout: float = 30) -> None:
        _start_all(s for s in self.sentinel_servers if not s.running)
        master = self.master()
        down = [server for server in self.servers if not server.running]
        for server in down:
            if server is not master:
                # A Sentinel that finds another master tells it so only after ten seconds.
                server.replicate(master)
        _start_all(down)
        self.wait_settled(timeout)

    def _usable(self, sentinel: SentinelServer, master: RedisServer) -> set[bytes]:
        """The ports of the replicas that the Sentinel would make a master of."""
        sound = {
            b"flags": b"slave",
            b"master-link-status": b"ok",
            b"master-port": str(master.port).encode(),
        }
        return {r[b"port"] for r in sentinel.replicas() if sound.items() <= r.items()}

    def _server_at(self, address: str) -> RedisServer:
        (found,) = (s for s in self.servers if f"{s.host}:{s.port}" == address)
        return found


class IndependentGroup(RedisGroup):
    """Five servers that know nothing of each other: the nodes of a Redlock."""

    name = "five independent Redis servers"
    variable = "DISTLOCKS_TEST_REDLOCK"

    def __init__(self, program: Path, *, count: int = 5) -> None:
        self._members = [RedisServer(program) for _ in range(count)]

    @property
    def members(self) -> list[RedisServer]:
        return self._members

    @property
    def addresses(self) -> str:
        return ",".join(member.url for member in self._members)

    def form(self) -> None:
        _start_all(member for member in self._members if not member.running)

    def is_settled(self) -> bool:
        return all(member.is_ready() for member in self._members)

    def heal(self, timeout: float = 30) -> None:
        self.form()


class ClusterNode(RedisServer):
    name = "A node of Redis Cluster"
    # The nodes talk to each other on a second port, so far above the first.
    bus = 10000

    def choose_port(self) -> int:
        # Both below the range from which the kernel takes ports for outgoing connections.
        return free_port(range(20000, 22768), also=self.bus)

    def command(self) -> list[str]:
        return [
            *super().command(),
            *["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"],
            *["--cluster-node-timeout", "1000", "--cluster-announce-ip", LOOPBACK],
        ]

    def id(self) -> str:
        return str(self.ask("CLUSTER", "MYID").decode())

    def is_ok(self) -> bool:
        """Whether it serves, as a part of a whole cluster."""
        return b"cluster_state:ok" in self.ask("CLUSTER", "INFO")

    def view(self) -> list[ClusterEntry]:
        """What it knows of all the nodes."""
        lines = self.ask("CLUSTER", "NODES").decode().splitlines()
        return sorted(map(_entry, lines), key=lambda entry: entry.port)


@dataclass(frozen=True)
class ClusterEntry:
    """A node as another, or itself, knows it."""

    port: int
    flags: frozenset[str]
    connected: bool
    # The id of its master, or "-".
    master: str
    # First and last of each range.
    slots: tuple[tuple[int, int], ...]

    @property
    def role(self) -> tuple[object, ...]:
        return self.port, self.master, self.slots

    def owns(self, slot: int) -> bool:
        return any(first <= slot <= last for first, last in self.slots)


class ClusterGroup(RedisGroup):
    """Three masters, each with a share of the slots, and a replica of each."""

    name = "The cluster"
    variable = "DISTLOCKS_TEST_CLUSTER"
    slots = 16384

    def __init__(self, program: Path) -> None:
        self.nodes = [ClusterNode(program) for _ in range(6)]

    @property
    def members(self) -> list[RedisServer]:
        return [*self.nodes]

    @property
    def startup_nodes(self) -> list[Address]:
        return [(node.host, node.port) for node in self.nodes]

    @property
    def addresses(self) -> str:
        return _joined(self.startup_nodes)

    def slot_of(self, key: str | bytes) -> int:
        from redis.crc import key_slot

        return int(key_slot(key.encode() if isinstance(key, str) else key))

    def master_of(self, slot_or_key: int | str | bytes) -> ClusterNode:
        """The node that most of the nodes that answer take for the owner of the slot now."""
        from redis import RedisError

        slot = slot_or_key if isinstance(slot_or_key, int) else self.slot_of(slot_or_key)
        owners: Counter[int] = Counter()
        for node in self._running():
            try:
                owners.update(entry.port for entry in node.view() if entry.owns(slot))
            except RedisError:
                continue  # paused, say
        if not owners:
            self._fail(f"has no owner of slot {slot}")
        return self._node_at(owners.most_common(1)[0][0])

    def replica_of(self, slot_or_key: int | str | bytes) -> ClusterNode | None:
        """The running replica of the slot's master, if there is one."""
        master = self.master_of(slot_or_key)
        followed = master.id()
        ports = [entry.port for entry in master.view() if entry.master == followed]
        return next((node for node in map(self._node_at, ports) if node.running), None)

    def failover(self, slot_or_key: int | str | bytes, timeout: float = 15) -> ClusterNode:
        """Kill the slot's master; the new one, once every node knows it and serves again."""
        self.wait_settled()
        old = self.master_of(slot_or_key)
        old.kill()

        def another_serves() -> bool:
            new = self.master_of(slot_or_key)
            return new is not old and self._agree() and all(n.is_ok() for n in self._running())

        self.wait_for(another_serves, "fail over", timeout)
        return self.master_of(slot_or_key)

    def form(self) -> None:
        _start_all(self.nodes)
        masters, replicas = self.nodes[:3], self.nodes[3:]
        for epoch, node in enumerate(self.nodes, start=1):
            # Else two nodes of one epoch would have to find out first which of them is right.
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for number, master in enumerate(masters):
            first, end = (self.slots * share // len(masters) for share in (number, number + 1))
            self._give(master, range(first, end))
        for node in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER", "MEET", node.host, node.port)
        self.wait_for(lambda: all(len(n.view()) == len(self.nodes) for n in self.nodes), "meet")
        for replica, master in zip(replicas, masters, strict=True):
            # Refused until the replica has shaken hands with the master.
            self.wait_for(partial(self._follow, replica, master), "replicate")

    def is_settled(self) -> bool:
        nodes = self._running()
        replicas = [node for node in nodes if node.info("replication")["role"] == "slave"]
        return (
            len(replicas) == len(nodes) - 3
            and self._agree()
            and all(node.is_ok() for node in nodes)
            and all(replica.is_replica_in_sync() for replica in replicas)
        )

    def heal(self, timeout: float = 30) -> None:
        _start_all(node for node in self.nodes if not node.running)
        self.wait_settled(timeout)

    def _running(self) -> list[ClusterNode]:
        return [node for node in self.nodes if node.running]

    def _agree(self) -> bool:
        """Whether the running nodes give each other the same roles and find each other sound."""
        running = {node.port for node in self._running()}
        views = [[e for e in node.view() if e.port in running] for node in self._running()]
        return all(len(view) == len(running) for view in views) and (
            len({tuple(entry.role for entry in view) for view in views}) == 1
            and all(e.connected and not e.flags & UNSOUND for view in views for e in view)
        )

    def _give(self, master: ClusterNode, slots: range) -> None:
        from redis import ResponseError

        try:
            master.ask("CLUSTER", "ADDSLOTSRANGE", slots.start, slots.stop - 1)
        except ResponseError:  # before Redis 7
            master.ask("CLUSTER", "ADDSLOTS", *slots)

    def _follow(self, replica: ClusterNode, master: ClusterNode) -> bool:
        return bool(replica.ask("CLUSTER", "REPLICATE", master.id()) == b"OK")

    def _node_at(self, port: int) -> ClusterNode:
        (found,) = (node for node in self.nodes if node.port == port)
        return found


# Flags of a node that another cannot rely on.
UNSOUND = frozenset({"fail", "fail?", "handshake", "noaddr"})


def _entry(line: str) -> ClusterEntry:
    _, address, flags, master, _, _, _, link, *slots = line.split()
    # In brackets: on its way to another node.
    ranges = [part.partition("-") for part in slots if not part.startswith("[")]
    return ClusterEntry(
        port=int(address.partition("@")[0].rpartition(":")[2]),
        flags=frozenset(flags.split(",")),
        connected=link == "connected",
        master=master,
        slots=tuple((int(first), int(last or first)) for first, _, last in ranges),
    )


def _joined(addresses: list[Address]) -> str:
    return ",".join(f"{host}:{port}" for host, port in addresses)


def _start_all(servers: Iterable[RedisServer]) -> None:
    servers = list(servers)
    with ThreadPoolExecutor(max(len(servers), 1)) as pool:
        list(pool.map(lambda server: server.start(), servers))
