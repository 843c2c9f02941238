"""manage.py list_locks: who holds which lock, and who waits for it."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import override_settings

from distlocks import db_lock, locks
from distlocks.identity import host, pid
from distlocks.management import listing
from tests.integration.commands.conftest import Run
from tests.integration.commands.scene import ALIAS, MEMORY, a_circle, row, waiting_for
from tests.waiting import eventually

LINE = r"{key} +{alias} +{mode} +\S+ pid \d+ \S+ *{label} +\d+\.\d s +\d+(\.\d)? s"


@pytest.fixture
def listed(run: Run, capfd: pytest.CaptureFixture[str]) -> Any:
    """`listed("order:")`: the lines that it prints."""

    def lines(*words: str) -> list[str]:
        assert run("list_locks", *words) == 0
        return capfd.readouterr().out.splitlines()

    return lines


@pytest.fixture
def document(run: Run, capfd: pytest.CaptureFixture[str]) -> Any:
    """`document("order:")`: what it prints as JSON."""

    def load(*words: str, status: int = 0) -> Any:
        assert run("list_locks", "--json", *words) == status
        return json.loads(capfd.readouterr().out)

    return load


class TestHolders:
    @pytest.mark.parametrize("alias", ["sqlite", "postgres", "mariadb", "advisory", "redis"])
    def test_they_are_listed_whatever_the_store(
        self, databases: None, listed: Any, document: Any, key: str, alias: str
    ) -> None:
        if alias == "redis":
            locks["redis"].quarantine(end=True)
        with db_lock(key, backend=alias, label="nightly", metadata={"run": 1}) as lease:
            head, line = listed(key, "--backend", alias)
            (one,) = document(key, "--backend", alias)["locks"]
        assert head.split("  ")[0] == "KEY"
        pattern = LINE.format(key=re.escape(key), alias=alias, mode="exclusive", label=r"nightly")
        assert re.fullmatch(pattern, line), line
        assert (one["key"], one["backends"]) == (key, [alias])
        holder = one["holder"]
        assert datetime.fromisoformat(holder.pop("since")) == lease.acquired_at
        assert 0 <= holder.pop("age") < 10
        assert 20 < holder.pop("remaining") <= 30
        assert holder == {
            "mode": "exclusive",
            "cooling_down": False,
            "owner_id": lease.owner_id,
            "fencing_token": lease.fencing_token,
            "host": host(),
            "pid": pid(),
            "thread": "MainThread",
            "label": "nightly",
            "metadata": {"run": 1},
        }

    def test_of_every_backend_by_the_order_of_their_keys(
        self, databases: None, listed: Any, key: str
    ) -> None:
        # Under this prefix nothing else is.
        with db_lock(f"{key}:b"), db_lock(f"{key}:a", f"{key}:c", backend="postgres"):
            aliases = ("--backend", "default", "--backend", "postgres", "--backend", "default")
            lines = [line.split()[:2] for line in listed(key, *aliases)[1:]]
        assert lines == [
            [f"{key}:a", "postgres"],
            [f"{key}:b", "default"],
            [f"{key}:c", "postgres"],
        ]

    def test_a_lease_is_told_once_by_aliases_that_share_its_store(
        self, databases: None, listed: Any, document: Any, key: str
    ) -> None:
        aliases = ("--backend", "sqlite", "--backend", "portable_sqlite")
        with db_lock(key, backend="sqlite"):
            (line,) = listed(key, *aliases)[1:]
            (one,) = document(key, *aliases)["locks"]
        assert "  sqlite, portable_sqlite  " in line
        assert one["backends"] == ["sqlite", "portable_sqlite"]

    def test_tree_keys_have_arrows_and_those_above_no_line(
        self, watched: None, listed: Any, document: Any
    ) -> None:
        with db_lock(("customer:7", "order:42", "line:1"), backend=ALIAS):
            (line,) = listed("customer:7")[1:]
            (one,) = document("customer:7")["locks"]
        assert line.startswith("customer:7 → order:42 → line:1  watched  exclusive ")
        assert one["key"] == ["customer:7", "order:42", "line:1"]

    def test_every_mode_is_named(self, watched: None, listed: Any) -> None:
        with db_lock("c", backend=ALIAS, min_hold=60):
            pass
        with (
            db_lock("a", backend=ALIAS, shared=True),
            db_lock("a", backend=ALIAS, shared=True),
            db_lock("b", backend=ALIAS, limit=2),
        ):
            lines = listed()[1:]
        found = [re.split(" {2,}", line) for line in lines]
        assert [(line[0], line[2]) for line in found] == [
            ("a", "shared"),
            ("a", "shared"),
            ("b", "permit"),
            ("c", "cooling down"),
        ]

    def test_no_more_than_asked_for(self, watched: None, listed: Any, document: Any) -> None:
        with db_lock("a", "b", "c", backend=ALIAS):
            lines = listed("--limit", "2", "--backend", ALIAS)
            assert [line[0] for line in lines[1:3]] == ["a", "b"]
            assert lines[3:] == ["watched: there are more than 2 (--limit lists more)."]
            assert document("--limit", "2")["more"] == [ALIAS]
            assert document("--limit", "3")["more"] == []

    def test_nothing(self, watched: None, listed: Any, document: Any) -> None:
        assert listed() == ["No lock is held."]
        assert document("--waiters") == {"locks": [], "circles": [], "errors": {}, "more": []}


class TestWaiters:
    def test_who_has_told_of_itself(self, watched: None, listed: Any, document: Any) -> None:
        with db_lock("a", backend=ALIAS), waiting_for("a", "b", label="billing") as name:
            lines = listed("--waiters", "--backend", ALIAS)
            (one, other) = document("--waiters")["locks"]
            plain = listed()
        assert [line[:2] for line in lines] == ["KE", "a ", "  ", "b "]
        assert re.fullmatch(
            rf"    waits: \S+ pid \d+ {name} \(billing\), exclusive, for \d\.\d s, "
            r"gives up in \d\d s, holds 'b' \(watched\)",
            lines[2],
        ), lines[2]
        assert not any("waits: " in line for line in plain)
        assert other["waiters"] == []
        (waiter,) = one["waiters"]
        assert waiter["holds"] == [{"backend": ALIAS, "key": "b"}]
        assert waiter["mode"] == "exclusive"
        since, gives_up = map(datetime.fromisoformat, (waiter["since"], waiter["gives_up"]))
        assert abs(gives_up - since - timedelta(seconds=20)) < timedelta(seconds=3)

    def test_who_waits_for_ever(self, watched: None, listed: Any, document: Any) -> None:
        with db_lock("a", backend=ALIAS), waiting_for("a", timeout=None, shared=True):
            line = listed("--waiters")[2]
            (one,) = document("--waiters")["locks"]
        assert re.search(r", shared, for \d\.\d s, for ever$", line), line
        assert one["waiters"][0]["gives_up"] is None

    def test_whom_only_the_stores_queue_knows(
        self, databases: None, document: Any, listed: Any, key: str
    ) -> None:
        queue = {**settings.DISTLOCKS["redis"], "HISTORY_DAYS": 0}
        with (
            override_settings(DISTLOCKS={"default": MEMORY, "queue": queue}),
            ThreadPoolExecutor(1, thread_name_prefix="behind") as pool,
        ):
            locks["queue"].quarantine(end=True)
            with db_lock(key, backend="queue"):
                waiting = pool.submit(db_lock(key, backend="queue").acquire)
                eventually(lambda: locks["queue"].waiters(key))
                line = listed(key, "--waiters")[2]
                (one,) = document(key, "--waiters")["locks"]
            waiting.result(10).release()
        assert re.fullmatch(r"    waits: \S+ pid \d+ behind_0, exclusive, for \d\.\d s", line), line
        (waiter,) = one["waiters"]
        assert waiter["thread"] == "behind_0"
        assert "gives_up" not in waiter

    def test_a_key_above_that_is_waited_for(self, watched: None, listed: Any) -> None:
        with db_lock(("a", "b"), backend=ALIAS), waiting_for("a"):
            lines = listed("--waiters")
        above, waiter, below = [re.split(" {2,}", line)[:3] for line in lines[1:]]
        assert above == ["a", "watched", "further down"]
        assert waiter[1].startswith("waits: ")
        assert below == ["a → b", "watched", "exclusive"]

    def test_a_key_that_has_no_holder_any_more(
        self, watched: None, listed: Any, document: Any
    ) -> None:
        row("one", "freed just now")
        row("two", "another")
        lines = listed("freed", "--waiters")
        assert re.split(" {2,}", lines[1]) == ["freed just now", "watched", "free"]
        assert lines[2].startswith("    waits: web-2 pid 7 thread-one, exclusive, for 1 m, ")
        (one,) = document("freed", "--waiters")["locks"]
        assert one["holder"] is None
        assert len(one["waiters"]) == 1

    def test_who_waits_for_each_other(self, watched: None, listed: Any, document: Any) -> None:
        a_circle()
        last = listed("--waiters")[-1]
        assert last.startswith("They wait for each other, and none can go on: web-2 pid 7 ")
        assert "waits for 'left' (watched) and holds 'right' (watched)" in last
        (circle,) = document("--waiters")["circles"]
        assert circle["owner_ids"] == ["one", "two"]
        assert "holds 'left'" in circle["description"]


class TestWhatDoesNotAnswer:
    def test_a_store(
        self, watched: None, run: Run, capfd: pytest.CaptureFixture[str], unreachable: Any
    ) -> None:
        wrong = {"BACKEND": "nowhere.Backend"}
        aliases = {"default": MEMORY, "down": unreachable, "wrong": wrong, ALIAS: MEMORY}
        with override_settings(DISTLOCKS=aliases), db_lock("a", backend=ALIAS):
            assert run("list_locks") == 1
            out, err = capfd.readouterr()
            assert run("list_locks", "--json") == 1
            document = json.loads(capfd.readouterr().out)
        assert out.splitlines()[1].startswith("a    watched")
        assert re.search(
            r"^down: The database 'nowhere' cannot be used for locks", err, re.MULTILINE
        ), err
        assert re.search(r"^wrong: .*cannot be imported", err, re.MULTILINE)
        assert err.splitlines()[-1] == "CommandError: Could not be asked: down, wrong."
        assert [one["key"] for one in document["locks"]] == ["a"]
        assert [*document["errors"]] == ["down", "wrong"]

    def test_the_database_of_the_history(
        self,
        watched: None,
        run: Run,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(database: str) -> None:
            raise OperationalError("It is being moved.")

        monkeypatch.setattr(listing, "told", fail)
        with db_lock("a", backend=ALIAS):
            assert run("list_locks", "--waiters") == 1
        out, err = capfd.readouterr()
        assert out.splitlines()[1].startswith("a    watched")
        assert err.splitlines()[0] == "who waits (default): It is being moved."

    def test_an_alias_that_is_none(self, watched: None) -> None:
        with pytest.raises(
            CommandError, match=r"no lock backend 'other'\. Configured are: watched"
        ):
            call_command("list_locks", "--backend", "other")
