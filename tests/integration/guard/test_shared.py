"""Guarded transactions under shared leases, tree keys and permits."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from django.db import connections

from distlocks import Lease, LeaseLost, LockTimeout, NotSupported, StaleToken, force_release
from distlocks.fences import sweep_guards
from distlocks.fencing import fenced_update
from tests.integration.guard.sites import MARIADB, POSTGRES, Site, configured, wait_for_a_waiter
from tests.testapp.models import Report

Start = Callable[..., Future[Any]]


@pytest.fixture
def hold(site: Site) -> Callable[..., Lease]:
    def hold(*keys: Any, **options: Any) -> Lease:
        return site.lock(*keys, renew=False, timeout=0, **options).acquire()

    return hold


def test_a_reader_enters_and_raises_nothing(
    site: Site, hold: Callable[..., Lease], key: str
) -> None:
    writer = hold(key)
    with writer.atomic(site.using):
        pass
    writer.release()
    reader = hold(key, shared=True)
    for _ in range(2):
        with reader.atomic(site.using):
            pass
    assert site.guard(key) == writer.fencing_token


def test_a_reader_that_lost_its_lease_is_refused_after_a_later_writer(
    site: Site, hold: Callable[..., Lease], key: str
) -> None:
    reader = hold(key, shared=True)
    with reader.atomic(site.using):
        pass
    reader.backend.force_release(key)
    with hold(key).atomic(site.using):
        pass
    with pytest.raises(StaleToken, match="later holder"), reader.atomic(site.using):
        raise AssertionError("the body ran")


def test_a_reader_whose_token_is_too_old_is_refused(
    site: Site, hold: Callable[..., Lease], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = hold(key, shared=True)
    monkeypatch.setattr("distlocks.fences.RETENTION_US", -60_000_000)
    with pytest.raises(StaleToken, match="30 days"), reader.atomic(site.using):
        raise AssertionError("the body ran")


def test_an_older_reader_is_not_refused_because_of_a_younger_one(
    site: Site, hold: Callable[..., Lease], key: str
) -> None:
    older, younger = hold(key, shared=True), hold(key, shared=True)
    for reader in (younger, older):
        with reader.atomic(site.using):
            pass


@pytest.mark.parametrize("using", [POSTGRES, MARIADB])
def test_readers_transactions_run_beside_each_other(
    production: None, start: Start, key: str, using: str
) -> None:
    site = Site(using, "memory")
    together = threading.Barrier(2)

    def read() -> None:
        with site.lock(key, shared=True) as lease, lease.atomic(using):
            together.wait(20)

    # The row of the guard is there: the first one makes it, and the next one waits for that.
    with site.lock(key, shared=True) as first, first.atomic(using):
        pass
    for reader in [start(read) for _ in range(2)]:
        reader.result(30)


@pytest.mark.parametrize("using", [POSTGRES, MARIADB])
def test_a_writer_waits_for_the_readers_that_are_in(
    production: None, start: Start, key: str, using: str
) -> None:
    """The lock was passed on while the reader's transaction was still open."""
    site = Site(using, "memory")
    site.open_account(key)

    def write() -> None:
        with site.lock(key) as lease, lease.atomic(using):
            site.deposit(key)

    reader = site.lock(key, shared=True).acquire()
    with reader.atomic(using):
        reader.backend.force_release(key)
        assert site.balance(key) == 0
        writer = start(write)
        wait_for_a_waiter(using)
        assert not writer.done()
        assert site.balance(key) == 0
    writer.result(20)
    assert site.balance(key) == 1


def test_a_tree_keys_holder_is_refused_after_the_root_was_had(
    site: Site, hold: Callable[..., Lease], key: str
) -> None:
    leaf = hold((key, "a"))
    with leaf.atomic(site.using):
        pass
    leaf.backend.force_release(key)
    root = hold(key)
    with root.atomic(site.using):
        pass
    with pytest.raises(StaleToken), leaf.atomic(site.using):
        raise AssertionError("the body ran")
    root.release()
    # Those who come after the root are let in, and do not raise its guard.
    leaf.release()
    with hold((key, "a")).atomic(site.using):
        pass
    assert site.guard(key) == root.fencing_token


def test_a_forced_release_of_the_root_refuses_those_below(
    site: Site, hold: Callable[..., Lease], key: str
) -> None:
    with configured(site.backend):
        leaf = hold((key, "a", "b"))
        force_release(key, backend=site.backend)
        with pytest.raises(StaleToken), leaf.atomic(site.using):
            raise AssertionError("the body ran")


def test_permits_enter_no_guard(site: Site, hold: Callable[..., Lease], key: str) -> None:
    permit = hold(key, limit=2)
    with pytest.raises(NotSupported, match="permits"), permit.atomic(site.using):
        raise AssertionError("the body ran")


@pytest.mark.parametrize("options", [{"shared": True}, {"limit": 2}])
def test_fenced_updates_are_for_exclusive_leases(
    database: Site, key: str, options: dict[str, Any]
) -> None:
    with (
        database.lock(key, **options) as lease,
        pytest.raises(NotSupported, match="exclusive"),
    ):
        fenced_update(lease, Report.objects.using(database.using), text="x")


@pytest.mark.parametrize("using", [POSTGRES, MARIADB])
def test_a_sweep_waits_for_no_reader(production: None, start: Start, key: str, using: str) -> None:
    site = Site(using, "memory")
    with site.lock(key, shared=True) as lease, lease.atomic(using):
        sweeping = start(lambda: sweep_guards(using, batch_size=100, dry_run=False))
        sweeping.result(20)
        assert site.guard(key) == 0


def test_the_first_reader_leaves_no_time_out_behind(production: None, key: str) -> None:
    site = Site(POSTGRES, "memory")
    with (
        site.lock(key, shared=True) as lease,
        lease.atomic(POSTGRES),
        connections[POSTGRES].cursor() as cursor,
    ):
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)


def test_a_first_reader_waits_for_a_first_writer_as_long_as_its_lease_lasts(
    production: None, start: Start, key: str
) -> None:
    site = Site(POSTGRES, "memory")

    def read() -> None:
        with site.lock(key, shared=True, ttl=1, renew=False) as lease, lease.atomic(POSTGRES):
            raise AssertionError("the body ran")

    writer = site.lock(key, renew=False).acquire()
    with writer.atomic(POSTGRES):
        writer.backend.force_release(key)
        reader = start(read)
        with pytest.raises((LockTimeout, LeaseLost)):
            reader.result(20)
