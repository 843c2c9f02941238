"""Workers on a topology, what befalls them, and what has to be found afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distlocks import locks
from distlocks.clock import lease_now
from tests.integration.nemesis.nemeses import Nemesis, wait_for
from tests.integration.nemesis.store import ALIAS
from tests.integration.nemesis.topologies import Five, Proxied, Topology
from tests.integration.rig.checker import Report
from tests.integration.rig.conductor import Rig
from tests.servers import processes
from tests.servers.proxy import FaultProxy
from tests.servers.redis import RedisServer

# Seconds in which, after all has healed, whoever waits has the lock, beside the longest lease.
GRACE = 5.0
# What the rig's checker says of killed holders holds only while the servers live.
EXCUSED = {"late takeover"}


class Scene:
    """One run on one topology."""

    def __init__(self, topology: Topology, rig: Rig, ttl: float) -> None:
        self.topology = topology
        self.rig = rig
        self.ttl = ttl
        self.runners: list[str] = []
        # The longest that anybody waited, after each time that things were as they should be again.
        self.gaps: list[float] = []
        self._holders: list[str] = []

    @property
    def backend(self) -> Any:
        return locks[ALIAS]

    @property
    def hash_name(self) -> bytes:
        """In which the first key is."""
        return self.backend.servers.hash_name(self.rig.keys[0])

    @property
    def server(self) -> RedisServer:
        """Which has the first key now."""
        return self.topology.primary_of(self.hash_name)

    @property
    def quorum(self) -> Five:
        assert isinstance(self.topology, Five)
        return self.topology

    @property
    def proxy(self) -> FaultProxy:
        assert isinstance(self.topology, Proxied)
        return self.topology.proxy

    # The workers

    def begin(self, runners: int) -> None:
        """Let workers run, and see that they get locks."""
        self.make_ready()
        self.runners = [self.rig.start("runner") for _ in range(runners)]
        if runners:
            self.await_grants(2)

    def make_ready(self) -> None:
        """Nobody has a lease here from before."""
        self.backend.quarantine(end=True)

    @property
    def bound(self) -> float:
        """Seconds in which, after all has healed, everybody who waits has a lock."""
        return self.backend.settings.quarantine + GRACE

    def replace(self, runner: str) -> None:
        """Another one for one that was killed."""
        self.runners[self.runners.index(runner)] = self.rig.start("runner")

    def await_grants(self, each: int) -> None:
        """Until every key has been granted that often from now on."""
        since = lease_now()

        def are_there() -> bool:
            new = [e for e in self.rig.events() if e["event"] == "grant" and e["at"] > since]
            return all(sum(key in e["tokens"] for e in new) >= each for key in self.rig.keys)

        assert processes.wait_until(are_there, 20, 0.02), "the workers get no locks"

    def await_waiter(self, key: str, pid: int) -> None:
        wait_for(lambda: any(waiter.pid == pid for waiter in self.backend.waiters(key)))

    def hold_across(self) -> None:
        """Have somebody hold the first key, until the lease ends by itself."""
        holder = self.rig.start("follower")
        self.rig.order(holder, "hold", key=self.rig.keys[0], ttl=self.ttl, renew=False)
        self.rig.hear(holder, "holding")
        self._holders.append(holder)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """While the runners do nothing."""
        pids = [self.rig.pid(runner) for runner in self.runners]
        for pid in pids:
            processes.freeze(pid)
        try:
            yield
        finally:
            for pid in pids:
                processes.thaw(pid)

    # The act

    def suffer(self, nemesis: Nemesis, *, holding: bool = True) -> float:
        """Let it happen while somebody holds a lease; then the longest that anybody waited after
        it had healed, newcomers on every key among them."""
        rig = self.rig
        if holding:
            self.hold_across()
        nemesis(self)
        healed = lease_now()
        bound = self.bound
        fresh = {key: rig.start("follower") for key in rig.keys}
        for key, name in fresh.items():
            rig.order(name, "inherit", key=key, ttl=self.ttl, timeout=bound)
        for key, name in fresh.items():
            granted = rig.hear(name, "asked")["granted"]
            assert granted, f"nobody new had {key} within {bound} s after {nemesis.__name__}"
            rig.order(name, "release")
        for name in (*fresh.values(), *self._holders):
            rig.hear(name, "released")
            rig.stop(name)
        self._holders.clear()
        gap = self.rig.longest_wait_since(healed)
        assert gap <= bound, f"somebody waited {gap:.1f} s after {nemesis.__name__}"
        self.gaps.append(gap)
        return gap

    # The end

    def finish(self) -> Report:
        """What is to be said of it all, once the workers have ended and all is swept."""
        self.rig.stop()
        report = self.rig.report()
        report.violations = [v for v in report.violations if v.rule not in EXCUSED]
        return report

    def check_nothing_is_left(self) -> None:
        """Leases of the killed have ended by themselves, and a sweep has cleared up."""
        remains: list[Any] = []

        def is_clean() -> bool:
            remains[:] = self.remains()
            return not remains

        assert processes.wait_until(is_clean, self.ttl + 2, 0.1), remains

    def remains(self) -> list[Any]:
        """After a sweep: what is still taken, waits or lies about for ever."""
        backend = self.backend
        for _ in backend.sweep(older_than=3600, batch_size=1000):
            pass
        found: list[Any] = list(backend.holders())
        if backend.supports_waiters:
            for key in self.rig.keys:
                found += backend.waiters(key)
        return found + self.topology.remains(backend)
