"""Workers on a fast path, what befalls its stores, and what has to be found afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distlocks.clock import lease_now
from tests.integration.nemesis.store import ALIAS, GuardedStore
from tests.integration.rig.checker import Event, Report
from tests.integration.rig.conductor import Rig
from tests.servers import processes
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer

# Seconds: of every lease here, and of the mode lease.
TTL, MODE_LEASE = 1.2, 1.0
SKEW, RETURN_AFTER = 0.3, 0.6
# How long nobody is granted anything after Redis has lost the authority.
DRAIN = (TTL + MODE_LEASE) * 1.02 + SKEW
# Seconds for a busy machine, beside that and the time until somebody notices.
GRACE = 2.0
# For what is known to come.
PATIENCE = 30.0
MICROSECOND = 1_000_000


class TwoStores(GuardedStore):
    """The database of a fast path, which holds the accounts too."""

    alias = ALIAS

    def authority(self) -> tuple[int, str, int]:
        """Epoch, phase, and since when (microseconds)."""
        rows = self.execute("SELECT epoch, phase, since FROM distlocks_lockauthority")
        return rows[0] if rows else (0, "", 0)

    def forget(self) -> None:
        """What an earlier scene has left."""
        self.execute("TRUNCATE distlocks_lockauthority, distlocks_lock, distlocks_lockholder")

    def reopened(self) -> None:
        """After the server was restarted."""
        import psycopg

        self._connection.close()
        self._connection = psycopg.connect(self._url, dbname=self._database, autocommit=True)

    def __init__(self, url: str, database: str) -> None:
        super().__init__(url, database)
        self._database = database

    def report(self, events: Sequence[Event]) -> Report:
        report = super().report([e for e in events if e["event"] != "granted_by"])
        for event in events:
            if event["event"] == "granted_by":
                report.counts[f"by {event['store']}"] += 1
        return report


@dataclass
class Stores:
    """What the fast path is made of, and what stands between it and Redis."""

    postgres: PostgresServer
    primary: RedisServer
    replica: RedisServer
    # One half of the workers goes through each.
    left: FaultProxy
    right: FaultProxy

    @property
    def proxies(self) -> tuple[FaultProxy, FaultProxy]:
        return self.left, self.right

    def lead_to(self, server: RedisServer, *proxies: FaultProxy) -> None:
        """Have what goes through these proxies arrive there from now on."""
        for proxy in proxies or self.proxies:
            proxy.target = server.host, server.port
            proxy.cut()

    def swap(self) -> None:
        """The replica, which has been promoted, is the primary from now on, and has a replica."""
        self.primary, self.replica = self.replica, self.primary
        self.replica.start()
        self.replica.replicate(self.primary)
        self.lead_to(self.primary)

    def heal(self) -> None:
        """Everything runs, and the primary is the first one again, with its replica."""
        self.postgres.start()
        for server in (self.primary, self.replica):
            server.start()
            server.promote()
            server.ask("FLUSHALL")
        self.replica.replicate(self.primary)
        assert processes.wait_until(self.replica.is_replica_in_sync, PATIENCE, 0.02)
        for proxy in self.proxies:
            proxy.mode = "pass"
        self.lead_to(self.primary)


class Scene:
    """One run."""

    def __init__(
        self, stores: Stores, store: TwoStores, rig: Rig, entries: Sequence[dict[str, object]]
    ) -> None:
        self.stores = stores
        # DISTLOCKS of who goes through the left proxy, and through the right one.
        self.entries = entries
        self.store = store
        self.rig = rig
        self.runners: list[str] = []
        # By what they are: the longest that anybody waited, and until somebody noticed.
        self.gaps: dict[str, float] = {}
        self._holders: list[str] = []

    # The workers

    def begin(self, runners: int) -> None:
        """Let workers run, half of them on each side, and see that Redis grants."""
        self.runners = [
            self.rig.start("runner", stores=self.entries[number % 2]) for number in range(runners)
        ]
        if runners:
            self.await_phase("redis")
            self.await_grants("redis")

    def await_phase(self, *phases: str) -> int:
        """Until the authority is in one of these phases; since when (microseconds)."""
        found: list[int] = []

        def is_there() -> bool:
            _, phase, since = self.store.authority()
            found[:] = [since]
            return phase in phases

        assert processes.wait_until(is_there, PATIENCE, 0.02), (
            self.store.execute("SELECT * FROM distlocks_lockauthority"),
            self.store.execute(f"SELECT * FROM distlocks_lock WHERE expires_at > {now_us()}"),
        )
        return found[0]

    def await_grants(self, by: str, keys: Iterable[str] = ()) -> None:
        """Until the store has granted each of the keys from now on."""
        since = lease_now()
        wanted = set(keys or self.rig.keys)

        def are_there() -> bool:
            granted: set[str] = set()
            last: dict[str, Event] = {}
            for event in self.rig.events():
                if event["event"] == "grant":
                    last[event["who"]] = event
                elif event["event"] == "granted_by" and event["store"] == by:
                    grant = last[event["who"]]
                    if grant["at"] > since:
                        granted |= set(grant["tokens"])
            return wanted <= granted

        assert processes.wait_until(are_there, PATIENCE, 0.05), f"nothing is granted by {by}"

    def await_outage(self) -> None:
        """Until somebody is told that no lock can be had, because nobody knows who grants."""
        since = lease_now()
        assert processes.wait_until(
            lambda: any(
                event["event"] == "unavailable" and event["at"] > since
                for event in self.rig.events()
            ),
            PATIENCE,
            0.05,
        ), "locks can be had"

    def replace(self, runner: str) -> None:
        """Another one for one that was killed."""
        self.runners[self.runners.index(runner)] = self.rig.start("runner")

    def hold_across(self) -> str:
        """Have somebody hold the first key, until the lease ends by itself."""
        holder = self.rig.start("follower")
        self.rig.order(holder, "hold", key=self.rig.keys[0], ttl=TTL, renew=False)
        self.rig.hear(holder, "holding")
        self._holders.append(holder)
        return holder

    # The act

    def change(self, name: str, began_us: int) -> None:
        """What happened at `began_us` takes the authority to the database, and everybody waits no
        longer than that has to last."""
        self.await_phase("db")
        self.await_grants("database")
        drained_us = self._drained_since(began_us)
        noticed = (drained_us - began_us) / MICROSECOND
        gap = self._longest_wait_since(began_us)
        self.gaps[name] = gap
        self.gaps[f"{name}, noticed"] = noticed
        assert gap <= noticed + DRAIN + GRACE, f"{gap:.1f} s, noticed after {noticed:.1f} s"

    def settle(self, name: str, began_us: int) -> None:
        """What happened has not changed the authority, or it has come back."""
        gap = self._longest_wait_since(began_us)
        self.gaps[name] = gap
        assert gap <= DRAIN + GRACE, f"{gap:.1f} s"

    def come_back(self) -> None:
        """The authority returns to Redis by itself."""
        began_us = now_us()
        self.await_phase("redis")
        self.await_grants("redis")
        gap = self._longest_wait_since(began_us)
        self.gaps["return"] = gap
        assert gap <= 2 * TTL + SKEW + GRACE, f"{gap:.1f} s on the way back"

    def _drained_since(self, began_us: int) -> int:
        """When the authority left Redis: what is told by the row is when it came to the database,
        which the drain had gone before."""
        _, phase, since = self.store.authority()
        assert phase == "db"
        return max(since - int(DRAIN * MICROSECOND), began_us)

    def _longest_wait_since(self, began_us: int) -> float:
        return self.rig.longest_wait_since(lease_now() - (now_us() - began_us) / MICROSECOND)

    # The end

    def finish(self) -> Report:
        """What is to be said of it all, once the workers have ended."""
        for holder in self._holders:
            self.rig.hear(holder, "released")
        self._holders.clear()
        self.rig.stop()
        report = self.rig.report()
        # What the checker says of killed holders holds only while the servers live.
        report.violations = [v for v in report.violations if v.rule != "late takeover"]
        return report


def now_us() -> int:
    """All servers are on this machine and have its clock."""
    return time.time_ns() // 1000
