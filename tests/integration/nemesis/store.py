"""The database with the accounts that locks of Redis protect, and the proof from it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from tests.integration.rig import checker
from tests.integration.rig.checker import Event, Report, Violation
from tests.integration.rig.store import PostgresStore, Store

ALIAS = "nemesis"


class GuardedStore(PostgresStore):
    """See PostgresStore: no locks are in it, and what changes an account also leaves a mark."""

    alias = ALIAS

    def now_us(self) -> int:
        """Of the servers that grant, which are on this machine."""
        return time.time_ns() // 1000

    def open_accounts(self, keys: Iterable[str]) -> None:
        Store.open_accounts(self, keys)

    def marks(self) -> dict[str, list[int]]:
        """By account, the tokens of what was committed, in the order of the commits."""
        found: dict[str, list[int]] = {}
        rows = self.execute("SELECT job, token FROM testapp_jobmark ORDER BY id")
        for key, token in rows:
            found.setdefault(key, []).append(token)
        return found

    def report(self, events: Sequence[Event]) -> Report:
        report = checker.check([e for e in events if e["event"] not in ("unavailable", "refused")])
        report.counts["unavailable"] = sum(e["event"] == "unavailable" for e in events)
        report.counts["refused"] = sum(e["event"] == "refused" for e in events)
        keys = {key for event in events if event["event"] == "grant" for key in event["tokens"]}
        marks = self.marks()
        for key, balance in self.execute("SELECT name, balance FROM testapp_account"):
            if key not in keys:
                continue
            tokens = marks.get(key, [])
            report.counts["committed"] += len(tokens)
            if len(tokens) != balance:
                report.violations.append(
                    Violation("lost update", key, f"{len(tokens)} commits, a balance of {balance}")
                )
            if tokens != sorted(tokens):
                report.violations.append(Violation("guard", key, f"not in order: {tokens}"))
        return report
