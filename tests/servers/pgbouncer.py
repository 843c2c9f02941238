"""PgBouncer, in front of a PostgreSQL, passing its sessions on, by default from transaction to
transaction."""

from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from tests.servers.base import LOOPBACK, Server
from tests.servers.postgres import PostgresServer


class PgBouncerServer(Server):
    """Not one of the run's servers: started where a test asks for it."""

    name = "PgBouncer"
    url_variable = "DISTLOCKS_TEST_PGBOUNCER_URL"
    external_example = (
        "postgresql://USER:PASSWORD@HOST:6432/postgres  # pool_mode = transaction, in front of "
        f"{PostgresServer.url_variable}"
    )
    executable = "pgbouncer"
    places: ClassVar[tuple[str, ...]] = ("/usr/sbin", "/opt/homebrew/opt/pgbouncer/bin")
    apt_package = "pgbouncer"
    accounts = ("postgres", "nobody")
    default_port = 6432

    def __init__(
        self,
        program: Path | None = None,
        url: str | None = None,
        *,
        target: PostgresServer,
        pool_mode: str = "transaction",
        settings: str = "",
    ) -> None:
        super().__init__(program, url)
        self.target = target
        self.pool_mode = pool_mode
        # Further lines of its configuration.
        self.settings = settings

    def own_url(self) -> str:
        return f"postgresql://{self.target.user}@{self.host}:{self.port}/postgres"

    def prepare(self) -> None:
        password = unquote(urlsplit(self.target.url).password or "")
        self.folder.joinpath("users.txt").write_text(f'"{self.target.user}" "{password}"\n')

    def command(self) -> list[str]:
        # Written anew: the port may have changed.
        config = self.folder / "pgbouncer.ini"
        config.write_text(
            f"""
[databases]
* = host={self.target.host} port={self.target.port}
[pgbouncer]
listen_addr = {LOOPBACK}
listen_port = {self.port}
unix_socket_dir =
auth_type = trust
auth_file = {self.folder / "users.txt"}
pool_mode = {self.pool_mode}
default_pool_size = 8
max_client_conn = 100
ignore_startup_parameters = extra_float_digits
{self.settings}
"""
        )
        return [str(self.program), str(config)]

    def is_ready(self) -> bool:
        import psycopg

        try:
            # Its own console answers only if the port is ours and the configuration was read.
            with psycopg.connect(
                self.url, connect_timeout=2, prepare_threshold=None, autocommit=True
            ) as connection:
                connection.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True
