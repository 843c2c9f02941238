"""MariaDB."""

import threading
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from tests.servers.base import LOOPBACK, Server, make_folder


class MariaDBServer(Server):
    name = "MariaDB"
    url_variable = "DISTLOCKS_TEST_MARIADB_URL"
    external_example = "mysql://USER:PASSWORD@HOST:3306/  # may create databases"
    executable = "mariadbd"
    places: ClassVar[tuple[str, ...]] = (
        "/usr/sbin",  # not in everybody's PATH
        "/usr/libexec",
        "/opt/homebrew/opt/mariadb@*/bin",
    )
    apt_package = "mariadb-server"
    accounts = ("mysql",)
    default_port = 3306
    passing_failures = ("Unable to lock",)  # a killed server is still ending

    user = "root"
    # An initialised data folder to copy: laying it out takes most of a start.
    _templates: ClassVar[dict[Path, Path]] = {}
    _template_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, program: Path | None = None, url: str | None = None) -> None:
        super().__init__(program, url)
        if url is not None:
            self.user = unquote(urlsplit(url).username or self.user)

    def own_url(self) -> str:
        return f"mysql://{self.user}@{self.host}:{self.port}/"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def prepare(self) -> None:
        self.run("cp", "-a", self._template() / "data", self.data)

    def command(self) -> list[str]:
        return [
            str(self.program),
            "--no-defaults",  # first: it must not read the machine's own configuration
            f"--datadir={self.data}",
            # As it starts, it removes what looks like a temporary table.
            f"--tmpdir={self.folder}",
            f"--socket={self.folder / 'server.sock'}",
            f"--pid-file={self.folder / 'server.pid'}",
            f"--port={self.port}",
            f"--bind-address={LOOPBACK}",
            "--skip-networking=OFF",
            "--skip-name-resolve",
            "--max-connections=200",
            "--performance-schema=OFF",
            "--innodb-flush-method=nosync",  # a power cut is not among the faults we test
        ]

    def is_ready(self) -> bool:
        import pymysql

        try:
            # Another run may have taken the port first; then ours is about to fail.
            return not self.owned or Path(str(self.ask("SELECT @@datadir")[0][0])) == self.data
        except pymysql.MySQLError:
            return False

    def connect(self, database: str | None = None) -> Any:
        """A connection in autocommit."""
        import pymysql

        return pymysql.connect(
            host=self.host,
            port=self.port,
            user=self.user,
            password=unquote(urlsplit(self.url).password or ""),
            database=database,
            charset="utf8mb4",
            connect_timeout=2,
            autocommit=True,
        )

    def ask(self, query: str, *params: object) -> tuple[tuple[Any, ...], ...]:
        """What the server answers its administrator, outside every database."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(query, params or None)
            return tuple(cursor.fetchall())

    def drop(self, name: str) -> None:
        """Drop a database."""
        self.ask(f"DROP DATABASE IF EXISTS `{name}`")

    def _template(self) -> Path:
        assert self.program is not None
        with self._template_lock:
            if self.program not in self._templates:
                folder = make_folder("distlocks-mariadb-install-db-", **self.identity())
                self.run(
                    self._install_db(),
                    "--no-defaults",
                    f"--datadir={folder / 'data'}",
                    # Two that begin at once would find each other's in the system's folder.
                    f"--tmpdir={folder}",
                    "--auth-root-authentication-method=normal",
                    "--skip-test-db",
                    "--skip-name-resolve",
                )
                self._templates[self.program] = folder
            return self._templates[self.program]

    def _install_db(self) -> Path:
        """Debian has it in another folder than the server."""
        assert self.program is not None
        beside = self.program.parent
        for folder in (beside, beside.parent / "bin"):
            if (program := folder / "mariadb-install-db").exists():
                return program
        self._fail("needs mariadb-install-db, which is not beside it", str(self.program))


def database_settings(url: str, name: str) -> dict[str, Any]:
    """A database of the server at the URL, as an entry of Django's DATABASES."""
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.mysql",
        "NAME": name,
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or LOOPBACK,
        "PORT": str(parts.port or MariaDBServer.default_port),
        "OPTIONS": {"charset": "utf8mb4"},
        # The same name under test, so that processes that the tests start use the same database.
        "TEST": {"NAME": name, "CHARSET": "utf8mb4"},
    }
