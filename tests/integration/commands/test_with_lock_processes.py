"""manage.py with_lock beside other processes: signalled, killed, paused, at a terminal.

Whatever becomes of it, its command never goes on beside the next holder.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distlocks import db_lock, force_release, locks
from distlocks.models import Lock
from tests.servers import processes
from tests.servers.children import Child, Spawner
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("databases")

WITH_LOCK = """
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", "with_lock", *args])
"""
# Says that it is there, and what it is sent. No shell: those lose a signal now and then, while they
# start something.
LISTENS = (
    sys.executable,
    "-c",
    """
import os, signal
heard = (signal.SIGTERM, signal.SIGHUP)
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
print(os.getpid(), flush=True)
while (number := signal.sigwait(heard)) != signal.SIGTERM:
    print("HUP", flush=True)
print("TERM", flush=True)
os._exit(5)
""",
)
DEAF = ("sh", "-c", "trap '' TERM HUP; echo $$; while :; do sleep 0.01; done")

Begin = Callable[..., Child]


@pytest.fixture
def begin(spawn: Spawner) -> Begin:
    """`begin("sh -c", *words)`: the child that runs with_lock."""

    def begin(*words: str, **options: str) -> Child:
        return spawn(WITH_LOCK, *words, **options)

    return begin


def keeper_of(child: Child) -> int:
    """The process beside the command."""
    return eventually(lambda: processes.descendants(child.pid))[0]


def is_held(key: str, backend: str = "default") -> bool:
    return bool(locks[backend].holders(key))


# By which one can tell that it waits.
WAITS: dict[str, Callable[[str], bool]] = {
    "postgres": lambda key: Lock.objects.using("postgres").get(key=key).waiting_until > 0,
    "redis": lambda key: bool(locks["redis"].waiters(key)),
}


class TestSignals:
    def test_they_are_the_commands(self, begin: Begin, key: str) -> None:
        child = begin(key, "--", *LISTENS)
        child.readline()
        processes.send(child.pid, signal.SIGHUP)
        assert child.readline() == "HUP"
        processes.send(child.pid, signal.SIGTERM)
        assert child.readline() == "TERM"
        assert child.wait() == 5
        assert not is_held(key)
        assert "Traceback" not in child.errors

    def test_of_a_command_that_goes_on_the_lock_is_kept(self, begin: Begin, key: str) -> None:
        child = begin("--ttl", "1", key, "--", *DEAF)
        pid = int(child.readline())
        processes.send(child.pid, signal.SIGTERM)
        processes.send(child.pid, signal.SIGHUP)
        (first,) = locks["default"].holders(key)
        eventually(lambda: locks["default"].holders(key)[0].remaining > first.remaining)
        processes.send(child.pid, signal.SIGINT)
        assert child.wait() == 130
        assert not processes.is_alive(pid)

    @pytest.mark.parametrize("backend", ["postgres", "redis"])
    def test_they_end_the_wait_for_the_lock(
        self, begin: Begin, key: str, backend: str, tmp_path: Path
    ) -> None:
        ran = tmp_path / "ran"
        if backend == "redis":
            locks["redis"].quarantine(end=True)
        with db_lock(key, backend=backend):
            words = ("--backend", backend, "-w", "forever", key, "--", "touch", str(ran))
            child = begin(*words)
            eventually(lambda: WAITS[backend](key))
            processes.send(child.pid, signal.SIGTERM)
            assert child.wait() == 128 + signal.SIGTERM
        assert not ran.exists()
        assert "Traceback" not in child.errors
        with db_lock(key, backend=backend, timeout=3):
            pass


class TestWithoutWhoRenews:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_command_that_does_not_listen_is_dead_before_the_next_begins(
        self, begin: Begin, key: str, number: signal.Signals
    ) -> None:
        """Killed, or paused, which nobody would hear of."""
        child = begin("--ttl", "1", "--grace", "0.4", key, "--", *DEAF)
        pid = int(child.readline())
        child.expected_to_fail = True
        processes.send(child.pid, number)
        with db_lock(key):
            assert not processes.is_alive(pid)
        processes.send(child.pid, signal.SIGCONT)
        assert child.wait() == (75 if number == signal.SIGSTOP else -9)

    def test_one_that_listens_ends_at_once(self, begin: Begin, key: str) -> None:
        child = begin(key, "--", *LISTENS)
        pid = int(child.readline())
        processes.send(child.pid, signal.SIGKILL)
        assert child.readline() == "TERM"
        eventually(lambda: not processes.is_alive(pid))
        child.expected_to_fail = True
        force_release(key)

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux tells children of it")
    def test_nor_without_its_keeper(self, begin: Begin, key: str) -> None:
        child = begin(key, "--", *DEAF)
        pid = int(child.readline())
        processes.send(keeper_of(child), signal.SIGKILL)
        assert child.wait() == 71
        assert not processes.is_alive(pid)
        assert not is_held(key)
        assert "The command was killed, too" in child.errors

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux tells children of it")
    def test_nor_without_both(self, begin: Begin, key: str) -> None:
        child = begin(key, "--", *DEAF)
        pid = int(child.readline())
        keeper = keeper_of(child)
        # So that nobody notices that the other is gone.
        processes.send(keeper, signal.SIGSTOP)
        processes.send(child.pid, signal.SIGKILL)
        processes.send(keeper, signal.SIGKILL)
        child.expected_to_fail = True
        eventually(lambda: not processes.is_alive(pid))
        force_release(key)


class TestTheLease:
    def test_a_command_whose_lock_is_freed_by_an_operator_is_stopped(
        self, begin: Begin, key: str
    ) -> None:
        child = begin("--ttl", "1", key, "--", *LISTENS)
        child.readline()
        force_release(key)
        assert child.readline() == "TERM"
        assert child.wait() == 75
        assert "force-released" in child.errors
        assert "ended with status 5" in child.errors

    def test_what_the_command_leaves_in_the_background_is_under_the_lock(
        self, begin: Begin, key: str, tmp_path: Path
    ) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        child = begin(key, "--", "sh", "-c", f"(cat {fifo}; echo done) & exit 4")
        keeper = keeper_of(child)
        # Of the command and what it has left behind, the first has ended.
        eventually(lambda: len(processes.descendants(keeper)) == 2, within=5)
        assert child.running
        assert is_held(key)
        fifo.write_text("")
        child.expect("done")
        assert child.wait() == 4
        assert not is_held(key)

    def test_it_is_stopped_with_all_that_it_has_started(self, begin: Begin, key: str) -> None:
        script = "sh -c 'echo $$; exec sleep 60' & wait"
        child = begin("--ttl", "1", "--max-hold", "1", key, "--", "sh", "-c", script)
        inner = int(child.readline())
        assert child.wait() == 75
        assert not processes.is_alive(inner)


AT_A_TERMINAL = """
import os, pty, sys

pid, terminal = pty.fork()
if not pid:
    words = ["-m", "django", "with_lock", key, "--", "sh", "-c", script]
    os.execv(sys.executable, [sys.executable, *words])

def read_until(words):
    text = b""
    while words not in text:
        text += os.read(terminal, 1024)

read_until(b"ready")
os.write(terminal, b"an answer\\n")
read_until(b"got an answer")
os.write(terminal, bytes([26]))
os.write(terminal, b"another\\n")
read_until(b"got another")
os.write(terminal, bytes([3]))
result = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_at_a_terminal_it_can_be_talked_to(spawn: Spawner, key: str) -> None:
    """It reads, is not stopped for ever by Ctrl-Z, and is interrupted by Ctrl-C."""
    script = "echo ready; while read line; do echo got $line; done"
    child = spawn(AT_A_TERMINAL, key=key, script=script)
    assert child.result() == 130
    assert not is_held(key)
