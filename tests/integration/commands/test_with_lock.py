"""manage.py with_lock: a command runs while the lock is held, and its exit status is passed on."""

import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from distlocks import BackendUnavailable, Lease, db_lock, force_release, locks
from tests.integration.commands.conftest import Run

pytestmark = pytest.mark.usefixtures("databases")

TELL = (
    sys.executable,
    "-c",
    "import json, os, sys\n"
    "told = {name: value for name, value in os.environ.items() if name.startswith('DISTLOCKS_')}\n"
    "open(sys.argv[1], 'w').write(json.dumps([told, sys.argv[2:]]))",
)


def is_free(key: Any) -> bool:
    lease = db_lock(key, timeout=0).try_acquire()
    if lease is not None:
        lease.release()
    return lease is not None


class TestWhatTheCommandGets:
    def test_it_is_told_what_guards_its_work(self, run: Run, key: str, tmp_path: Path) -> None:
        with db_lock(key) as before:
            pass
        assert run("with_lock", f"{key} ü", "--", *TELL, str(tmp_path / "told")) == 0
        told, _ = json.loads((tmp_path / "told").read_text())
        assert told["DISTLOCKS_KEY"] == f"{key} ü"
        assert told["DISTLOCKS_BACKEND"] == "default"
        assert told["DISTLOCKS_OWNER_ID"]
        token = int(told["DISTLOCKS_TOKEN"])
        assert token > before.fencing_token
        with db_lock(f"{key} ü") as after:
            assert after.fencing_token > token

    @pytest.mark.parametrize("separator", [("--",), ()])
    def test_its_words_are_its_own(
        self, run: Run, key: str, tmp_path: Path, separator: tuple[str, ...]
    ) -> None:
        words = ["a b", "--", "-n", "--ttl", "--help", "--", ""]
        told = str(tmp_path / "told")
        # Without the dashes, a word of it that looks like an option must be none of ours.
        words = words if separator else ["a b", "c"]
        assert run("with_lock", "-n", key, *separator, *TELL, told, *words) == 0
        assert json.loads(Path(told).read_text())[1] == words

    def test_options_may_stand_on_either_side_of_the_key(self, run: Run, key: str) -> None:
        assert run("with_lock", "--ttl", "5", key, "-n", "--label", "a", "--", "true") == 0

    def test_it_holds_the_lock(self, run: Run, key: str) -> None:
        inner = [sys.executable, "-m", "django", "with_lock", "-n", "-E", "9", key, "--", "true"]
        assert run("with_lock", key, "--", *inner) == 9
        assert is_free(key)

    def test_it_reads_and_writes_where_we_do(
        self, run: Run, key: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert run("with_lock", key, "--", "sh", "-c", "echo out; echo err >&2") == 0
        assert tuple(capfd.readouterr()) == ("out\n", "err\n")

    @pytest.mark.parametrize("hang_up", [signal.SIG_DFL, signal.SIG_IGN])
    def test_signals_mean_to_it_what_they_did(
        self, run: Run, key: str, capfd: pytest.CaptureFixture[str], hang_up: signal.Handlers
    ) -> None:
        """Those that Python ignores, and those that its keeper does, are not ignored; and what is
        ignored from its start on, as under nohup, stays so."""
        before = signal.signal(signal.SIGHUP, hang_up)
        try:
            shown = ("sh", "-c", "grep -E 'Sig(Ign|Blk)' /proc/self/status")
            assert run("with_lock", key, "--", *shown) == 0
        finally:
            signal.signal(signal.SIGHUP, before)
        blocked, ignored = [
            {number for number in signal.Signals if int(line.split()[1], 16) >> (number - 1) & 1}
            for line in capfd.readouterr().out.splitlines()
        ]
        assert not blocked
        # Whoever started the tests may have had them ignore others.
        ours = {"HUP", "TERM", "PIPE", "XFSZ", "CHLD", "TSTP", "TTIN", "TTOU"}
        ours = ignored & {signal.Signals[f"SIG{name}"] for name in ours}
        assert ours == ({signal.SIGHUP} if hang_up == signal.SIG_IGN else set())


class TestStatus:
    @pytest.mark.parametrize("status", [0, 1, 7, 255])
    def test_it_is_the_commands(self, run: Run, key: str, status: int) -> None:
        assert run("with_lock", key, "--", "sh", "-c", f"exit {status}") == status
        assert is_free(key)

    def test_of_a_command_that_was_killed_it_is_what_a_shell_tells(
        self, run: Run, key: str
    ) -> None:
        assert run("with_lock", key, "--", "sh", "-c", "kill -KILL $$") == 137

    def test_the_lock_is_held(
        self, run: Run, key: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        touch = ("touch", str(tmp_path / "ran"))
        with db_lock(key, label="nightly"):
            assert run("with_lock", key, "--nonblock", "--", *touch) == 1
            told = capfd.readouterr().err
            assert f"The lock '{key}' could not be had at once" in told
            assert "(nightly)" in told
            assert run("with_lock", key, "--wait", "0.1", "-E", "0", "--", *touch) == 0
            assert run("with_lock", key, "-w", "0", "-E", "200", "--", *touch) == 200
        assert not (tmp_path / "ran").exists()

    def test_cron_need_not_hear_that_it_is_held(
        self, run: Run, key: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with db_lock(key):
            assert run("with_lock", key, "-n", "-E", "3", "-v", "0", "--", "true") == 3
        assert tuple(capfd.readouterr()) == ("", "")

    @pytest.mark.parametrize(
        ("command", "status", "words"),
        [
            ("no such command", 127, "cannot be started: No such file or directory: 'no such"),
            (__file__, 126, "cannot be started: Permission denied: '"),
        ],
    )
    def test_the_command_cannot_be_started(
        self,
        run: Run,
        key: str,
        capfd: pytest.CaptureFixture[str],
        command: str,
        status: int,
        words: str,
    ) -> None:
        assert run("with_lock", key, "--", command) == status
        assert words in capfd.readouterr().err
        assert is_free(key)

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (("k",), "the following arguments are required"),
            (("k", "--"), "the following arguments are required"),
            (("k", "--ttl", "long", "--", "true"), "argument --ttl: 'long' is no length of time"),
            (("k", "--ttl", "0.5", "--", "true"), "ttl=0.5 s is not allowed"),
            (("k", "--wait", "-1", "--", "true"), "'-1' is no length of time"),
            (("k", "-n", "--wait", "1", "--", "true"), "not allowed with argument"),
            (("k", "-s", "--limit", "2", "--", "true"), "not allowed with argument"),
            (("k", "--limit", "0", "--", "true"), "'0' is not a number of holders from 1 to"),
            (("k", "-E", "256", "--", "true"), "'256' is not a number of an exit status"),
            (("k", "--ttl", "6", "--grace", "3", "--", "true"), "give less than 3 s"),
            (("k", "--backend", "nowhere", "--", "true"), "no lock backend 'nowhere'"),
            (("", "--", "true"), "A lock key must not be empty"),
            (("k" * 201, "--", "true"), "has 201 characters"),
            (("k", "--part", "", "--", "true"), "A lock key must not be empty"),
            (("k", "--label", "l" * 201, "--", "true"), "label has 201 characters"),
        ],
    )
    def test_wrong_arguments(
        self, run: Run, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
    ) -> None:
        assert run("with_lock", *words) == 64
        assert told in capfd.readouterr().err

    def test_claims_that_the_store_has_not(
        self, run: Run, key: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        words = (key, "--backend", "advisory", "--limit", "2", "--", "true")
        assert run("with_lock", *words) == 64
        assert "has no permits" in capfd.readouterr().err

    def test_wrong_settings(self, run: Run, key: str, capfd: pytest.CaptureFixture[str]) -> None:
        with override_settings(DISTLOCKS={"default": {"TTL": "long"}}):
            assert run("with_lock", key, "--", "true") == 78
        assert "['TTL'] must be a number of seconds" in capfd.readouterr().err

    def test_the_store_does_not_answer(
        self,
        run: Run,
        key: str,
        capfd: pytest.CaptureFixture[str],
        unreachable: dict[str, Any],
        tmp_path: Path,
    ) -> None:
        with override_settings(DISTLOCKS={"default": unreachable}):
            assert run("with_lock", key, "--", "touch", str(tmp_path / "ran")) == 69
        assert not (tmp_path / "ran").exists()
        assert "CommandError: " in capfd.readouterr().err

    def test_in_a_program_it_is_an_error_or_the_programs_end(self, key: str) -> None:
        call_command("with_lock", key, "--", "true")
        with pytest.raises(SystemExit, match="3"):
            call_command("with_lock", key, "--", "sh", "-c", "exit 3")
        with db_lock(key), pytest.raises(CommandError, match="could not be had at once"):
            call_command("with_lock", key, "--", "true", timeout=0)


class TestClaims:
    def test_shared(self, run: Run, key: str) -> None:
        with db_lock(key, shared=True):
            assert run("with_lock", "-n", "-s", key, "--", "true") == 0
            assert run("with_lock", "-n", key, "--", "true") == 1

    def test_permits(self, run: Run, key: str) -> None:
        with db_lock(key, limit=2):
            assert run("with_lock", "-n", "--limit", "2", key, "--", "true") == 0
            assert run("with_lock", "-n", "--limit", "1", key, "--", "true") == 1

    def test_tree_keys(self, run: Run, key: str) -> None:
        with db_lock((key, "b", "c")):
            assert run("with_lock", "-n", key, "--part", "d", "--", "true") == 0
            assert run("with_lock", "-n", key, "--part", "b", "--", "true") == 1
            assert run("with_lock", "-n", key, "--part", "b", "--part", "d", "--", "true") == 0

    def test_a_minimum_hold_keeps_it_from_a_machine_whose_clock_is_late(
        self, run: Run, key: str
    ) -> None:
        words = ("with_lock", "-n", "--min-hold", "1m", "--label", "nightly", key)
        assert run(*words, "--", "false") == 1
        (holder,) = locks["default"].holders(key)
        assert holder.cooling_down
        assert holder.label == "nightly"
        assert run(*words, "-E", "9", "--", "true") == 9
        force_release(key)


class TestALeaseThatDoesNotLast:
    def test_the_command_is_stopped_when_it_cannot_be_renewed(
        self,
        run: Run,
        key: str,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        def fail(*args: object) -> None:
            raise BackendUnavailable("The server is being moved.")

        monkeypatch.setattr(locks["default"], "extend", fail)
        tidy = f"trap 'echo tidied > {tmp_path}/tidied; exit 0' TERM; sleep 30 & wait"
        words = ("with_lock", "--ttl", "1", "--grace", "0.4", key, "--", "sh", "-c", tidy)
        assert run(*words) == 75
        assert (tmp_path / "tidied").exists()
        told = capfd.readouterr().err
        assert "The lease could not be extended in time. The command was stopped" in told
        # It ended before the lease did, so there is nothing to wait for.
        assert is_free(key)

    def test_one_that_does_not_listen_is_killed_before_the_next_may_begin(
        self, run: Run, key: str, tmp_path: Path
    ) -> None:
        script = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.01; done"
        words = ("--ttl", "2", "--max-hold", "1", "--grace", "0.2", key)
        assert run("with_lock", *words, "--", "sh", "-c", script) == 75
        pid = int((tmp_path / "pid").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with db_lock(key, timeout=5):
            pass

    def test_a_command_that_takes_longer_than_a_lease_keeps_it(self, run: Run, key: str) -> None:
        assert run("with_lock", "--ttl", "1", key, "--", "sleep", "1.05") == 0

    @pytest.mark.parametrize(("own", "status"), [(0, 75), (7, 7)])
    def test_a_command_that_ends_well_after_a_loss_has_not_ended_well(
        self,
        run: Run,
        key: str,
        capfd: pytest.CaptureFixture[str],
        tmp_path: Path,
        own: int,
        status: int,
    ) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)

        def free() -> None:
            # Opened by the command when it runs.
            with fifo.open("w"):
                force_release(key)
            connections.close_all()

        with ThreadPoolExecutor(1) as pool:
            freed = pool.submit(free)
            assert run("with_lock", key, "--", "sh", "-c", f"cat {fifo}; exit {own}") == status
            freed.result(10)
        told = "is lost: the store had it no more" in capfd.readouterr().err
        assert told == (status == 75)

    def test_no_word_of_the_lease_is_left_behind(
        self, run: Run, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leases: list[Lease] = []
        real: Callable[..., Lease] = db_lock.acquire
        monkeypatch.setattr(
            db_lock, "acquire", lambda lock: leases.append(real(lock)) or leases[-1]
        )
        handler = signal.getsignal(signal.SIGTERM)
        assert run("with_lock", key, "--", "true") == 0
        assert [lease.over for lease in leases] == [True]
        assert signal.getsignal(signal.SIGTERM) is handler
