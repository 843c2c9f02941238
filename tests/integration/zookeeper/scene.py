"""Workers on an ensemble, what befalls it, and what has to be found afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from distlocks import locks
from distlocks.backends.zookeeper import ZooKeeperBackend
from tests.integration.nemesis import scene
from tests.integration.nemesis.store import ALIAS
from tests.integration.rig.checker import Report
from tests.integration.rig.conductor import Rig
from tests.servers.proxy import FaultProxy
from tests.servers.zookeeper import ZooKeeperEnsemble

# What the rig's checker says of killed holders holds only while the servers live; and a session
# that dies takes its leases along before their deadlines.
EXCUSED = {"late takeover", "early loss"}


class Cut:
    """An ensemble, and a way to it for some clients that can be cut."""

    def __init__(self, ensemble: ZooKeeperEnsemble) -> None:
        self.ensemble = ensemble
        self._open = ExitStack()
        self.proxies = [
            self._open.enter_context(FaultProxy(member.host, member.port))
            for member in ensemble.members
        ]

    @property
    def addresses(self) -> str:
        return ",".join(f"{proxy.host}:{proxy.port}" for proxy in self.proxies)

    def set(self, mode: Any) -> None:
        for proxy in self.proxies:
            proxy.mode = mode

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Nothing gets through, in either direction, and what was on its way is lost."""
        self.set("blackhole")
        try:
            yield
        finally:
            for proxy in self.proxies:
                proxy.cut()
            self.set("pass")

    def heal(self) -> None:
        self.set("pass")
        self.ensemble.start()

    def close(self) -> None:
        self._open.close()


class Scene(scene.Scene):
    """One run on an ensemble. Every other runner goes by the way that can be cut."""

    def __init__(
        self, cut: Cut, rig: Rig, ttl: float, behind: Callable[[], dict[str, Any]]
    ) -> None:
        super().__init__(cut, rig, ttl)  # type: ignore[arg-type]
        self.cut = cut
        self._behind = behind

    @property
    def ensemble(self) -> ZooKeeperEnsemble:
        return self.cut.ensemble

    @property
    def backend(self) -> Any:
        found = locks[ALIAS]
        assert isinstance(found, ZooKeeperBackend)
        return found

    @property
    def bound(self) -> float:
        """Seconds in which, after all has healed, whoever waits has the lock."""
        return self.ttl + scene.GRACE

    def begin(self, runners: int) -> None:
        for number in range(runners):
            plan = self._behind() if number % 2 else {}
            self.runners.append(self.rig.start("runner", **plan))
        if runners:
            self.await_grants(2)

    def hold_across(self) -> None:
        """Have two hold a key each until the lease ends by itself, one of them where it can be cut
        off."""
        for key, plan in zip(self.rig.keys, ({}, self._behind()), strict=False):
            holder = self.rig.start("follower", **plan)
            self.rig.order(holder, "hold", key=key, ttl=self.ttl, renew=False)
            self.rig.hear(holder, "holding")
            self._holders.append(holder)

    def finish(self) -> Report:
        report = super().finish()
        report.violations = [v for v in report.violations if v.rule not in EXCUSED]
        return report

    def remains(self) -> list[Any]:
        backend = self.backend
        for _ in backend.sweep(older_than=3600, batch_size=1000):
            pass
        found: list[Any] = list(backend.holders())
        for key in self.rig.keys:
            found += backend.waiters(key)
        return found
