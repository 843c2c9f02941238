"""What a process does that works under locks of Redis while the servers fail."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from django.db import DatabaseError, InterfaceError, connections
from django.test import override_settings

from distlocks import BackendUnavailable, DistlocksError, Lease, LeaseLost, LockTimeout, db_lock
from distlocks.clock import lease_now
from tests.integration.nemesis import controls
from tests.integration.rig.worker import Worker, say
from tests.testapp.models import Account, JobMark

# Seconds after which a server that did not answer is asked again.
RETRY = 0.05


class NemesisWorker(Worker):
    """See Worker. The locks are in Redis, the accounts in a database, changed behind its guard."""

    # Seconds for which it may wait; None is for ever.
    timeouts: Sequence[float | None] = (0, 0.5, 3, None)

    def __init__(self, name: str, plan: dict[str, Any], orders: int) -> None:
        override_settings(DISTLOCKS=plan["stores"]).enable()
        if fault := plan.get("fault"):
            getattr(controls, fault)()
        self.timeouts = plan.get("timeouts", self.timeouts)
        super().__init__(name, plan, orders)

    def server_us(self) -> int:
        """All servers are on this machine and have its clock."""
        return time.time_ns() // 1000

    def work(self) -> None:
        key = self.random.choice(self.keys)
        options = {
            "ttl": self.random.choice(self.ttls),
            "timeout": self.random.choice(self.timeouts),
            "renew": self.random.random() < 0.5,
        }
        try:
            with self.held([key], **options) as lease:
                if self.random.random() < 0.5:
                    self.change(lease, key)
                self.pause(0, 0.001, 0.005, 0.02)
        except LockTimeout:
            pass
        self.pause(0.001, 0.003, 0.01)

    def take(self, keys: Sequence[str], **options: Any) -> Lease | None:
        """See Worker.take(). Goes on asking while the servers do not answer."""
        self.journal.write("ask", keys=keys)
        timeout = options.pop("timeout")
        give_up = float("inf") if timeout is None else lease_now() + timeout
        lease = None
        while True:
            rest = None if timeout is None else max(give_up - lease_now(), 0.0)
            try:
                lease = db_lock(*keys, backend=self.alias, timeout=rest, **options).try_acquire()
                break
            except BackendUnavailable:
                self.journal.write("unavailable")
                if lease_now() >= give_up:
                    break
                time.sleep(RETRY)
        if lease is None:
            self.journal.write("denied", keys=keys)
        else:
            self.note_grant(lease)
        return lease

    def give_back(self, lease: Lease) -> bool:
        server_us, read_at = self.server_us(), lease_now()
        # As at the end of a `with` block: while the server does not answer, it is tried again.
        try:
            lease.finish(None)
            ours = True
        except LeaseLost:
            ours = False
        self.note_end(lease, server_us, read_at, ours)
        return ours

    def change(self, lease: Lease, key: str) -> None:
        """Read, change and write back behind the guard; what is committed is marked."""
        accounts = Account.objects.using(self.database)
        try:
            with lease.atomic(self.database):
                read = accounts.get(name=key).balance
                self.pause(0, 0, 0.002)
                accounts.filter(name=key).update(balance=read + 1)
                JobMark.objects.using(self.database).create(
                    job=key, token=lease.fencing_token, pid=os.getpid()
                )
        except (DistlocksError, DatabaseError, InterfaceError) as error:
            self.journal.write("refused", why=type(error).__name__)
            connections[self.database].close_if_unusable_or_obsolete()
        else:
            # Whatever became of the lease, the guard covers it.
            self.journal.write("changed", key=key, read=read, covered=True)

    def do_change_guarded(self, key: str, ttl: float) -> None:
        """Take the lock and change the account when told to; release."""
        lease = self.take([key], ttl=ttl, timeout=None, renew=True)
        assert lease is not None
        say(self.name, "holding")
        self.await_order("go")
        self.change(lease, key)
        ours = self.give_back(lease)
        say(self.name, "released", ours=ours)
