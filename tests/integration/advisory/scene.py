"""Workers with advisory locks on a server of their own, and what befalls it and them.

What the locks protect is on the run's PostgreSQL, behind guards.
"""

from __future__ import annotations

import time
from typing import Any, cast

import psycopg
from django.db import connections

from distlocks import locks
from distlocks.backends.advisory import AdvisoryBackend
from tests.integration.nemesis.scene import GRACE, Scene
from tests.integration.nemesis.store import ALIAS
from tests.integration.nemesis.worker import NemesisWorker
from tests.integration.rig.checker import Report
from tests.servers import processes
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy

USING = "lock_server"
# Seconds for which the network is at fault.
FAULT = 0.8


class AdvisoryWorker(NemesisWorker):
    """See NemesisWorker. The locks are in another database, which the plan tells of."""

    def __init__(self, name: str, plan: dict[str, Any], orders: int) -> None:
        connections.databases[USING] = plan["lock_server"]
        super().__init__(name, plan, orders)


class AdvisoryTopology:
    """One server, with a proxy between it and the workers."""

    def __init__(self, server: PostgresServer, proxy: FaultProxy) -> None:
        self.server = server
        self.proxy = proxy

    def heal(self) -> None:
        self.proxy.mode = "pass"


class AdvisoryScene(Scene):
    """See Scene."""

    topology: AdvisoryTopology  # type: ignore[assignment]

    @property
    def backend(self) -> AdvisoryBackend:  # type: ignore[override]
        return cast(AdvisoryBackend, locks[ALIAS])

    @property
    def proxy(self) -> FaultProxy:
        return self.topology.proxy

    def make_ready(self) -> None:
        pass

    @property
    def bound(self) -> float:
        # After a restart, the leases from before are waited out.
        return self.ttl + GRACE

    def finish(self) -> Report:
        """Who is told that its session has ended has lost its lease before its time."""
        report = super().finish()
        report.violations = [v for v in report.violations if v.rule != "early loss"]
        return report

    def remains(self) -> list[Any]:
        for _ in self.backend.sweep(older_than=3600, batch_size=1000):
            pass
        found: list[Any] = list(self.backend.holders())
        with psycopg.connect(self.topology.server.url, autocommit=True) as connection:
            query = "SELECT pid, granted FROM pg_locks WHERE locktype = 'advisory'"
            return found + connection.execute(query).fetchall()


# What befalls the server


def server_restarted(scene: AdvisoryScene) -> None:
    scene.topology.server.kill()
    scene.topology.server.start()


def one_process_of_it_killed(scene: AdvisoryScene) -> None:
    """All sessions end with it."""
    with psycopg.connect(scene.topology.server.url, autocommit=True) as connection:
        query = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' LIMIT 1"
        row = connection.execute(query).fetchone()
    if row is not None:
        processes.kill(row[0])
    assert processes.wait_until(scene.topology.server.is_ready, 20)


# What befalls the network


def answers_dropped(scene: AdvisoryScene) -> None:
    scene.proxy.answers = "blackhole"
    time.sleep(FAULT)
    scene.proxy.mode = "pass"


def cut_off(scene: AdvisoryScene) -> None:
    """For longer than a lease: the server ends the sessions, and the holders know."""
    scene.proxy.mode = "blackhole"
    time.sleep(scene.ttl + FAULT)
    scene.proxy.mode = "pass"


def connections_cut(scene: AdvisoryScene) -> None:
    for _ in range(10):
        scene.proxy.cut()
        time.sleep(FAULT / 20)
    scene.proxy.mode = "reset"
    time.sleep(FAULT / 2)
    scene.proxy.mode = "pass"


# What befalls the workers


def holders_killed_and_paused(scene: AdvisoryScene) -> None:
    """Past their leases, renewed or not; others wait for their keys."""
    kinds = ("killed", "paused!", "paused")[: len(scene.rig.keys)]
    victims = scene.runners[: len(kinds)]
    scene.rig.faults(victims, scene.rig.keys, kinds)
    for victim, kind in zip(victims, kinds, strict=True):
        if kind.startswith("killed"):
            scene.replace(victim)
