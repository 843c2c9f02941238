"""What a process does that works under locks of ZooKeeper while the servers fail."""

from __future__ import annotations

from typing import Any

from django.utils.module_loading import import_string

from tests.integration.nemesis.worker import NemesisWorker


class ZooKeeperWorker(NemesisWorker):
    """See NemesisWorker."""

    def __init__(self, name: str, plan: dict[str, Any], orders: int) -> None:
        if broken := plan.get("broken"):
            import_string(f"tests.integration.zookeeper.controls.{broken}")()
        super().__init__(name, plan, orders)
        # A grant is dated by what its process last heard of the servers' clock, a little late: no
        # proof against a worker that does right. The clock that the holders trust is.
        self._dated = False
