"""What the operating system knows of processes: whose children, alive, stopped, ended."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> list[int]:
    """The children of a process, their children and so on, parents first."""
    children: dict[int, list[int]] = {}
    for child, parent, _ in _processes():
        children.setdefault(parent, []).append(child)
    found = list(children.get(pid, ()))
    for child in found:
        found.extend(children.get(child, ()))
    return found


def is_alive(pid: int) -> bool:
    """Whether the process still runs; one that only waits to be reaped does not."""
    return _state(pid) not in ("", "Z", "X")


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; to a process that has already ended, nothing."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def freeze(pid: int) -> None:
    """Stop a process and all below it, and return when they stand still."""

    def all_still() -> bool:
        # The parent comes first in the list: once it is stopped, nobody makes new children.
        moving = [p for p in [pid, *descendants(pid)] if _state(p) not in ("T", "t", "Z", "X", "")]
        for member in moving:
            send(member, signal.SIGSTOP)
        return not moving

    if not wait_until(all_still, 10):
        raise TimeoutError(f"process {pid} and its children did not all stop")


def thaw(pid: int) -> None:
    """Let a process and all below it go on."""
    for member in [*descendants(pid), pid]:
        send(member, signal.SIGCONT)


def kill(pid: int) -> None:
    """End a process and all below it as a power cut would, and return when they are gone."""
    members = [pid, *descendants(pid)]
    for member in members:
        send(member, signal.SIGKILL)
    # The process itself, our own child, stays a zombie until its Popen reaps it.
    wait_until(lambda: not any(is_alive(member) for member in members), 10)


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.005) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def _state(pid: int) -> str:
    if PROC.joinpath("self").exists():
        found = _read_stat(PROC / str(pid))
        return found[2] if found else ""
    return next((state for member, _, state in _processes() if member == pid), "")


def _processes() -> list[tuple[int, int, str]]:
    """Each process' id, its parent's id and the letter of its state."""
    if PROC.joinpath("self").exists():
        stats = (_read_stat(path) for path in PROC.iterdir() if path.name.isdecimal())
        return [stat for stat in stats if stat]
    # Not Linux: every system has ps, while slim Linux images do not.
    listing = subprocess.run(
        [shutil.which("ps") or "ps", "-A", "-o", "pid=,ppid=,stat="],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = (line.split() for line in listing.splitlines())
    return [(int(pid), int(parent), state[0]) for pid, parent, state in rows]


def _read_stat(path: Path) -> tuple[int, int, str] | None:
    try:
        text = path.joinpath("stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold spaces and parentheses itself.
    state, parent = text.rpartition(")")[2].split()[:2]
    return int(path.name), int(parent), state
