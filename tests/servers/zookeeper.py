"""ZooKeeper: one server, and an ensemble of three."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Self

from tests.servers import processes
from tests.servers.base import LOOPBACK, Server, ServerError, free_port

JARS = "/usr/share/java"
# Milliseconds: a heartbeat between the servers. Sessions may last from twice as long.
TICK = 200
# Milliseconds: longest session that a client may ask for.
LONGEST_SESSION = 60_000


class ZooKeeperServer(Server):
    """Alone, or a member of an ensemble. Started again, it has what it had."""

    name = "ZooKeeper"
    url_variable = "DISTLOCKS_TEST_ZOOKEEPER_URL"
    external_example = "zookeeper://HOST:2181"
    executable = "java"
    needs: ClassVar[tuple[str, ...]] = (f"{JARS}/zookeeper.jar",)
    apt_package = "zookeeper"
    accounts: ClassVar[tuple[str, ...]] = ("zookeeper", "nobody")
    default_port = 2181

    def __init__(
        self,
        program: Path | None = None,
        url: str | None = None,
        *,
        number: int = 0,
        longest_session: int = LONGEST_SESSION,
    ) -> None:
        super().__init__(program, url)
        self.number = number
        self.longest_session = longest_session
        # In an ensemble: every member, itself among them, and the ports by which they talk.
        self.ensemble: list[ZooKeeperServer] = []
        self.peer_ports = (free_port(), free_port()) if number else (0, 0)

    def own_url(self) -> str:
        return f"zookeeper://{self.host}:{self.port}"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def prepare(self) -> None:
        data = self.folder / "data"
        data.mkdir()
        lines = [
            f"tickTime={TICK}",
            "initLimit=25",
            "syncLimit=10",
            f"dataDir={data}",
            f"clientPort={self.port}",
            f"clientPortAddress={LOOPBACK}",
            f"minSessionTimeout={2 * TICK}",
            f"maxSessionTimeout={self.longest_session}",
            "maxClientCnxns=0",
            "forceSync=no",
            "4lw.commands.whitelist=srvr,ruok",
        ]
        for member in self.ensemble:
            follow, elect = member.peer_ports
            lines.append(f"server.{member.number}={LOOPBACK}:{follow}:{elect}")
        (self.folder / "zoo.cfg").write_text("\n".join(lines) + "\n")
        if self.number:
            (data / "myid").write_text(f"{self.number}\n")
        identity = self.identity()
        os.chown(data, identity.get("user", -1), identity.get("group", -1))

    def command(self) -> list[str]:
        return [
            *[str(self.program), "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"],
            # Its log grows by 64 MB at a time otherwise, which a busy disk takes seconds for.
            *["-Dzookeeper.admin.enableServer=false", "-Dzookeeper.preAllocSize=1024"],
            *["-cp", ":".join(self.needs)],
            *["org.apache.zookeeper.server.quorum.QuorumPeerMain", str(self.folder / "zoo.cfg")],
        ]

    def is_ready(self) -> bool:
        """Whether it serves clients: a member does as long as it knows of a majority."""
        return self.mode != ""

    @property
    def mode(self) -> str:
        """ "standalone", "leader" or "follower"; "" while it serves nobody."""
        for line in self.ask("srvr").splitlines():
            if line.startswith("Mode: "):
                return line.removeprefix("Mode: ").strip()
        return ""

    def ask(self, word: str) -> str:
        """What it answers to one of its commands of four letters."""
        try:
            with socket.create_connection((self.host, self.port), timeout=2) as connection:
                connection.sendall(word.encode())
                answer = b""
                while piece := connection.recv(4096):
                    answer += piece
        except OSError:
            return ""
        return answer.decode(errors="replace")


class ZooKeeperEnsemble:
    """Three servers, two of which can go on without the third."""

    name = "a ZooKeeper ensemble"
    # The addresses of the run's own ensemble, for the settings.
    variable = "DISTLOCKS_TEST_ZOOKEEPER"
    made_of: ClassVar[type[Server]] = ZooKeeperServer

    def __init__(self, program: Path) -> None:
        self.members = [ZooKeeperServer(program, number=number) for number in (1, 2, 3)]
        for member in self.members:
            member.ensemble = self.members

    @property
    def addresses(self) -> str:
        return ",".join(member.address for member in self.members)

    @property
    def running(self) -> bool:
        return all(member.running for member in self.members)

    @property
    def leader(self) -> ZooKeeperServer:
        return self.wait_for(
            lambda: next((m for m in self.members if m.running and m.mode == "leader"), None)
        )

    @property
    def follower(self) -> ZooKeeperServer:
        return self.wait_for(
            lambda: next((m for m in self.members if m.running and m.mode == "follower"), None)
        )

    def start(self, timeout: float = 30) -> Self:
        """Start those that do not run; return when all serve clients."""
        try:
            # None of them answers before a majority runs.
            with ThreadPoolExecutor(len(self.members)) as pool:
                list(pool.map(lambda member: member.start(timeout), self.members))
        except BaseException:
            self.close()
            raise
        return self

    def kill(self) -> None:
        """kill -9 to all of them."""
        for member in self.members:
            member.kill()

    def close(self) -> None:
        """End all members and remove their data."""
        for member in self.members:
            if member.running:
                member.kill()
        for member in self.members:
            member.close()

    def wait_for(
        self, condition: Callable[[], ZooKeeperServer | None], timeout: float = 30
    ) -> ZooKeeperServer:
        found: list[ZooKeeperServer | None] = [None]

        def came_true() -> bool:
            found[0] = condition()
            return found[0] is not None

        processes.wait_until(came_true, timeout, 0.05)
        if found[0] is None:
            logs = "\n".join(f"{m.name} {m.port}:\n{m.log[-1000:]}" for m in self.members)
            raise ServerError(f"{self.name} did not agree within {timeout} s. They said:\n{logs}")
        return found[0]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
