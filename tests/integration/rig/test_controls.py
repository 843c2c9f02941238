"""Locks broken on purpose, which the rig and its checker must catch; and the real ones, in the same
interleavings, which they must not."""

from collections.abc import Callable

import pytest

from tests.integration.rig.conductor import WORKERS, Rig
from tests.servers import processes

STORES = ("sqlite", "postgres", "mariadb")
WITH_ROWS = ("postgres", "mariadb")
TTL = 1.0


@pytest.mark.parametrize("store", STORES)
def test_an_acquire_that_ignores_the_expiry_is_caught(
    make_rig: Callable[..., Rig], store: str
) -> None:
    rig = make_rig(store, control="ignores_expiry")
    holder, other = rig.start("follower"), rig.start("follower")
    rig.order(holder, "hold", key=rig.keys[0], ttl=20.0, renew=False)
    rig.hear(holder, "holding")

    rig.order(other, "inherit", key=rig.keys[0], ttl=20.0, timeout=0)
    assert rig.hear(other, "asked")["granted"]

    rig.order(other, "release")
    rig.hear(other, "released")
    rig.order(holder, "release")
    rig.hear(holder, "released")
    rig.stop()
    report = rig.report()
    assert {"exclusion", "early loss"} <= report.rules(), report
    if "grants in the log" in report.counts:
        assert any("in the log" in str(found) for found in report.violations), report


@pytest.mark.parametrize("store", STORES)
def test_an_acquire_that_ignores_the_expiry_is_caught_without_being_forced(
    make_rig: Callable[..., Rig], store: str
) -> None:
    rig = make_rig(store, control="ignores_expiry", least=10)
    for _ in range(WORKERS):
        rig.start("runner")
    rig.stop()
    report = rig.report()
    assert {"exclusion", "early loss"} <= report.rules(), report
    # On SQLite a transaction excludes all others by itself.
    assert store == "sqlite" or {"lost update", "token"} & report.rules(), report


@pytest.mark.parametrize("store", STORES)
def test_an_acquire_that_never_takes_over_is_caught(
    make_rig: Callable[..., Rig], store: str
) -> None:
    rig = make_rig(store, control="never_takes_over")
    holder, heir = rig.start("follower"), rig.start("follower")
    rig.order(holder, "hold", key=rig.keys[0], ttl=TTL, renew=True)
    rig.hear(holder, "holding")
    rig.order(heir, "inherit", key=rig.keys[0], ttl=TTL, timeout=TTL + 1.2)
    rig.hear(heir, "asking")
    rig.kill(holder)
    assert not rig.hear(heir, "asked")["granted"]
    rig.stop()
    assert rig.report().rules() == {"late takeover"}


@pytest.mark.parametrize("store", WITH_ROWS)
@pytest.mark.parametrize("control", [None, "values_from_before_the_wait"])
def test_values_from_before_a_wait_for_the_row_are_caught(
    make_rig: Callable[..., Rig], control: str | None, store: str
) -> None:
    rig = make_rig(store)
    key = rig.keys[0]
    first, waiter = rig.start("follower"), rig.start("follower", control=control)
    rig.order(first, "hold", key=key, ttl=TTL, renew=False, least=0.001)
    rig.hear(first, "released")

    # The first has the free row in its hands, the waiter comes and waits for it, and only then
    # does the first take and release the lock and let go of the row.
    rig.order(first, "pass_through", key=key, ttl=TTL)
    rig.hear(first, "latched")
    rig.order(waiter, "hold", key=key, ttl=TTL, renew=False, least=0.001)
    assert processes.wait_until(rig.store.waits_for_row, 10)
    rig.order(first, "go")
    rig.hear(first, "passed")
    rig.hear(waiter, "released")

    rig.stop()
    report = rig.report()
    assert report.counts["grants"] == 3
    if control is None:
        assert not report.violations, report
    else:
        assert {"token", "exclusion"} <= report.rules(), report
        if "grants in the log" in report.counts:
            assert any("in the log" in str(found) for found in report.violations), report


@pytest.mark.parametrize("store", WITH_ROWS)
@pytest.mark.parametrize("until_commit", [True, False])
def test_a_release_before_the_commit_is_caught(
    make_rig: Callable[..., Rig], until_commit: bool, store: str
) -> None:
    rig = make_rig(store, until_commit=until_commit)
    first, second = rig.start("follower"), rig.start("follower")
    change = {"key": rig.keys[0], "ttl": 20.0}

    # The first has left its block and not yet committed when the second comes.
    rig.order(first, "change", **change)
    rig.hear(first, "read")
    rig.order(first, "go")
    rig.hear(first, "left")
    rig.order(second, "change", **change)
    said = rig.hear(second, "read", "denied")["word"]
    assert said == ("denied" if until_commit else "read")
    rig.order(first, "go")
    rig.hear(first, "committed")
    if said == "denied":
        # Now it is the second one's turn.
        rig.order(second, "change", timeout=None, **change)
        rig.hear(second, "read")
    rig.order(second, "go")
    rig.hear(second, "left")
    rig.order(second, "go")
    rig.hear(second, "committed")

    rig.stop()
    report = rig.report()
    assert report.counts["updates"] == 2
    assert report.rules() == (set() if until_commit else {"lost update"}), report


def test_a_release_that_tells_nobody_is_caught(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("postgres", control="tells_nobody", ttls=[20.0])
    holder, sleeper = rig.start("follower"), rig.start("follower", noting=True)
    rig.order(holder, "hold", key=rig.keys[0], ttl=20.0, renew=False)
    rig.hear(holder, "holding")
    # Who waits for the first time in its process polls until announcements are known to arrive.
    rig.order(sleeper, "inherit", key=rig.keys[0], ttl=20.0, timeout=0.3)
    assert not rig.hear(sleeper, "asked")["granted"]
    rig.order(sleeper, "inherit", key=rig.keys[0], ttl=20.0, timeout=10)
    assert processes.wait_until(lambda: rig.store.has_sleeper(rig.keys[0]), 10)
    rig.order(holder, "release")
    rig.hear(holder, "released")
    assert rig.hear(sleeper, "asked")["granted"]
    rig.order(sleeper, "release")
    rig.stop()
    report = rig.report()
    assert report.rules() == {"late wake-up"}, report
