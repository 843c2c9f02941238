"""Statements and bytes, counted by the server."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from django.conf import settings
from django.db.backends.signals import connection_created

from distlocks import db_lock, locks
from tests.benchmarks import children
from tests.benchmarks.conftest import Counter, Stepper
from tests.servers import processes
from tests.servers.children import Spawner

Start = Callable[[], Stepper]
SIZE = "SELECT pg_table_size('distlocks_lock') + pg_indexes_size('distlocks_lock')"
SLEEPS = "SELECT count(*) FROM distlocks_lock WHERE waiting_until > 0"


class TestStatements:
    """Each is one round trip to PostgreSQL."""

    def test_an_uncontended_cycle_takes_two(self, counter: Counter, stepper: Start) -> None:
        step = stepper()
        step("cycles 1 key")
        counter.reset()
        step("cycles 100 key")
        assert len(statements_of_locks(counter)) == 200

    def test_several_keys_take_one_each_and_a_transaction(
        self, counter: Counter, stepper: Start
    ) -> None:
        step = stepper()
        step("cycles 1 a b c")
        counter.reset()
        step("cycles 10 a b c")
        assert len(statements_of_locks(counter)) <= 10 * (3 + 2 + 3)

    def test_a_denied_try_takes_one_and_writes_nothing(
        self, counter: Counter, stepper: Start
    ) -> None:
        holder, rival = stepper(), stepper()
        holder("hold key")
        rival("denied 1 key")
        counter.reset()
        # Whoever writes needs a transaction id.
        next_id = counter.ask("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
        rival("denied 100 key")
        assert len(statements_of_locks(counter)) == 100
        assert counter.ask("SELECT pg_snapshot_xmax(pg_current_snapshot())::text") == next_id
        holder("let key")

    def test_a_hand_over_takes_six(self, counter: Counter, stepper: Start) -> None:
        holder, waiter = stepper(), stepper()
        holder("hold key")
        # It polls until announcements are known to arrive.
        while not counter.ask(SLEEPS):
            waiter("wait_in_vain key")
        waiter("cycles 1 other")
        holder("let key")
        holder("hold key")
        counter.reset()
        waiter.begin("cycles 1 key")
        assert processes.wait_until(lambda: counter.ask(SLEEPS) == 1, 10)
        holder("let key")
        waiter.finish()
        # The waiter: try, mark, try again, release. The holder: release, tell. Where the machine is
        # slow, the waiter may have looked again after its longest sleep: try, mark.
        sent = statements_of_locks(counter)
        assert len(sent) in (6, 8, 10), "\n".join(sent)

    def test_leases_are_extended_together(self, counter: Counter, stepper: Start) -> None:
        step = stepper()
        step("cycles 1 key")
        counter.reset()
        step("renew 300 2")
        # Those that were taken within one tick of the renewer go together.
        assert len(statements_of_locks(counter)) < 2 * 300 + 300 // 4


def statements_of_locks(counter: Counter) -> list[str]:
    """Without the test's own, and without what is not sent each time: to prepare a statement, to
    test whether announcements arrive.
    """
    others = ("pg_snapshot", SLEEPS, "PREPARE ", "\x01")
    return [line for line in counter.statements() if not any(other in line for other in others)]


class TestSpace:
    """Rows are written in place: the table does not grow, and its index is not touched."""

    @pytest.mark.timeout(240)
    def test_twenty_thousand_cycles_over_a_hundred_keys(self, counter: Counter) -> None:
        def cycles(times: int) -> Any:
            # Two processes, with half of the keys each.
            started = [
                counter.spawn(children.hammer, "postgres", first, 50, times // 2)
                for first in (0, 50)
            ]
            for child in started:
                child.result(200)
            return counter.ask(SIZE)

        # Some slack for when a process stands still in mid-statement and the server has to keep
        # what it may still want to see. Without reuse it would be megabytes, each time anew.
        size = cycles(5_000)
        if size >= 200_000:
            counter.forget()
            size = cycles(5_000)
        assert size < 200_000
        assert cycles(15_000) < size + 50_000

        def updates() -> tuple[int, int]:
            row = counter.connection.execute(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
                "WHERE relname = 'distlocks_lock'"
            ).fetchone()
            assert row is not None
            return row

        # The server's processes tell what they have done when they end.
        assert processes.wait_until(lambda: updates()[0] >= 40_000 - 100, 10)
        in_all, in_place = updates()
        assert in_place >= 0.98 * in_all


class TestSQLite:
    def test_an_uncontended_cycle_takes_two_statements(self, databases: None, key: str) -> None:
        traced: list[str] = []

        def trace(connection: Any, **kwargs: object) -> None:
            connection.connection.set_trace_callback(traced.append)

        locks["sqlite"].close()
        connection_created.connect(trace)
        try:
            with db_lock(key, backend="sqlite"):
                pass
            traced.clear()
            for _ in range(10):
                with db_lock(key, backend="sqlite"):
                    pass
        finally:
            connection_created.disconnect(trace)
            locks["sqlite"].close()
        assert len(traced) == 20, traced

    def test_the_file_does_not_grow(self, databases: None, spawn: Spawner) -> None:
        def pages_after(times: int) -> int:
            spawn(children.hammer, "sqlite", 1000, 100, times).result()
            with closing(sqlite3.connect(settings.DATABASES["default"]["NAME"])) as connection:
                return int(connection.execute("PRAGMA page_count").fetchone()[0])

        pages = pages_after(100)
        assert pages_after(2_000) == pages
