"""The rig's processes. One child of the test has everything imported and forks the others.

It reads lines of JSON from the rig: `{"fork": name, "plan": …}`, `{"tell": name, "order": …}`.
What the workers say goes to its standard output, one line of JSON each.
"""

import atexit
import json
import os
import random
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.db import connections, transaction
from django.utils.module_loading import import_string

from distlocks import Lease, LeaseLost, LockTimeout, db_lock, locks
from distlocks.backends.database import mariadb, postgresql, sqlite
from distlocks.claims import EPOCH
from distlocks.clock import lease_now
from tests.integration.rig import controls
from tests.integration.rig.journal import Journal
from tests.testapp.models import Account

Order = dict[str, Any]
CLOCKS = {"postgresql": postgresql.US, "sqlite": sqlite.US, "mysql": mariadb.US}


class RigIsGone(BaseException):
    """Nobody is there any more to give orders."""


def serve() -> None:
    """Create the tables where they are missing, then fork workers until the input ends."""
    call_command("migrate", database="postgres", run_syncdb=True, verbosity=0)
    connections.close_all()
    say("", "ready")
    orders: dict[str, int] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if name := command.get("fork"):
            reading, orders[name] = os.pipe()
            if (pid := os.fork()) == 0:
                # Else the pipes of the others would stay open when their writer is gone.
                for writing in orders.values():
                    os.close(writing)
                _be_a_worker(name, command["plan"], reading)
            os.close(reading)
            say(name, "forked", pid=pid)
        elif name := command.get("tell"):
            try:
                os.write(orders[name], (json.dumps(command["order"]) + "\n").encode())
            except BrokenPipeError:
                say("", "gone", name=name)
        elif name := command.get("reap"):
            os.close(orders.pop(name))
            say(name, "reaped", status=os.waitpid(command["pid"], 0)[1])


def _be_a_worker(name: str, plan: dict[str, Any], reading: int) -> None:
    try:
        # Other rigs have workers of their own kind.
        kind: type[Worker] = import_string(plan.get("worker", f"{__name__}.Worker"))
        kind(name, plan, reading).run()
        # What happens when an interpreter ends, and nothing of what the server would do next.
        atexit._run_exitfuncs()
        os._exit(0)
    except RigIsGone:
        os._exit(1)
    except BaseException:
        say(name, "failed", error=traceback.format_exc())
        os._exit(1)


def say(who: str, word: str, **fields: Any) -> None:
    """Tell the rig. One write, so that the lines of several processes do not mix."""
    os.write(1, (json.dumps({"who": who, "word": word, **fields}) + "\n").encode())


