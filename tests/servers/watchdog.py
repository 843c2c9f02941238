"""Ends what a test process leaves behind when it is killed and can run no cleanup of its own.

A small process of its own session holds the reading end of a pipe. The test process writes down
what it starts and what it has ended; when the pipe closes, however that came about, the rest is
ended and removed. (A parent-death signal would follow the *thread* that started the server.)
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.servers import processes

ROOT = Path(__file__).resolve().parents[2]


class Watchdog:
    """The test process' side: says what is there to be ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._lock = threading.Lock()
        # A forked child must not keep the pipe open after the test process is gone.
        os.register_at_fork(after_in_child=self._close_pipe)

    def process_started(self, pid: int, stop_signal: signal.Signals) -> None:
        self._write("started", pid, int(stop_signal))

    def process_ended(self, pid: int) -> None:
        self._write("ended", pid)

    def folder_made(self, path: Path) -> None:
        self._write("made", path)

    def folder_removed(self, path: Path) -> None:
        self._write("removed", path)

    def close(self) -> None:
        """End what is left now, and the watchdog with it. The next entry starts another."""
        with self._lock:
            if self._process is not None:
                self._close_pipe()
                self._process.wait(30)
                self._process = None

    def _write(self, *words: object) -> None:
        with self._lock:
            if self._pipe is None:
                self._start()
            assert self._pipe is not None
            os.write(self._pipe, ("\t".join(map(str, words)) + "\n").encode())

    def _start(self) -> None:
        reading, self._pipe = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.watchdog"],
            cwd=ROOT,
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the test process only
        )
        os.close(reading)

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


watchdog = Watchdog()


def main() -> None:
    started: dict[int, signal.Signals] = {}
    folders: set[str] = set()
    for line in sys.stdin:
        match line.rstrip("\n").split("\t"):
            case ["started", pid, stop_signal]:
                started[int(pid)] = signal.Signals(int(stop_signal))
            case ["ended", pid]:
                started.pop(int(pid), None)
            case ["made", path]:
                folders.add(path)
            case ["removed", path]:
                folders.discard(path)
    # Listed before anything ends: orphans no longer say whose they were.
    members = [member for pid in started for member in (pid, *processes.descendants(pid))]
    for pid, stop_signal in started.items():
        processes.thaw(pid)
        processes.send(pid, stop_signal)
    processes.wait_until(lambda: not any(map(processes.is_alive, members)), 5)
    for member in members:
        processes.send(member, signal.SIGKILL)
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
