"""A command that is run under a lease, as the process sees it that renews the lease."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KEEPER = Path(__file__).with_name("keeper.py")


class Ended(NamedTuple):
    """How a command has ended."""

    # As a shell tells it: 128 and the signal's number, if one has killed it.
    status: int
    # Whether it was stopped because its lease was about to end, or was lost.
    was_cut: bool


class KeeperGone(Exception):
    """The process beside the command has been killed. The command was killed, too."""


class Kept:
    """A command, in a process group of its own, that does not outlast what it is told of its lease.

    A process beside it, the keeper, sends its group SIGTERM `grace` seconds before the lease ends,
    and SIGKILL just before it ends: also while this process stands still. When this process ends,
    the command is asked to end at once.

    Raises OSError if the command cannot be started.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str | bytes], until: float, grace: float
    ) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._heard = b""
        self._pid = 0
        self._until = until
        self._command = command[0]
        words = (str(theirs.fileno()), repr(until), repr(grace), *command)
        try:
            theirs.set_inheritable(True)
            # Isolated, and without the site: it needs none of what is installed, and starts sooner.
            # The command has all descriptors that were handed to us: "<(…)", a job server's.
            # Python's own, and those of libraries, are closed on exec.
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(KEEPER), *words],
                env=env,
                close_fds=False,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def __enter__(self) -> Kept:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A keeper that nobody talks to any more stops the command and ends.
        self._socket.close()
        self._keeper.wait()

    def pass_on(self, number: int) -> None:
        """Send the command's group a signal."""
        self._tell(f"signal {number}")

    def keep_until(self, deadline: float) -> None:
        """The lease lasts until then, on the lease clock."""
        if deadline != self._until:
            self._until = deadline
            self._tell(f"until {deadline!r}")

    def stop(self) -> None:
        """The lease is lost: SIGTERM now, SIGKILL after the grace, or before the deadline."""
        self._tell("stop")

    def wait(self, seconds: float) -> Ended | None:
        """How the command has ended, if it has so within `seconds`."""
        if select.select([self._socket], [], [], seconds)[0]:
            heard = self._hear()
            if not heard:
                self._kill()
                raise KeeperGone(KeeperGone.__doc__)
            *lines, self._heard = (self._heard + heard).split(b"\n")
            for line in lines:
                word, *values = line.split()
                if word == b"failed":
                    number = int(values[0])
                    raise OSError(number, os.strerror(number), self._command)
                if word == b"ended":
                    status = int(values[0])
                    return Ended(status if status >= 0 else 128 - status, values[1] == b"1")
                self._pid = int(values[0])
        return None

    def _hear(self) -> bytes:
        try:
            return self._socket.recv(4096)
        except ConnectionError:
            return b""

    def _tell(self, line: str) -> None:
        # If it has gone, wait() will find that out.
        with suppress(OSError):
            self._socket.sendall(f"{line}\n".encode())

    def _kill(self) -> None:
        if self._pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)


class Signals:
    """What becomes of SIGTERM, SIGINT and SIGHUP."""

    def __init__(self) -> None:
        # For the lock: then a signal ends the wait, and this process.
        self.is_waiting = True
        # The command, to which they go; and those that have come too early for it.
        self._kept: Kept | None = None
        self._early: list[int] = []

    def go_to(self, kept: Kept) -> None:
        """Pass them on to this command, from the first on."""
        self._kept = kept
        for number in self._early:
            kept.pass_on(number)

    def hear(self, number: int, frame: object) -> None:
        """Handle one."""
        if self.is_waiting:
            raise SystemExit(128 + number)
        if self._kept is None:
            self._early.append(number)
        else:
            self._kept.pass_on(number)


@contextmanager
def passing_on() -> Iterator[Signals]:
    """Pass on to the command what this process is sent."""
    signals = Signals()
    before: dict[int, Any] = {}
    # Elsewhere than in the main thread, handlers are not ours to set.
    if threading.current_thread() is threading.main_thread():
        for number in PASSED_ON:
            # Who was started to ignore one (nohup) goes on doing so; and so does the command.
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, signals.hear)
    try:
        yield signals
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