class Worker:
    """One process that takes locks, of its own will and by order, and keeps a journal."""

    def __init__(self, name: str, plan: dict[str, Any], orders: int) -> None:
        self.name = name
        self.alias: str = plan["alias"]
        # Of the accounts: where the locks are, unless the rig says otherwise.
        self.database: str = plan.get("database") or locks[self.alias].using  # type: ignore[attr-defined]
        self.keys: list[str] = plan["keys"]
        self.ttls: list[float] = plan["ttls"]
        self.least: int = plan["least"]
        self.role: str = plan["role"]
        self.until_commit: bool = plan.get("until_commit", True)
        self.random = random.Random(plan["seed"])
        self.journal = Journal(Path(plan["folder"], f"{name}.jsonl"))
        self.grants = 0
        self._orders = orders
        self._heard = b""
        self._clock = CLOCKS[connections[self.database].vendor]
        # MariaDB's clock stands still in a statement, which may have begun while another still
        # held the key: no proof against a worker that does right.
        is_dated = connections[self.database].vendor != "mysql" or bool(plan.get("control"))
        self._dated = is_dated and plan.get("dated", True)
        if control := plan.get("control"):
            getattr(controls, control)()
        if plan.get("noting"):
            self._note_sleeps()

    def run(self) -> None:
        self.journal.write("started")
        getattr(self, f"be_{self.role}")()
        self.journal.write("stopped")
        say(self.name, "stopped")

    # The orders

    def next_order(self, wait: float | None = None) -> Order | None:
        """The next order; None when there is none within that time."""
        while b"\n" not in self._heard:
            if not select.select([self._orders], [], [], wait)[0]:
                return None
            if not (heard := os.read(self._orders, 65536)):
                raise RigIsGone
            self._heard += heard
        line, self._heard = self._heard.split(b"\n", 1)
        order: Order = json.loads(line)
        return order

    def await_order(self, do: str) -> Order:
        order = self.next_order()
        assert order is not None
        assert order["do"] == do, order
        return order

    # The roles

    def be_runner(self) -> None:
        """Work of its own will until told to stop, and carry out what else is ordered."""
        stopping = False
        while not stopping or self.grants < self.least:
            order = self.next_order(0)
            if order is None:
                self.work()
            elif order["do"] == "stop":
                stopping = True
            else:
                getattr(self, f"do_{order['do']}")(**order["with"])

    def be_follower(self) -> None:
        """Do nothing of its own will."""
        while (order := self.next_order()) and order["do"] != "stop":
            getattr(self, f"do_{order['do']}")(**order["with"])

    def be_sleeper(self) -> None:
        """Take and release locks that never expire meanwhile, and note each sleep beside one."""
        stopping = False
        while not stopping or self.grants < self.least:
            with self.held([self.random.choice(self.keys)], ttl=self.ttls[0], timeout=None):
                self.pause(0, 0, 0.001, 0.005, 0.02)
            self.pause(0, 0, 0.002, 0.03)
            order = self.next_order(0)
            stopping = stopping or order is not None

    def be_sweeper(self) -> None:
        """Sweep without a pause."""
        sweeps = 0
        while not self.next_order(0):
            sweeps += 1
            for _ in locks[self.alias].sweep(older_than=3600, batch_size=100):
                pass
        say(self.name, "swept", times=sweeps)

    def _note_sleeps(self) -> None:
        backend = locks[self.alias]
        wait = backend.wait

        def noted(denial: Any, until: float, attempt: int) -> None:
            since = self.server_us()
            wait(denial, until, attempt)
            self.journal.write("slept", key=denial.key, from_us=since, to_us=self.server_us())

        backend.wait = noted  # type: ignore[method-assign]

    # Work of its own will

    def work(self) -> None:
        several = len(self.keys) > 1 and self.random.random() < 0.15
        keys = self.random.sample(self.keys, 2 if several else 1)
        options = {
            "ttl": self.random.choice(self.ttls),
            "timeout": self.random.choice((0, 0.3, 1)),
            "renew": self.random.random() < 0.5,
        }
        try:
            if self.random.random() < 0.4:
                self.change_balances(keys, **options)
            else:
                with self.held(keys, **options):
                    self.pause(0, 0, 0.001, 0.005)
        except (LockTimeout, LeaseLost):
            pass
        self.pause(0, 0, 0.001, 0.003)

    def pause(self, *seconds: float) -> None:
        time.sleep(self.random.choice(seconds))

    @contextmanager
    def held(self, keys: Sequence[str], **options: Any) -> Iterator[Lease]:
        lease = self.take(keys, **options)
        if lease is None:
            raise LockTimeout
        try:
            yield lease
        finally:
            self.give_back(lease)

    def take(self, keys: Sequence[str], **options: Any) -> Lease | None:
        self.journal.write("ask", keys=keys)
        lease = db_lock(*keys, backend=self.alias, **options).try_acquire()
        if lease is None:
            self.journal.write("denied", keys=keys)
        else:
            self.note_grant(lease)
        return lease

    def note_grant(self, lease: Lease) -> None:
        self.grants += 1
        granted_us = (lease.acquired_at - EPOCH) // timedelta(microseconds=1)
        self.journal.write(
            "grant",
            tokens=lease.fencing_tokens,
            owner=lease.owner_id,
            granted_us=granted_us if self._dated else None,
            deadline=lease.deadline,
            ttl=lease.ttl,
        )

    def give_back(self, lease: Lease) -> bool:
        server_us, read_at = self.server_us(), lease_now()
        ours = lease.release()
        self.note_end(lease, server_us, read_at, ours)
        return ours

    def note_end(self, lease: Lease, server_us: int, read_at: float, ours: bool) -> None:
        self.journal.write(
            "end",
            keys=lease.keys,
            owner=lease.owner_id,
            server_us=server_us,
            read_at=read_at,
            released_us=self.server_us(),
            deadline=lease.deadline,
            ours=ours,
        )

    def server_us(self) -> int:
        """The server's clock, over a connection that is not the locks' own."""
        with connections[self.database].cursor() as cursor:
            cursor.execute(f"SELECT {self._clock}")
            return int(cursor.fetchone()[0])

    def change_balances(
        self,
        keys: Sequence[str],
        *,
        between: Callable[[], object] = lambda: None,
        before_commit: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        """Read, change and write back, in a transaction, under the lock."""
        if connections[self.database].vendor == "sqlite":
            # A transaction there is the whole database's only writer: nobody waits inside it.
            with self.held(keys, **options) as lease, transaction.atomic(self.database):
                changes = self._change(keys, between)
        else:
            # As in a view under ATOMIC_REQUESTS: the commit comes after the block.
            with transaction.atomic(self.database):
                lease, changes = self._change_inside(keys, between, options)
                before_commit()
        covered = lease_now() < lease.deadline
        for key, read in changes.items():
            self.journal.write("changed", key=key, read=read, covered=covered)

    def _change_inside(
        self, keys: Sequence[str], between: Callable[[], object], options: dict[str, Any]
    ) -> tuple[Lease, dict[str, int]]:
        self.journal.write("ask", keys=keys)
        lock = db_lock(*keys, backend=self.alias, until_commit=self.until_commit, **options)
        entered = False
        try:
            with lock as lease:
                entered = True
                self.note_grant(lease)
                changes = self._change(keys, between)
                server_us, read_at = self.server_us(), lease_now()
        except LeaseLost:
            # The block took longer than the lease: what it did is rolled back.
            self.note_end(lease, server_us, read_at, ours=False)
            raise
        finally:
            if not entered:
                self.journal.write("denied", keys=keys)
        self.note_end(lease, server_us, read_at, ours=True)
        return lease, changes

    def _change(self, keys: Sequence[str], between: Callable[[], object]) -> dict[str, int]:
        accounts = Account.objects.using(self.database)
        changes = {}
        for key in keys:
            changes[key] = accounts.get(name=key).balance
        between()
        for key, balance in changes.items():
            accounts.filter(name=key).update(balance=balance + 1)
        return changes

    # By order

    def do_hold(self, key: str, ttl: float, renew: bool, least: float = 0.0) -> None:
        """Take a lock, and release it by order, once it is lost, or after `least` seconds."""
        lease = self.take([key], ttl=ttl, renew=renew, timeout=None)
        assert lease is not None
        say(self.name, "holding", key=key)
        until = lease_now() + least if least else float("inf")
        while not lease.lost and lease_now() < until:
            if self.next_order(0.01):
                break
        ours = self.give_back(lease)
        say(self.name, "released", ours=ours)

    def do_inherit(self, key: str, ttl: float, timeout: float) -> None:
        """Wait for a lock whose holder has a fault, and keep it until told."""
        say(self.name, "asking")
        lease = self.take([key], ttl=ttl, timeout=timeout)
        say(self.name, "asked", granted=lease is not None)
        if lease is not None:
            self.await_order("release")
            ours = self.give_back(lease)
            say(self.name, "released", ours=ours)

    def do_change(self, key: str, ttl: float, timeout: float | None = 0) -> None:
        """Change a balance in a transaction, with a halt before the write and one before the
        commit."""

        def halt(word: str) -> None:
            say(self.name, word)
            self.await_order("go")

        try:
            self.change_balances(
                [key],
                between=lambda: halt("read"),
                before_commit=lambda: halt("left"),
                ttl=ttl,
                timeout=timeout,
            )
        except LockTimeout:
            say(self.name, "denied")
        else:
            say(self.name, "committed")

    def do_pass_through(self, key: str, ttl: float) -> None:
        """Have the row of a free key in the hands until told, then take and release the lock, and
        only then let the others see the row: who has come meanwhile has waited for it."""
        with transaction.atomic(self.database):
            controls.latch(connections[self.database], key)
            say(self.name, "latched")
            self.await_order("go")
            controls.grant_and_release(self, locks[self.alias], key, ttl)
        say(self.name, "passed")
