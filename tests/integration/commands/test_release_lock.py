"""manage.py release_lock: a key is freed from the holders that the operator has seen."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import override_settings

from distlocks import LeaseLost, StaleToken, db_lock, force, locks
from distlocks.management.commands import release_lock
from distlocks.models import LockEvent
from distlocks.testing import flush_history
from tests.integration.commands.conftest import Run
from tests.integration.commands.scene import MEMORY

pytestmark = pytest.mark.usefixtures("databases")

Answer = Callable[..., list[str]]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """`answer("yes", act)`: what the operator types, before which `act` happens; the questions."""

    def set_up(*answers: Any) -> list[str]:
        asked: list[str] = []
        left = list(answers)

        def typed(prompt: str) -> str:
            asked.append(prompt)
            while callable(left[0]):
                left.pop(0)()
            found: str = left.pop(0)
            return found

        monkeypatch.setattr("builtins.input", typed)
        return asked

    return set_up


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.delenv("SUDO_USER", raising=False)


@pytest.mark.parametrize("alias", ["sqlite", "postgres", "redis"])
def test_who_has_it_is_shown_and_after_a_yes_it_is_free(
    run: Run, key: str, answer: Answer, capfd: pytest.CaptureFixture[str], alias: str
) -> None:
    if alias == "redis":
        locks["redis"].quarantine(end=True)
    lease = db_lock(key, backend=alias, label="nightly").acquire()
    asked = answer("yes")
    assert run("release_lock", key, "--backend", alias) == 0
    out = capfd.readouterr().out
    assert asked == [f"Type 'yes' to free '{key}': "]
    assert f"  '{key}' is held by " in out
    assert "(nightly) since " in out
    assert "if it still runs, learns that within 10 s" in out
    assert "The guards in 'default' are raised" in out
    assert out.endswith(f"Freed '{key}' ({alias}).\n")
    with pytest.raises(LeaseLost):
        lease.extend()
    with pytest.raises((StaleToken, LeaseLost)), lease.atomic():
        raise AssertionError
    with db_lock(key, backend=alias, timeout=0):
        pass


@pytest.mark.parametrize("typed", ["no", "", "YES", "y"])
def test_after_anything_but_a_yes_nothing_has_changed(
    run: Run, key: str, answer: Answer, capfd: pytest.CaptureFixture[str], typed: str
) -> None:
    answer(typed)
    with db_lock(key) as lease:
        assert run("release_lock", key) == 1
        lease.extend()
    assert capfd.readouterr().err == "CommandError: Nothing was freed.\n"


def test_without_anybody_to_ask_nothing_is_freed(
    run: Run, key: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def at_the_end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", at_the_end)
    with db_lock(key) as lease:
        assert run("release_lock", key) == 1
        lease.extend()
    assert "use --yes" in capfd.readouterr().err


def test_who_has_come_meanwhile_is_not_freed_unseen(
    run: Run, key: str, answer: Answer, capfd: pytest.CaptureFixture[str]
) -> None:
    first = db_lock(key, label="first").acquire()

    def changes_hands() -> None:
        first.release()
        answer.second = db_lock(key, label="second").acquire()  # type: ignore[attr-defined]

    asked = answer(changes_hands, "yes", "no")
    assert run("release_lock", key) == 1
    out = capfd.readouterr().out
    assert len(asked) == 2
    assert "(second)" in out[out.index("Meanwhile it has changed hands.") :]
    second = answer.second  # type: ignore[attr-defined]
    second.extend()
    second.release()


def test_who_has_gone_meanwhile_need_not_be_freed(run: Run, key: str, answer: Answer) -> None:
    lease = db_lock(key).acquire()
    answer(lease.release, "yes")
    assert run("release_lock", key) == 3


@pytest.mark.parametrize("words", [(), ("--yes",), ("--noinput",)])
def test_what_is_free_has_a_status_of_its_own(
    run: Run, key: str, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert run("release_lock", key, *words) == 3
    assert f"'{key}'" in capfd.readouterr().err


def test_without_a_question_and_with_a_reason(
    run: Run, key: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_USER", "grace")
    with caplog.at_level(logging.WARNING, "distlocks"):
        lease = db_lock(key).acquire()
        assert run("release_lock", key, "--yes", "--reason", "web-1 is gone") == 0
    assert "Force-released by grace as ada: web-1 is gone: " in caplog.text
    flush_history()
    event = LockEvent.objects.get(key=key, kind="forced")
    assert (event.reason, event.other["label"]) == ("web-1 is gone", "grace as ada")
    assert event.fencing_token == lease.fencing_token


def test_whom_the_system_has_no_name_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import getpass
    import os

    def fail() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", fail)
    assert release_lock.operator() == f"user {os.getuid()}"


def test_tree_keys(run: Run, key: str, answer: Answer, capfd: pytest.CaptureFixture[str]) -> None:
    asked = answer("yes", "yes")
    one, other = db_lock((key, "a", "b")).acquire(), db_lock((key, "c")).acquire()
    beside = db_lock(f"{key}!").acquire()
    assert run("release_lock", key, "--part", "c") == 0
    assert asked == [f"Type 'yes' to free '{key} → c': "]
    assert other.lost or not other.release()
    one.extend()
    capfd.readouterr()
    assert run("release_lock", key) == 0
    shown = capfd.readouterr().out.split("Others may")[0]
    assert shown.count(" is held by ") == 1
    with pytest.raises(LeaseLost):
        one.extend()
    beside.extend()
    beside.release()


def test_many_holders_are_counted(
    run: Run, key: str, answer: Answer, capfd: pytest.CaptureFixture[str]
) -> None:
    with override_settings(DISTLOCKS={"default": MEMORY}):
        for _ in range(23):
            db_lock(key, shared=True).acquire()
        answer("no")
        run("release_lock", key)
    out = capfd.readouterr().out
    assert out.count("is shared by") == 20
    assert "… and 3 more" in out


def test_what_only_cools_down(
    run: Run, key: str, answer: Answer, capfd: pytest.CaptureFixture[str]
) -> None:
    with db_lock(key, min_hold=60):
        pass
    answer("yes")
    assert run("release_lock", key) == 0
    out = capfd.readouterr().out
    assert "is cooling down" in out
    assert "Nobody works under it any more" in out


def test_without_guards_the_operator_is_told_so(
    run: Run, key: str, answer: Answer, capfd: pytest.CaptureFixture[str]
) -> None:
    with override_settings(DISTLOCKS={"default": {**MEMORY, "GUARD_DATABASES": []}}):
        lease = db_lock(key).acquire()
        answer("no")
        run("release_lock", key)
        lease.release()
    assert "No guard keeps out what they still write" in capfd.readouterr().out


class TestErrors:
    def test_the_store_does_not_answer(
        self, run: Run, key: str, unreachable: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with override_settings(DISTLOCKS={"default": unreachable}):
            assert run("release_lock", key, "--yes") == 1
        assert capfd.readouterr().err.startswith("CommandError: default: ")

    def test_a_guard_cannot_be_raised(
        self,
        run: Run,
        key: str,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        def fail(*args: object) -> int:
            raise OperationalError("It is being moved.")

        monkeypatch.setattr(force, "_refuse", fail)
        with db_lock(key) as lease:
            assert run("release_lock", key, "--yes") == 1
            lease.extend()
        assert "stays held: a guard could not be raised" in capfd.readouterr().err

    def test_one_that_changed_hands_and_whose_last_holder_could_not_be_refused_is_free(
        self,
        run: Run,
        key: str,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        answers = iter([0])

        def fail(*args: object) -> int:
            for answer in answers:
                return answer
            raise OperationalError("It is being moved.")

        monkeypatch.setattr(force, "_refuse", fail)
        lease = db_lock(key).acquire()
        assert run("release_lock", key, "--yes") == 1
        assert "was freed" in capfd.readouterr().err
        assert locks["default"].holders(key) == []
        lease.drop()

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (("",), "must not be empty"),
            (("a", "--part", "\x1f"), "control character"),
            (("a", "--backend", "other"), "no lock backend 'other'"),
        ],
    )
    def test_wrong_arguments(self, words: tuple[str, ...], told: str) -> None:
        with pytest.raises(CommandError, match=told):
            call_command("release_lock", *words)
