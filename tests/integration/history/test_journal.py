"""What happens to locks is kept: what is ordinary as numbers, what is not as rows."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DataError, connections

from distlocks import Lease, LeaseLost, LockTimeout, db_lock, force_release, locks
from distlocks.history import journal as module
from distlocks.history import ledger, tables
from distlocks.history.journal import journal
from distlocks.history.rollups import Cells, Tally
from distlocks.models import LockEvent, LockRollup
from tests.integration.history.conftest import History
from tests.servers.children import Spawner
from tests.waiting import eventually


def in_thread(function: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(20)


def noted(kind: str) -> bool:
    """Whether such a fact is on the list."""
    return any(len(entry) == 2 and entry[1].kind == kind for entry in list(journal._entries))


class TestOrdinary:
    def test_an_uncontended_lock_is_only_counted(self, history: History, key: str) -> None:
        for number in range(3):
            with db_lock(f"{key}:{number}"):
                pass
        assert not LockEvent.objects.using(history.using).exists()
        for span in (60, 3600):
            for pattern in (module.pattern_of(f"{key}:1"), ""):
                counted = history.counted(pattern, span)
                assert counted["acquired"] == 3
                assert sum(counted[f"wait_{index}"] for index in range(18)) == 3
                assert sum(counted[f"hold_{index}"] for index in range(18)) == 3
                assert counted["hold_seconds"] > 0

    def test_a_template_is_the_pattern_of_its_keys(self, history: History, key: str) -> None:
        @db_lock(f"{key[:20]}:{{name}}")
        def work(name: str) -> None:
            """Under a lock of its own."""

        @db_lock(f"{key[:20]}:{{name}}", timeout=0)
        def waiting(name: str) -> None:
            """In vain."""

        for name in ("ann", "bob"):
            work(name)
            with db_lock(f"{key[:20]}:{name}"), pytest.raises(LockTimeout):
                in_thread(partial(waiting, name))
        counted = history.counted(f"{key[:20]}:*")
        assert (counted["acquired"], counted["contended"]) == (2, 2)

    def test_keys_of_several_patterns_are_one_lock(self, history: History, key: str) -> None:
        with db_lock(f"{key[:20]}:a", f"{key[:20]}:b"):
            pass
        assert history.counted("")["acquired"] == 1
        for name in "ab":
            assert history.counted(f"{key[:20]}:{name}")["acquired"] == 1

    def test_several_processes_add_up(self, history: History, key: str) -> None:
        """Threads stand for them: each writes what it has counted, over a connection of its own,
        in one moment."""
        together = threading.Barrier(4)

        def write(_: int) -> None:
            cells = Cells()
            for number in range(50):
                cells.granted("default", f"{key}:{number}", 1_800_000_000, Tally(0.0))
            together.wait(10)
            try:
                tables.add_up(history.using, cells.take())
            finally:
                connections.close_all()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        rows = LockRollup.objects.using(history.using).filter(began=1_800_000_000, span=3600)
        found = dict(rows.values_list("pattern", "acquired"))
        assert found.pop("") == 200
        assert set(found.values()) == {4}
        assert len(found) == 50

    def test_where_the_database_has_no_such_statement(
        self, history: History, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tables, "ON_CONFLICT", {})
        for _ in range(2):
            with db_lock(key):
                pass
            history.counted("")
        assert history.counted("")["acquired"] == 2


class TestContention:
    def test_who_waited_and_got_it_and_who_was_in_the_way(self, history: History, key: str) -> None:
        lease = db_lock(key, label="first", metadata={"task": "t1"}).acquire()
        with ThreadPoolExecutor(1, thread_name_prefix="second") as pool:
            waiter = pool.submit(db_lock(key, label="second", timeout=20).acquire)
            eventually(lambda: noted("contended"))
            lease.release()
            second = waiter.result(20)
        contended, acquired = history.events(key)
        assert (contended.kind, acquired.kind) == ("contended", "acquired")
        for event in (contended, acquired):
            assert event.backend == "default"
            assert event.label == "second"
            assert event.thread.startswith("second")
            assert event.owner_id == second.owner_id
            assert event.other["label"] == "first"
            assert event.other["metadata"] == {"task": "t1"}
            assert event.other["owner_id"] == lease.owner_id
        assert contended.waited is None
        assert acquired.waited == pytest.approx(second.waited)
        assert acquired.fencing_token == second.fencing_token
        second.release()
        counted = history.counted(module.pattern_of(key))
        assert (counted["contended"], counted["timed_out"], counted["acquired"]) == (1, 0, 2)

    def test_who_waited_in_vain(self, history: History, key: str) -> None:
        lease = db_lock(key).acquire()
        with pytest.raises(LockTimeout):
            in_thread(db_lock(key, timeout=0.05).acquire)
        lease.release()
        contended, timed_out = history.events(key)
        assert (contended.kind, timed_out.kind) == ("contended", "timed_out")
        assert timed_out.waited is not None
        assert timed_out.waited >= 0.05
        assert timed_out.other["owner_id"] == lease.owner_id

    def test_who_does_not_wait_is_one_row(self, history: History, key: str) -> None:
        lease = db_lock(key).acquire()
        assert db_lock(key, timeout=0).try_acquire() is None
        lease.release()
        assert history.kinds(key) == ["contended"]


class TestTrouble:
    def test_force_released(self, history: History, key: str) -> None:
        lease = db_lock(key, label="stuck").acquire()
        force_release(key, reason="it hangs", by="ann")
        with pytest.raises(LeaseLost):
            lease.extend()
        lease.release()
        forced, lost, late = history.events(key)
        assert [event.kind for event in (forced, lost, late)] == [
            "forced",
            "lost",
            "released_late",
        ]
        assert (forced.reason, forced.other["label"], forced.label) == ("it hangs", "ann", "stuck")
        assert forced.fencing_token == lost.fencing_token == lease.fencing_token
        assert lost.held is not None
        assert lost.label == late.label == "stuck"
        counted = history.counted(module.pattern_of(key))
        assert (counted["forced"], counted["lost"]) == (1, 1)

    def test_left_behind(self, history: History, key: str) -> None:
        lease = db_lock(key, ttl=1, renew=False, label="gone").acquire()
        lease.drop()
        backend = locks["default"]
        if history.alias == "default" and backend.supports_sweep:
            eventually(lambda: not backend.holders(key))
            call_command("sweep_locks", verbosity=0)
        else:
            db_lock(key).acquire().release()
        (event,) = history.events(key)
        assert event.kind in ("expired", "taken_over")
        assert event.label == "gone"
        assert history.counted(module.pattern_of(key))["expired"] == 1

    def test_a_lease_of_several_keys_is_lost_once(self, history: History, key: str) -> None:
        lease = db_lock(f"{key}:a", f"{key}:b").acquire()
        lease.lose("the test says so")
        lease.drop()
        assert history.kinds(f"{key}:a") == history.kinds(f"{key}:b") == ["lost"]
        assert history.counted("")["lost"] == 1

    def test_a_store_that_does_not_answer(
        self, history: History, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from distlocks import BackendUnavailable

        def refuse(request: Any) -> Any:
            raise BackendUnavailable("The store is down.")

        monkeypatch.setattr(locks["default"], "try_acquire", refuse)
        with pytest.raises(BackendUnavailable):
            db_lock(key).acquire()
        (event,) = history.events(key)
        assert (event.kind, event.reason) == ("error", "The store is down.")
        assert history.counted(module.pattern_of(key))["errors"] == 1


class TestUnkeepable:
    def test_a_reason_with_characters_that_no_table_keeps(self, history: History, key: str) -> None:
        db_lock(key).acquire()
        force_release(key, reason="bad \udcff\x00 bytes")
        (event,) = history.events(key, "forced")
        assert event.reason == "bad \\udcff\\x00 bytes"

    def test_one_that_cannot_be_written_keeps_no_other_from_it(
        self, history: History, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = tables.write_events

        def refuse(using: str, facts: Any) -> None:
            if any(fact.name.endswith("bad") for fact in facts):
                raise DataError("invalid byte sequence")
            write(using, facts)

        monkeypatch.setattr(tables, "write_events", refuse)
        for name in ("good", "bad", "fine"):
            lease = db_lock(f"{key}:{name}").acquire()
            force_release(f"{key}:{name}")
            lease.drop()
        kept = [history.kinds(f"{key}:{name}") for name in ("good", "bad", "fine")]
        assert kept == [["forced"], [], ["forced"]]
        assert history.counted("")["dropped"] == 1

    def test_where_users_commit_by_hand(self, history: History, key: str, spawn: Spawner) -> None:
        """The journal's connection commits, and holds no writer lock between two looks."""
        script = """
        from django.db import connections
        for alias in connections:
            connections[alias].settings_dict["AUTOCOMMIT"] = False
        from distlocks import db_lock
        held = db_lock(key).acquire()
        assert db_lock(key, timeout=0).try_acquire() is None
        print("done")
        input()
        """
        child = spawn(script, key=key, env={"DISTLOCKS_TEST_HISTORY": history.using})
        child.expect("done")
        eventually(lambda: history.kinds(key) == ["contended"])
        child.kill()


