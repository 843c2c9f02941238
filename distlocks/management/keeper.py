"""Runs a command for as long as a lease lasts. A program of its own, started by `kept.Kept`.

It stands between the process that renews the lease and the command, so that the command ends with
the lease also when that process is killed, or stands still. It is a process with one thread, in
which a fork may do what it must between fork and exec. Only the standard library is imported: it
has to be there in a moment.

Lines that it is told:     until SECONDS    the lease lasts until then, on the lease clock
                           signal NUMBER    for the command
                           stop             the lease is lost
Lines that it tells:       started PID
                           failed ERRNO     the command could not be started
                           ended STATUS CUT its exit status, or the signal's number below zero; and
                                            whether it was stopped because of the lease
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# What whoever started the command passes on; and what a terminal sends to all in the foreground.
NOT_FOR_US = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGTSTP", "SIGTTOU", "SIGTTIN", "SIGPIPE")
# Seconds. A sleep does not notice that the machine was suspended: none is longer than this.
LONGEST_SLEEP = 0.5
# Where orphans are not ours, nothing tells that the last of a process group has ended.
LOOK_EVERY = 0.05
# Which part of the grace SIGKILL comes before the end of the lease: a kill takes its time, too.
KILL_TAKES = 0.1


def now() -> float:
    """Seconds on the lease clock: see distlocks.clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere there is one safeguard less."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Keeper:
    """One command, in a process group of its own."""

    def __init__(self, told: socket.socket, until: float, grace: float) -> None:
        self.told: socket.socket | None = told
        # When the lease ends, on the lease clock, and how many seconds before that the command is
        # asked to end.
        self.until = until
        self.grace = grace
        self.pid = 0
        # Signals for the command that came before it was there.
        self.early: list[int] = []
        # Its exit status, once it has ended; others of its group may go on.
        self.status: int | None = None
        # When the group is killed, once it was asked to end because of the lease.
        self.kill_at: float | None = None
        self.is_killed = False
        self.is_over = False
        self.heard = b""
        self.has_terminal = False

    def run(self, command: list[str]) -> None:
        """Start the command, and return when it and all of its group have ended."""
        woken, waking = os.pipe()
        os.set_blocking(waking, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # Who ignores a signal from its own parent on (nohup) goes on doing so.
        before = {name: signal.signal(getattr(signal, name), signal.SIG_IGN) for name in NOT_FOR_US}
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        # It may be another session's terminal, which nobody here is in the foreground of; and who
        # reads our output from a pipe, a pager, may want the terminal for itself.
        with contextlib.suppress(OSError):
            self.has_terminal = os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
        while self.told is not None and select.select([self.told], [], [], 0)[0]:
            self.listen()
        if self.kill_at is not None or now() >= self.until - self.grace:
            # The lease has ended before the command could begin.
            self.tell("ended", 0, 1)
            return
        error = self.start(command, before)
        if error:
            self.tell("failed", error)
            return
        self.tell("started", self.pid)
        for number in self.early:
            self.send(number)
        while not self.is_over:
            sources: list[Any] = [woken] if self.told is None else [woken, self.told]
            ready, _, _ = select.select(sources, [], [], self.sleep())
            if woken in ready:
                os.read(woken, 4096)
            if self.told in ready:
                self.listen()
            self.reap()
            self.watch()
        self.take_terminal()
        self.tell("ended", self.status, int(self.kill_at is not None))

    def start(self, command: list[str], before: Mapping[str, object]) -> int:
        """Start the command; the number of the error, or 0."""
        us = os.getpid()
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            number: int | None = errno.ENOEXEC
            try:
                os.setpgid(0, 0)
                # Who reads from a terminal must be in its foreground.
                self.take_terminal()
                # Of the command itself, and not of what that starts: if this process is killed.
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == us:
                    for name, handler in before.items():
                        # Python itself ignores this one.
                        keep = handler is signal.SIG_IGN and name not in ("SIGPIPE", "SIGXFSZ")
                        if not keep:
                            signal.signal(getattr(signal, name), signal.SIG_DFL)
                    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.execvp(command[0], command)
            except OSError as failure:
                number = failure.errno
            except ValueError:
                # A null byte in a word.
                number = errno.EINVAL
            finally:
                os.write(writing, str(number).encode())
                os._exit(127)
        os.close(writing)
        # The read ends when the command has taken the child's place.
        answer = os.read(reading, 20)
        os.close(reading)
        if answer:
            os.waitpid(self.pid, 0)
            self.take_terminal()
        return int(answer or 0)

    def take_terminal(self) -> None:
        """Put this process's group into the foreground, if there is a terminal."""
        if self.has_terminal:
            # It may have been closed meanwhile.
            with contextlib.suppress(OSError):
                os.tcsetpgrp(0, os.getpgrp())

    def sleep(self) -> float:
        """Seconds until there may be something to do."""
        if self.is_killed or self.status is not None:
            return LOOK_EVERY
        due = self.until - self.grace if self.kill_at is None else self.kill_at
        return min(max(due - now(), 0.0), LONGEST_SLEEP)

    def listen(self) -> None:
        """Hear what it is told."""
        assert self.told is not None
        try:
            heard = self.told.recv(4096)
        except OSError:
            heard = b""
        if not heard:
            # Nobody extends the lease any more, nor asks what has become of the command.
            self.told.close()
            self.told = None
            self.cut()
            return
        *lines, self.heard = (self.heard + heard).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            if word == "until":
                self.until = float(value)
            elif word == "signal":
                self.send(int(value))
            else:
                self.cut()

    def reap(self) -> None:
        """Take note of all children that have ended, the orphans of the command's among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                break
            if not pid:
                break
            if os.WIFSTOPPED(status):
                # From a terminal, whose shell knows nothing of that group: nobody would ever have
                # it go on.
                if os.WSTOPSIG(status) == signal.SIGTSTP:
                    self.send(signal.SIGCONT)
            elif pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)
        if self.status is not None and not self.send(0):
            self.is_over = True

    def watch(self) -> None:
        """Stop the command in time."""
        if self.is_over:
            return
        if self.kill_at is None and now() >= self.until - self.grace:
            self.cut()
        if self.kill_at is not None and now() >= self.kill_at:
            self.is_killed = True
            self.send(signal.SIGKILL)

    def cut(self) -> None:
        """Ask the command to end, because the lease does."""
        if self.kill_at is None:
            self.kill_at = min(self.until, now() + self.grace) - self.grace * KILL_TAKES
            self.send(signal.SIGTERM)
            # One that stands still would hear of it only when it goes on.
            self.send(signal.SIGCONT)

    def send(self, number: int) -> bool:
        """Send a signal to all of the group; whether there is anybody."""
        if not self.pid:
            self.early.append(number)
            return False
        if self.is_over:
            # Its number may be somebody else's by now.
            return False
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            # Another user's: it is there, and ends when it likes.
            return True
        return True

    def tell(self, *words: object) -> None:
        """Tell who has started this."""
        if self.told is not None:
            # If it has gone, the next look will find that out.
            with contextlib.suppress(OSError):
                self.told.sendall((" ".join(map(str, words)) + "\n").encode())


def main(descriptor: str, until: str, grace: str, *command: str) -> None:
    """See above."""
    # Inherited, and not for the command: or its end would be open for as long as that runs.
    told = socket.socket(fileno=int(descriptor))
    told.set_inheritable(False)
    Keeper(told, float(until), float(grace)).run(list(command))


if __name__ == "__main__":
    main(*sys.argv[1:])
