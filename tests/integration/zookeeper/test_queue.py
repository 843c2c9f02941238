"""Who waits is served first come, first served, and wakes nobody else."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from distlocks import Lease, LockTimeout
from distlocks.backends.zookeeper import acquiring, session, sweeping
from distlocks.claims import Denial, Grant
from tests.integration.contract.stores import ZOOKEEPER_STORES, Gate, for_stores
from tests.integration.contract.zookeeper_stores import ZooKeeperStore
from tests.waiting import eventually

Start = Callable[..., Future[Any]]
pytestmark = for_stores(ZOOKEEPER_STORES)


class TestOrder:
    def test_they_have_it_in_the_order_in_which_they_came(
        self, store: ZooKeeperStore, key: str, start: Start
    ) -> None:
        had: list[int] = []

        def work(number: int) -> None:
            with store.lock(key, timeout=30):
                had.append(number)

        first = store.hold(key)
        waiting = []
        for number in range(6):
            waiting.append(start(work, number))
            store.eventually_waiting(key, number + 1)
        first.release()
        for one in waiting:
            one.result(20)
        assert had == list(range(6))
        assert store.backend.waiters(key) == []

    def test_a_newcomer_does_not_go_before_them(self, store: ZooKeeperStore, key: str) -> None:
        reader = store.hold(key, shared=True)
        store.wait(key)
        with pytest.raises(LockTimeout, match="Others have waited for longer"):
            store.lock(key, shared=True, timeout=0).acquire()
        assert reader.release()

    def test_who_waits_is_shown(self, store: ZooKeeperStore, key: str) -> None:
        store.hold(key)
        request = store.wait(
            key, mode="shared", host="web-7", pid=4711, label="nightly", metadata={"run": 1}
        )
        (waiter,) = store.backend.waiters(key)
        assert (waiter.owner_id, waiter.key, waiter.mode) == (request.owner_id, key, "shared")
        assert (waiter.host, waiter.pid, waiter.label) == ("web-7", 4711, "nightly")
        assert waiter.metadata == {"run": 1}

    def test_a_request_sent_again_keeps_its_one_place(
        self, store: ZooKeeperStore, key: str
    ) -> None:
        store.hold(key)
        first = store.wait(key)
        store.wait(key)
        assert isinstance(store.backend.try_acquire(first), Denial)
        assert store.eventually_waiting(key, 2)[0] == first.owner_id

    def test_of_several_keys_it_waits_for_the_one_in_the_way(
        self, store: ZooKeeperStore, key: str
    ) -> None:
        """And keeps nobody from the others; else two could wait for each other."""
        a, b = f"{key}:a", f"{key}:b"
        first, second = store.hold(a), store.hold(b)
        request = store.wait(a, b)
        assert store.backend.waiters(b) == []
        first.release()
        assert isinstance(store.backend.try_acquire(request), Denial)
        assert store.backend.waiters(a) == []
        store.eventually_waiting(b, 1)
        assert store.hold(a).release()
        second.release()
        assert isinstance(store.backend.try_acquire(request), Grant)
        assert store.backend.waiters(b) == []


class TestWakeUps:
    def test_a_release_wakes_only_the_first(
        self, store: ZooKeeperStore, key: str, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = store.hold(key)
        waiting = []
        for number in range(8):
            waiting.append(start(store.lock(key, timeout=30).acquire))
            store.eventually_waiting(key, number + 1)
        tries: list[str] = []
        real = acquiring.attempt

        def counted(backend: Any, talk: Any, request: Any) -> Any:
            tries.append(request.owner_id)
            return real(backend, talk, request)

        # Until here all sleep, and look for themselves only after seconds.
        monkeypatch.setattr(acquiring, "attempt", counted)
        order = store.eventually_waiting(key, 8)
        held.release()
        lease = eventually(partial(_had_by, waiting, order[0]))
        assert set(tries) <= set(order[:2])
        lease.release()
        for owner_id in order[1:]:
            lease = eventually(partial(_had_by, waiting, owner_id))
            assert lease.release()

    def test_who_does_not_take_its_turn_is_passed(self, store: ZooKeeperStore, key: str) -> None:
        """It has died, and its session has not yet."""
        held = store.hold(key)
        dead = store.wait(key)
        held.release()
        lease = store.lock(key, timeout=10).acquire()
        assert lease.waited < 3
        assert dead.owner_id not in [waiter.owner_id for waiter in store.backend.waiters(key)]
        assert lease.release()


def _had_by(waiting: list[Future[Lease]], owner_id: str) -> Lease | None:
    """The lease of this owner id, once it has it."""
    done = [one.result() for one in waiting if one.done()]
    return next((lease for lease in done if lease.owner_id == owner_id), None)


class TestKeys:
    @pytest.mark.parametrize("name", [".", "..", "/", "a/b", "%2F", "a%", "zookeeper", "~", "…"])
    def test_any_name_is_one_key(self, store: ZooKeeperStore, name: str) -> None:
        lease = store.hold(name)
        assert store.owner(name) == lease.owner_id
        assert lease.release()
        assert store.is_free(name)


class TestSweep:
    def aged(self, store: ZooKeeperStore, *keys: str, seconds: float) -> None:
        store.set_clock_back(-seconds, *keys)

    def test_keys_that_nobody_has_used_for_long_are_deleted_and_no_others(
        self, store: ZooKeeperStore, key: str
    ) -> None:
        names = {name: f"{key}:{name}" for name in ("old", "new", "held", "waited for")}
        for name in names.values():
            store.hold(name).release()
        self.aged(store, names["old"], names["held"], names["waited for"], seconds=7200)
        held = store.hold(names["held"])
        rival = store.hold(names["waited for"])
        store.wait(names["waited for"])
        rival.release()
        self.aged(store, names["held"], names["waited for"], seconds=7200)
        for dry_run in (True, False):
            batches = list(store.backend.sweep(older_than=3600, batch_size=10, dry_run=dry_run))
            assert sum(batch.deleted for batch in batches) >= 1
        assert set(store._names(key)) == {names["new"], names["held"], names["waited for"]}
        assert store.owner(names["held"]) == held.owner_id
        assert held.release()

    def test_the_command_clears_what_was_left_behind(self, store: ZooKeeperStore, key: str) -> None:
        dead = store.grant(key, host="web-7", label="nightly")
        store.expire(key)
        output = StringIO()
        call_command("sweep_locks", "--backend", store.alias, stdout=output)
        assert key in output.getvalue()
        assert "nightly" in output.getvalue()
        assert store.with_client(lambda c: c.get_children(store.zookeeper.paths.key(key))) == []
        assert store.grant(key).fencing_tokens > dead.fencing_tokens

    @pytest.mark.parametrize("checked", [True, False])
    def test_a_key_that_is_deleted_and_made_again_is_not_the_key_that_was_seen(
        self,
        store: ZooKeeperStore,
        key: str,
        gate: Callable[..., Gate],
        start: Start,
        monkeypatch: pytest.MonkeyPatch,
        checked: bool,
    ) -> None:
        """Its node counts its changes from 0 again: what was decided before is void. Without the
        check of the root, two would have it."""
        root, really_check = store.zookeeper.paths.root, session.Transaction.check

        def check(changes: Any, path: str, version: int = -1) -> None:
            if path != root:
                really_check(changes, path, version)

        if not checked:
            monkeypatch.setattr(session.Transaction, "check", check)
        store.hold(key).release()
        self.aged(store, key, seconds=7200)
        between = gate(acquiring, "_grant")
        asking = start(store.lock(key, timeout=0).try_acquire)
        assert between.arrived.wait(10)
        list(store.backend.sweep(older_than=3600, batch_size=10))
        assert store._names(key) == []
        # As often as the first one was.
        store.hold(key).release()
        rival = store.hold(key)
        between.open()
        lease = asking.result(10)
        assert (lease is None) == checked
        owners = {holder.owner_id for holder in store.backend.holders(key)}
        assert owners == ({rival.owner_id} if lease is None else {rival.owner_id, lease.owner_id})
        if lease is not None:
            lease.release()

    def test_what_is_used_again_is_not_deleted(
        self, store: ZooKeeperStore, key: str, gate: Callable[..., Gate], start: Start
    ) -> None:
        store.hold(key).release()
        self.aged(store, key, seconds=7200)
        before = gate(sweeping, "_delete")
        sweep = start(lambda: list(store.backend.sweep(older_than=3600, batch_size=1000)))
        assert before.arrived.wait(10)
        lease = store.hold(key)
        before.open()
        sweep.result(10)
        assert store.owner(key) == lease.owner_id
        lease.extend()
        assert lease.release()
