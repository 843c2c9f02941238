"""force_release(): the key is free, and its old holder can do no guarded harm any more."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connections, transaction
from django.test import override_settings

from distlocks import (
    DistlocksError,
    Lease,
    LeaseLost,
    NotSupported,
    StaleToken,
    db_lock,
    force_release,
    locks,
    signals,
)
from distlocks.checks import check_settings
from distlocks.models import LockGuard
from distlocks.testing import flush_events
from tests.integration.guard.sites import (
    DATABASES,
    DAY_US,
    MARIADB,
    POSTGRES,
    SQLITE,
    Site,
    configured,
    forged,
    now_us,
    wait_for,
    wait_for_a_waiter,
)
from tests.servers.base import free_port

AddAlias = Callable[..., str]
Start = Callable[..., Future[Any]]

STORES = [*DATABASES.values(), "portable_mariadb", "memory"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, production: None) -> Iterator[str]:
    """Each kind of store, with all databases among its GUARD_DATABASES."""
    with configured(request.param):
        yield request.param


@pytest.fixture
def hold(production: None) -> Iterator[Callable[..., Lease]]:
    """`hold(key, store)`: a lease; given back at the end."""
    held: list[Lease] = []

    def acquire(key: str, store: str, **options: Any) -> Lease:
        options.setdefault("timeout", 0)
        held.append(db_lock(key, backend=store, **options).acquire())
        return held[-1]

    yield acquire
    for lease in held:
        with suppress(DistlocksError):
            lease.release()
        # Its settings are in force no more, so nobody else knows of it.
        lease.backend.close()


class TestForceRelease:
    def test_it_frees_the_key_and_tells_who_had_it(
        self, store: str, hold: Callable[..., Lease], key: str
    ) -> None:
        lease = hold(key, store, label="nightly", metadata={"run": 1})
        (holder,) = force_release(key, backend=store)
        assert holder is not None
        assert (holder.key, holder.owner_id) == (key, lease.owner_id)
        assert (holder.label, holder.metadata) == ("nightly", {"run": 1})
        assert hold(key, store).fencing_token > lease.fencing_token

    def test_a_free_key_has_no_holder(self, store: str, key: str) -> None:
        assert force_release(key, backend=store) == []
        assert all(Site(using, store).guard(key) is None for using in DATABASES)

    def test_another_key_that_begins_the_same_is_left_alone(
        self, store: str, hold: Callable[..., Lease], key: str
    ) -> None:
        lease = hold(f"{key}:1", store)
        assert force_release(key, backend=store) == []
        assert Site(SQLITE, store).guard(f"{key}:1") is None
        lease.extend()

    def test_guarded_writes_of_the_old_holder_are_refused_everywhere(
        self, store: str, hold: Callable[..., Lease], key: str
    ) -> None:
        """Also where it had never been, also before the next holder comes."""
        lease = hold(key, store, renew=False)
        force_release(key, backend=store)
        for using in DATABASES:
            with pytest.raises(StaleToken), lease.atomic(using):
                pass

    def test_the_next_holder_enters_everywhere(
        self, store: str, hold: Callable[..., Lease], key: str
    ) -> None:
        hold(key, store, renew=False)
        force_release(key, backend=store)
        new = hold(key, store)
        for using in DATABASES:
            with new.atomic(using):
                pass

    def test_the_old_holders_release_does_not_touch_the_next(
        self, store: str, hold: Callable[..., Lease], key: str
    ) -> None:
        old = hold(key, store, renew=False)
        force_release(key, backend=store)
        new = hold(key, store)
        assert not old.release()
        new.extend()
        assert new.release()

    def test_the_old_holder_learns_of_it_by_its_renewal(
        self, store: str, hold: Callable[..., Lease], key: str
    ) -> None:
        told: list[Lease] = []
        lease = hold(key, store, on_lost=told.append)
        force_release(key, backend=store)
        with pytest.raises(LeaseLost, match="force-released"):
            lease.extend()
        assert lease.lost
        with pytest.raises(LeaseLost), lease.atomic():
            pass
        flush_events()
        assert told == [lease]

    def test_it_learns_of_it_by_itself(
        self, store: str, hold: Callable[..., Lease], key: str
    ) -> None:
        """A third of its ttl later, when the renewer extends it."""
        reasons: list[str] = []

        def hear(keys: tuple[str, ...], reason: str, **_: object) -> None:
            if key in keys:
                reasons.append(reason)

        signals.lease_lost.connect(hear)
        hold(key, store, ttl=1)
        force_release(key, backend=store)
        wait_for(lambda: bool(reasons))
        signals.lease_lost.disconnect(hear)
        assert "force-released" in reasons[0]

    def test_a_transaction_that_is_open_finishes_first(
        self, hold: Callable[..., Lease], key: str, start: Start
    ) -> None:
        for using in (POSTGRES, MARIADB):
            site = Site(using, "memory")
            site.open_account(key)
            with configured("memory", GUARD_DATABASES=[using]):
                lease = hold(key, "memory", renew=False)
                with lease.atomic(using):
                    releasing = start(lambda: force_release(key, backend="memory"))
                    wait_for_a_waiter(using)
                    assert not releasing.done()
                    site.deposit(key)
                assert [one.owner_id for one in releasing.result(20)] == [lease.owner_id]
                with pytest.raises(StaleToken), lease.atomic(using):
                    pass
            assert site.balance(key) == 1

    @pytest.mark.parametrize("order", ["before", "after"])
    def test_an_unreachable_guard_database_leaves_the_key_held(
        self, add_alias: AddAlias, hold: Callable[..., Lease], key: str, order: str
    ) -> None:
        gone = add_alias(POSTGRES, HOST="127.0.0.1", PORT=str(free_port()))
        databases = [gone, SQLITE] if order == "before" else [SQLITE, gone]
        with configured("memory", GUARD_DATABASES=databases):
            lease = hold(key, "memory")
            with pytest.raises(OperationalError):
                force_release(key, backend="memory")
            lease.extend()
            assert locks["memory"].holders(key)
        with configured("memory", GUARD_DATABASES=[SQLITE]):
            again = hold(key, "memory")  # the store was emptied with its settings
            (holder,) = force_release(key, backend="memory")
            assert holder is not None
            assert holder.owner_id == again.owner_id

    def test_a_database_without_the_table_leaves_the_key_held(
        self, add_alias: AddAlias, hold: Callable[..., Lease], key: str, tmp_path: Any
    ) -> None:
        bare = add_alias(SQLITE, NAME=str(tmp_path / "bare.sqlite3"))
        with configured("memory", GUARD_DATABASES=[bare]):
            lease = hold(key, "memory")
            with pytest.raises((DatabaseError, DistlocksError)):
                force_release(key, backend="memory")
            lease.extend()

    def test_no_guard_databases(self, hold: Callable[..., Lease], key: str) -> None:
        with configured("memory", GUARD_DATABASES=[]):
            hold(key, "memory")
            assert force_release(key, backend="memory")
        assert Site(SQLITE, "memory").guard(key) is None

    @pytest.mark.parametrize("store", [*DATABASES.values(), "memory"])
    def test_the_prefix_of_the_alias_counts(
        self, production: None, hold: Callable[..., Lease], key: str, store: str
    ) -> None:
        with configured(store, KEY_PREFIX="shop:"):
            lease = hold(key, store, renew=False)
            (holder,) = force_release(key, backend=store)
            assert holder is not None
            assert holder.key == key
            for using in DATABASES:
                assert Site(using, store).guard(f"shop:{key}") == lease.fencing_token + 1
                assert Site(using, store).guard(key) is None
                with pytest.raises(StaleToken), lease.atomic(using):
                    pass

    def test_a_key_that_cools_down_is_freed(
        self, store: str, hold: Callable[..., Lease], key: str
    ) -> None:
        """Its work is over: there is nobody to be refused."""
        hold(key, store, min_hold=30).release()
        (holder,) = force_release(key, backend=store)
        assert holder is not None
        assert holder.cooling_down
        assert all(Site(using, store).guard(key) is None for using in DATABASES)
        new = hold(key, store)
        for using in DATABASES:
            with new.atomic(using):
                pass

    def test_a_later_token_that_stands_there_already_stays(
        self, store: str, hold: Callable[..., Lease], key: str
    ) -> None:
        site = Site(POSTGRES, store)
        lease = hold(key, store)
        site.raise_guard(key, lease.fencing_token + 1_000_000)
        assert force_release(key, backend=store)
        assert site.guard(key) == lease.fencing_token + 1_000_000

    @pytest.mark.parametrize("bad", [b"bytes", "", "line\nbreak"])
    def test_a_key_that_is_none_is_refused(self, production: None, bad: Any) -> None:
        with pytest.raises((TypeError, ValueError)):
            force_release(bad)


class TestSweepingGuards:
    @pytest.fixture
    def guards(self, production: None, key: str) -> dict[str, int]:
        """Guard rows of several ages on every database: key → whether it may go."""
        ages = {"new": 0, "29 days": 29, "31 days": 31, "a year": 365}
        for using in DATABASES:
            LockGuard.objects.using(using).bulk_create(
                LockGuard(key=f"{key}:{name}", token=now_us() - days * DAY_US)
                for name, days in ages.items()
            )
        return ages

    def left(self, using: str, key: str) -> set[str]:
        rows = LockGuard.objects.using(using).filter(key__startswith=key)
        return {row.key.rpartition(":")[2] for row in rows}

    def test_only_rows_beyond_the_retention_go(
        self, guards: dict[str, int], key: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for store in ("sqlite", "memory"):
            with configured(store):
                call_command("sweep_locks", "--backend", store, "--batch-size", "1")
            for using in DATABASES:
                assert self.left(using, key) == {"new", "29 days"}
        assert re.search("guards on mariadb: deleted [1-9]", capsys.readouterr().out)

    def test_a_dry_run_changes_nothing(
        self, guards: dict[str, int], key: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with configured("memory"):
            call_command("sweep_locks", "--backend", "memory", "--dry-run")
        assert all(self.left(using, key) == set(guards) for using in DATABASES)
        assert re.search("guards on postgres: would delete [1-9]", capsys.readouterr().out)
        with configured("memory"):
            call_command("sweep_locks", "--backend", "memory", "--verbosity", "0")

    def test_an_open_guarded_transaction_is_not_waited_for(
        self, production: None, key: str, start: Start
    ) -> None:
        """On MariaDB, a DELETE of most of a small table would read, and wait for, all of it."""
        for using in (POSTGRES, MARIADB):
            guards = LockGuard.objects.using(using)
            guards.exclude(key__startswith=key).delete()
            guards.bulk_create(LockGuard(key=f"{key}:{i}", token=1) for i in range(30))
            with configured("memory", GUARD_DATABASES=[using]):

                def sweep() -> None:
                    call_command("sweep_locks", "--backend", "memory", "--verbosity", "0")

                with forged(f"{key}:open", token=now_us()).atomic(using):
                    start(sweep).result(20)
            assert self.left(using, key) == {"open"}

    def test_guards_of_other_databases_are_left_alone(
        self, guards: dict[str, int], key: str
    ) -> None:
        with configured("memory", GUARD_DATABASES=[POSTGRES]):
            call_command("sweep_locks", "--backend", "memory", "--verbosity", "0")
        assert self.left(POSTGRES, key) == {"new", "29 days"}
        assert self.left(MARIADB, key) == set(guards)
        with configured("memory"):
            call_command("sweep_locks", "--backend", "memory", "--verbosity", "0")

    def test_a_swept_guard_lets_nobody_in_whom_it_would_have_refused(
        self, production: None, key: str
    ) -> None:
        for using in DATABASES:
            site = Site(using, "memory")
            site.raise_guard(key, now_us() - 31 * DAY_US)
        with configured("memory"):
            call_command("sweep_locks", "--backend", "memory", "--verbosity", "0")
        for using in DATABASES:
            assert Site(using, "memory").guard(key) is None
            stale = forged(key, token=now_us() - 32 * DAY_US)
            with pytest.raises(StaleToken), stale.atomic(using):
                pass


class TestSetting:
    @pytest.mark.parametrize("value", ["default", {"default"}, 7, None, ["default", "nowhere"]])
    def test_what_is_no_list_of_databases_is_reported(self, value: Any) -> None:
        with override_settings(DISTLOCKS={"default": {"GUARD_DATABASES": value}}):
            assert [message.id for message in check_settings()] == ["distlocks.E017"]

    @pytest.mark.parametrize("value", [[], ["default"], ("default", "deferred")])
    def test_lists_of_databases_are_right(self, value: Any) -> None:
        entry = {"BACKEND": "distlocks.backends.memory.MemoryBackend", "GUARD_DATABASES": value}
        with override_settings(DISTLOCKS={"default": entry}):
            assert check_settings() == []
            assert locks["default"].params.guard_databases == tuple(value)

    def test_it_is_the_default_database_unless_said_otherwise(self) -> None:
        assert locks["memory"].params.guard_databases == ("default",)
        assert "default" in connections


def test_it_is_refused_inside_a_transaction_that_could_take_the_guard_back(
    databases: None, key: str
) -> None:
    lease = db_lock(key, backend="memory", renew=False).acquire()
    with transaction.atomic(), pytest.raises(NotSupported, match="non_atomic_requests"):
        force_release(key, backend="memory")
    lease.check()
    with lease.atomic():
        pass
    assert lease.release() is True
