"""manage.py check_locks: one line, and a status that a monitoring system understands."""

import json
import re
import uuid
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError
from django.test import override_settings

from distlocks import db_lock, locks
from distlocks.management import listing
from distlocks.management.commands import check_locks
from distlocks.models import Lock
from tests.factories import LockFactory
from tests.integration.authority.conftest import make_scene, own_redis, scene  # noqa: F401
from tests.integration.authority.scene import FAST, Scene
from tests.integration.commands.conftest import Run
from tests.integration.commands.scene import ALIAS, MEMORY, a_circle, counted, row, waiting_for

OK, WARNING, CRITICAL, UNKNOWN = range(4)


class Probe:
    """Runs it, and keeps what it has told."""

    def __init__(self, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
        self._run, self._capfd = run, capfd
        self.line = self.errors = ""

    def __call__(self, *words: str) -> int:
        status = self._run("check_locks", *words)
        told = self._capfd.readouterr()
        self.line, self.errors = told.out.rstrip("\n"), told.err
        return status

    def document(self, *words: str) -> Any:
        status = self("--json", *words)
        document = json.loads(self.line)
        assert document["code"] == status
        return document


@pytest.fixture
def probe(run: Run, capfd: pytest.CaptureFixture[str]) -> Probe:
    return Probe(run, capfd)


class TestWell:
    def test_with_nothing_to_tell(self, watched: None, probe: Probe) -> None:
        assert probe() == OK
        assert probe.line == (
            "LOCKS OK: no lock held, nobody waits. | held=0 longest_held=0s waiters=0 "
            "waiters_of_one_key=0 longest_wait=0s circles=0;;0 timeouts=0 losses=0;0 errors=0;0 "
            "dropped=0;0"
        )
        assert probe.errors == ""
        document = probe.document()
        assert (document["status"], document["findings"]) == ("ok", [])

    def test_with_locks_held_and_waited_for(self, watched: None, probe: Probe) -> None:
        with db_lock("a", "b", backend=ALIAS), waiting_for("a"):
            assert probe() == OK
        told = (
            r"LOCKS OK: 2 held, the longest for \d\.\d s, 1 waiting, the longest for \d\.\d s\. \| "
        )
        assert re.match(told, probe.line), probe.line

    def test_a_tree_key_counts_once(self, watched: None, probe: Probe) -> None:
        with db_lock(("a", "b"), backend=ALIAS), waiting_for("a"):
            assert probe() == OK
        assert probe.line.startswith("LOCKS OK: 1 held, ")

    @pytest.mark.parametrize("alias", ["sqlite", "postgres", "mariadb", "advisory"])
    def test_whatever_the_store(self, watched: None, probe: Probe, alias: str) -> None:
        with override_settings(DISTLOCKS={"default": MEMORY, ALIAS: settings_of(alias)}):
            assert probe("--backend", ALIAS) == OK


def settings_of(alias: str) -> Any:
    from tests import settings as all_settings

    return all_settings.DISTLOCKS[alias]


class TestThresholds:
    @pytest.mark.parametrize(
        ("limits", "status"),
        [("1h", OK), ("1m", WARNING), ("1m,1h", WARNING), ("1s,1m", CRITICAL), (",1m", CRITICAL)],
    )
    def test_held_for_too_long(self, watched: None, probe: Probe, limits: str, status: int) -> None:
        Lock.objects.all().delete()
        for number, age in enumerate((300, 200, 5)):
            LockFactory(key=f"order:{number}", age=age, label="nightly", pid=9)
        # What is only kept for its minimum hold is not held for too long.
        LockFactory(key="cooling", age=1000, cooling=True)
        with override_settings(DISTLOCKS={"default": {"HISTORY_DAYS": 0}}):
            assert probe("--held", limits) == status
        if status != OK:
            told = "'order:0' (default) has been held for 5 m by web-1 pid 9 MainThread (nightly), "
            assert re.sub("5 m [12] s", "5 m", probe.line).split(": ", 1)[1].startswith(told)
            more = 2 if limits.startswith("1s") and status == WARNING else 1
            assert f"and {more} more for too long. |" in probe.line
        Lock.objects.all().delete()

    @pytest.mark.parametrize(
        ("limits", "status"), [("3", OK), ("2", WARNING), ("1,2", CRITICAL), ("none", OK)]
    )
    def test_too_many_wait_for_one_key(
        self, watched: None, probe: Probe, limits: str, status: int
    ) -> None:
        for owner in ("one", "two", "three"):
            row(owner, "busy")
        row("four", "other")
        assert probe("--waiters", limits) == status
        assert ("3 wait for 'busy' (watched)" in probe.line) == (status != OK)

    @pytest.mark.parametrize(
        ("limits", "status"), [("5m", OK), ("30s", WARNING), ("10,30", CRITICAL)]
    )
    def test_somebody_waits_for_too_long(
        self, watched: None, probe: Probe, limits: str, status: int
    ) -> None:
        row("one", "busy")
        assert probe("--waiting", limits) == status
        told = "web-2 pid 7 thread-one has waited for 1 m for 'busy' (watched)"
        assert (told in probe.line) == (status != OK)

    @pytest.mark.parametrize(
        ("limits", "status"), [((), CRITICAL), (("0",), WARNING), (("1",), OK), (("none",), OK)]
    )
    def test_processes_wait_for_each_other(
        self, watched: None, probe: Probe, limits: tuple[str, ...], status: int
    ) -> None:
        a_circle()
        assert probe(*[f"--circles={one}" for one in limits]) == status
        assert ("none can go on: web-2 pid 7 thread-one waits for 'left'" in probe.line) == (
            status != OK
        )

    @pytest.mark.parametrize(
        ("limits", "status"), [("2", OK), ("1", WARNING), ("0,1", CRITICAL), ("none", OK)]
    )
    def test_leases_that_nobody_sweeps(
        self, databases: None, probe: Probe, limits: str, status: int
    ) -> None:
        Lock.objects.all().delete()
        for key in ("a", "b"):
            LockFactory(key=key, expired=True)
        aliases = {"default": {"HISTORY_DAYS": 0}, "same": {"HISTORY_DAYS": 0}}
        with override_settings(DISTLOCKS=aliases):
            assert probe("--expired", limits) == status
        told = "2 expired leases were not swept: does sweep_locks run?"
        assert (told.rstrip(".") in probe.line) == (status != OK)
        assert Lock.objects.exclude(owner_id="").count() == 2
        Lock.objects.all().delete()

    @pytest.mark.parametrize(
        ("column", "option", "told"),
        [
            ("timed_out", "--timeouts", "3 time-outs in the last 15 m"),
            ("lost", "--losses", "3 lost leases in the last 15 m"),
            ("errors", "--errors", "3 failed requests to stores in the last 15 m"),
            ("dropped", "--dropped", "3 events lost to the history in the last 15 m"),
        ],
    )
    def test_what_has_happened_lately(
        self, watched: None, probe: Probe, column: str, option: str, told: str
    ) -> None:
        counted(**{column: 2})
        counted(ago=14 * 60, **{column: 1})
        # Another alias', and before.
        counted("another", **{column: 100})
        counted(ago=17 * 60, **{column: 50})
        assert probe(option, "3") == OK
        assert probe(option, "2") == WARNING
        assert f"LOCKS WARNING: {told}. |" in probe.line
        assert probe(option, "1,2") == CRITICAL
        assert probe(option, "100", "--within", "1h") == OK
        assert probe(option, "52", "--within", "1h") == WARNING
        assert probe(option, "none", "--within", "1h") == OK
        assert probe() == (OK if column == "timed_out" else WARNING)


class TestStores:
    def test_one_that_does_not_answer_is_critical(
        self, watched: None, probe: Probe, unreachable: Any
    ) -> None:
        aliases = {"default": MEMORY, "down": unreachable, "wrong": {"BACKEND": "nowhere.Backend"}}
        with override_settings(DISTLOCKS=aliases):
            counted("default", lost=1)
            document = probe.document()
            assert probe() == CRITICAL
            assert probe("--backend", "default") == WARNING
        assert [(one["severity"], one["check"]) for one in document["findings"]] == [
            ("critical", "backend"),
            ("critical", "backend"),
            ("warning", "losses"),
        ]
        first, second, third = [one["text"] for one in document["findings"]]
        assert first.startswith("down does not answer: ")
        assert second.startswith("wrong does not answer: ")
        assert third == "1 lost lease in the last 15 m"

    def test_one_in_quarantine_is_worth_a_warning(self, watched: None, probe: Probe) -> None:
        redis = settings_of("redis")
        namespace = f"probe-{uuid.uuid4().hex}"
        new = {**redis, "OPTIONS": {**redis["OPTIONS"], "namespace": namespace}}
        with override_settings(DISTLOCKS={"default": new}):
            assert probe() == WARNING
            assert "default is in quarantine, and grants nothing for another " in probe.line
            locks["default"].quarantine(end=True)
            assert probe() == OK

    def test_a_fast_path_without_redis_is_worth_a_warning(
        self,
        scene: Scene,  # noqa: F811
        probe: Probe,
    ) -> None:
        scene.begin(pinned=True, why="Redis gets more memory.")
        settings.DISTLOCKS["default"] = MEMORY
        scene.add()
        assert probe("--backend", FAST) == WARNING
        assert "fast: the database grants. Redis gets more memory" in probe.line


class TestUnknown:
    def test_the_history_cannot_be_read(
        self, watched: None, probe: Probe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: object) -> None:
            raise OperationalError("It is\nbeing moved | by Ada.")

        monkeypatch.setattr(listing, "told", fail)
        assert probe() == UNKNOWN
        assert probe.line.startswith(
            "LOCKS UNKNOWN: Who waits cannot be read from 'default': It is being moved / by Ada. | "
        )
        # It hides nothing that is worse.
        counted(lost=1)
        assert probe() == WARNING

    def test_the_probe_itself_fails(
        self, watched: None, probe: Probe, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: object) -> None:
            raise RuntimeError("It is broken.")

        monkeypatch.setattr(check_locks, "check_holders", fail)
        assert probe() == UNKNOWN
        assert probe.line.startswith("LOCKS UNKNOWN: The probe failed: RuntimeError: It is broken.")

    def test_an_alias_that_is_none(self, watched: None, probe: Probe) -> None:
        assert probe("--backend", "other") == UNKNOWN
        assert probe.line.startswith("LOCKS UNKNOWN: There is no lock backend 'other'.")

    def test_settings_that_are_none(self, watched: None, probe: Probe) -> None:
        with override_settings(DISTLOCKS=[]):
            assert probe() == UNKNOWN
        assert probe.line.startswith("LOCKS UNKNOWN: DISTLOCKS must be a dict")

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (("--held", "long"), "'long' is no length of time"),
            (("--held", ","), "Give WARNING, WARNING,CRITICAL or ,CRITICAL"),
            (("--held", "2h,1h"), "'2h,1h' is critical before it is worth a warning"),
            (("--waiters", "-1"), "'-1' is not a number of occurrences"),
            (("--within", "0"), "'0' is no length of time"),
        ],
    )
    def test_wrong_arguments(
        self, watched: None, probe: Probe, words: tuple[str, str], told: str
    ) -> None:
        assert probe("=".join(words)) == UNKNOWN
        assert told in probe.errors
