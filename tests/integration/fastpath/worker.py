"""What a process does that works under locks of a fast path."""

from __future__ import annotations

from typing import Any

from django.test import override_settings

from distlocks import Lease
from distlocks.backends.fastpath import changes
from tests.integration.fastpath import controls
from tests.integration.nemesis.worker import NemesisWorker
from tests.integration.rig.worker import Worker

# Seconds for which Redis must have been healthy, at the longest, before it grants again.
LONGEST_PATIENCE = 2.0


class FastWorker(NemesisWorker):
    """See NemesisWorker. Notes which store has granted each lock."""

    def __init__(self, name: str, plan: dict[str, Any], orders: int) -> None:
        override_settings(DISTLOCKS=plan["stores"]).enable()
        # Fault follows upon fault here.
        changes.LONGEST_PATIENCE = LONGEST_PATIENCE
        if broken := plan.get("broken"):
            getattr(controls, broken)()
        Worker.__init__(self, name, plan, orders)

    def note_grant(self, lease: Lease) -> None:
        super().note_grant(lease)
        self.journal.write("granted_by", store=lease._grant.store or "redis")