class TestTooMuch:
    def test_ordinary_events_beyond_what_fits_are_counted(
        self, history: History, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ledger, "MAX_ORDINARY", 3)
        lease = db_lock(key).acquire()
        for _ in range(5):
            assert db_lock(key, timeout=0).try_acquire() is None
        force_release(key)
        assert not lease.release()
        assert history.kinds(key).count("contended") == 3
        # What is out of the ordinary has room of its own.
        assert "forced" in history.kinds(key)
        counted = history.counted(module.pattern_of(key))
        assert (counted["contended"], counted["dropped"]) == (5, 2)

    def test_what_is_more_than_a_second_may_have(
        self, history: History, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ledger, "ORDINARY_AT_ONCE", 2)
        lease = db_lock(key).acquire()
        for _ in range(5):
            assert db_lock(key, timeout=0).try_acquire() is None
        lease.release()
        assert history.kinds(key) == ["contended"] * 2
        assert history.counted(module.pattern_of(key))["dropped"] == 3

    def test_a_list_that_nobody_looks_at(
        self, history: History, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_ENTRIES", 4)
        for _ in range(3):
            with db_lock(key):
                pass
        assert len(journal._entries) == 4
        counted = history.counted("")
        assert (counted["acquired"], counted["dropped"]) == (2, 2)


def test_nothing_is_kept_where_it_is_not_wanted(history: History, key: str, settings: Any) -> None:
    entry = {**settings.DISTLOCKS["default"], "HISTORY_DAYS": 0}
    settings.DISTLOCKS = {"default": entry}
    lease: Lease = db_lock(key).acquire()
    assert db_lock(key, timeout=0).try_acquire() is None
    lease.release()
    assert not journal._entries
    assert history.kinds(key) == []
