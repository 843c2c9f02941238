"""Locks in memory, on a clock that only the test moves."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.test import override_settings

from distlocks import LockTimeout, db_lock, locks
from distlocks.backends.base import BaseBackend
from distlocks.claims import Denial, Extension, Grant, Request, claims_on, from_us
from distlocks.testing import FakeClock, fake_clock, memory_locks

SECOND = 1_000_000


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    with memory_locks(), fake_clock() as clock:
        yield clock


@pytest.fixture
def backend(clock: FakeClock) -> BaseBackend:
    return locks["default"]


def ask(*keys: str, owner: str = "one", ttl: int = 30, min_hold: int = 0) -> Request:
    return Request(
        claims=claims_on(keys),
        owner_id=owner,
        ttl_us=ttl * SECOND,
        min_hold_us=min_hold * SECOND,
        host="here",
    )


def granted(backend: BaseBackend, request: Request) -> Grant:
    answer = backend.try_acquire(request)
    assert isinstance(answer, Grant)
    return answer


def denied(backend: BaseBackend, request: Request) -> Denial:
    answer = backend.try_acquire(request)
    assert isinstance(answer, Denial)
    return answer


def test_a_key_is_its_holders_until_the_lease_ends(backend: BaseBackend, clock: FakeClock) -> None:
    granted(backend, ask("a"))
    clock.advance(29.999)
    denial = denied(backend, ask("a", owner="two"))
    assert denial.key == "a"
    assert denial.remaining == pytest.approx(0.001, abs=1e-5)
    (holder,) = denial.holders
    assert (holder.owner_id, holder.host) == ("one", "here")
    clock.advance(0.001)
    granted(backend, ask("a", owner="two"))


def test_a_grant_carries_the_moment_and_its_token_the_time(
    backend: BaseBackend, clock: FakeClock
) -> None:
    grant = granted(backend, ask("a"))
    assert grant.acquired_us == clock.wall_us()
    assert grant.fencing_tokens == (clock.wall_us(),)
    assert not grant.in_transaction


def test_tokens_grow_even_if_the_clock_stands_still(backend: BaseBackend) -> None:
    tokens = []
    for owner in ("one", "two", "three"):
        grant = granted(backend, ask("a", owner=owner))
        tokens += grant.fencing_tokens
        assert backend.release(grant)
    assert tokens == [tokens[0], tokens[0] + 1, tokens[0] + 2]


def test_a_request_sent_again_gets_the_same_grant_and_a_fresh_lease(
    backend: BaseBackend, clock: FakeClock
) -> None:
    first = granted(backend, ask("a"))
    clock.advance(20)
    again = granted(backend, ask("a"))
    assert again.fencing_tokens == first.fencing_tokens
    assert again.acquired_us == first.acquired_us
    clock.advance(20)
    denied(backend, ask("a", owner="two"))


def test_an_owner_that_comes_back_after_its_lease_is_a_new_holder(
    backend: BaseBackend, clock: FakeClock
) -> None:
    first = granted(backend, ask("a"))
    clock.advance(31)
    again = granted(backend, ask("a"))
    assert again.fencing_tokens[0] > first.fencing_tokens[0]


def test_several_keys_are_had_together_or_not_at_all(backend: BaseBackend) -> None:
    granted(backend, ask("b"))
    denial = denied(backend, ask("a", "b", "c", owner="two"))
    assert denial.key == "b"
    assert [holder.key for holder in backend.holders()] == ["b"]
    granted(backend, ask("a", "c", owner="two"))


def test_a_release_frees_only_what_is_still_the_owners(
    backend: BaseBackend, clock: FakeClock
) -> None:
    old = granted(backend, ask("a", "b"))
    clock.advance(31)
    new = granted(backend, ask("b", owner="two"))
    assert backend.release(old) is False
    assert [(holder.key, holder.owner_id) for holder in backend.holders()] == [("b", "two")]
    assert backend.release(new) is True
    assert backend.holders() == []


def test_a_release_sent_twice_says_the_same_until_the_key_is_anothers(
    backend: BaseBackend, clock: FakeClock
) -> None:
    grant = granted(backend, ask("a"))
    assert [backend.release(grant), backend.release(grant)] == [True, True]
    granted(backend, ask("a", owner="two"))
    assert backend.release(grant) is False
    assert [holder.owner_id for holder in backend.holders()] == ["two"]


def test_a_sweep_takes_an_expired_lease_from_its_holder(
    backend: BaseBackend, clock: FakeClock
) -> None:
    grant = granted(backend, ask("a"))
    clock.advance(31)
    list(backend.sweep(older_than=3600, batch_size=100))
    assert backend.release(grant) is False
    assert granted(backend, ask("a", owner="two")).fencing_tokens > grant.fencing_tokens


def test_an_expired_lease_that_nobody_took_is_still_given_back(
    backend: BaseBackend, clock: FakeClock
) -> None:
    grant = granted(backend, ask("a"))
    clock.advance(31)
    assert backend.release(grant) is True


def test_an_extension_replaces_what_is_left(backend: BaseBackend, clock: FakeClock) -> None:
    grant = granted(backend, ask("a", ttl=30))
    for _ in range(10):
        answer = backend.extend([Extension(grant=grant, ttl_us=5 * SECOND)])
        assert (answer.extended, answer.lost) == ({"one"}, set())
    (holder,) = backend.holders()
    assert holder.remaining == pytest.approx(5)
    clock.advance(5)
    assert backend.extend([Extension(grant=grant, ttl_us=SECOND)]).lost == {"one"}


def test_one_lost_lease_does_not_spoil_the_batch(backend: BaseBackend, clock: FakeClock) -> None:
    grants = [granted(backend, ask(key, owner=key)) for key in ("a", "b", "c")]
    backend.force_release("b")
    granted(backend, ask("b", owner="two"))
    answer = backend.extend([Extension(grant=grant, ttl_us=60 * SECOND) for grant in grants])
    assert (answer.extended, answer.lost) == ({"a", "c"}, {"b"})
    assert {holder.key: round(holder.remaining) for holder in backend.holders()} == {
        "a": 60,
        "b": 30,
        "c": 60,
    }


def test_a_lease_with_one_key_lost_is_lost_as_a_whole(
    backend: BaseBackend, clock: FakeClock
) -> None:
    grant = granted(backend, ask("a", "b"))
    backend.force_release("a")
    answer = backend.extend([Extension(grant=grant, ttl_us=60 * SECOND)])
    assert (answer.extended, answer.lost) == (set(), {"one"})
    (holder,) = backend.holders()
    assert (holder.key, holder.remaining) == ("b", pytest.approx(30))


@pytest.mark.parametrize("give_back_after", [0, 3, 9.999])
def test_the_minimum_hold_keeps_the_key_taken_after_the_release(
    backend: BaseBackend, clock: FakeClock, give_back_after: float
) -> None:
    grant = granted(backend, ask("a", min_hold=10))
    clock.advance(give_back_after)
    assert backend.release(grant) is True
    denial = denied(backend, ask("a", owner="two"))
    (holder,) = denial.holders
    assert holder.cooling_down
    assert denial.remaining == pytest.approx(10 - give_back_after)
    # Nor can the one who had it come back sooner.
    denied(backend, ask("a", owner="one"))
    clock.advance(10 - give_back_after)
    granted(backend, ask("a", owner="two"))


def test_after_the_minimum_hold_a_release_frees_at_once(
    backend: BaseBackend, clock: FakeClock
) -> None:
    grant = granted(backend, ask("a", min_hold=10))
    clock.advance(10)
    backend.release(grant)
    granted(backend, ask("a", owner="two"))


def test_a_minimum_hold_longer_than_the_lease_outlives_a_dead_holder(
    backend: BaseBackend, clock: FakeClock
) -> None:
    granted(backend, ask("a", ttl=5, min_hold=60))
    clock.advance(59)
    denied(backend, ask("a", owner="two"))
    clock.advance(1)
    granted(backend, ask("a", owner="two"))


def test_what_was_abandoned_is_free_at_once(backend: BaseBackend) -> None:
    request = ask("a", "b", min_hold=10)
    granted(backend, request)
    backend.abandon(ask("a", "b", owner="two"))
    assert len(backend.holders()) == 2
    backend.abandon(request)
    assert backend.holders() == []
    backend.abandon(request)


def test_holders_are_found_by_prefix_in_the_order_of_keys(backend: BaseBackend) -> None:
    for key in ("order:2", "order:10", "Order:1", "stock", "order%"):
        granted(backend, ask(key, owner=key))
    assert [holder.key for holder in backend.holders("order")] == ["order%", "order:10", "order:2"]
    assert [holder.key for holder in backend.holders("order:")] == ["order:10", "order:2"]
    assert [holder.key for holder in backend.holders(limit=2)] == ["Order:1", "order%"]
    assert backend.holders("x") == []


def test_a_forced_release_frees_and_tells_who_had_it(
    backend: BaseBackend, clock: FakeClock
) -> None:
    old = granted(backend, ask("a", min_hold=10))
    (holder,) = backend.force_release("a")
    assert (holder.key, holder.owner_id) == ("a", "one")
    assert backend.force_release("a") == []
    assert backend.force_release("never taken") == []
    new = granted(backend, ask("a", owner="two"))
    assert new.fencing_tokens > old.fencing_tokens
    assert backend.release(old) is False
    clock.advance(31)
    assert backend.force_release("a") == []


def test_a_sweep_reports_what_expired_and_forgets_what_is_old(
    backend: BaseBackend, clock: FakeClock
) -> None:
    free = granted(backend, ask("free"))
    backend.release(free)
    granted(backend, ask("expired", owner="two"))
    clock.advance(7200)
    granted(backend, ask("live", owner="three"))

    (dry,) = backend.sweep(older_than=3600, batch_size=100, dry_run=True)
    (real,) = backend.sweep(older_than=3600, batch_size=100)
    assert [holder.key for holder in dry.expired] == ["expired"]
    assert (dry.examined, dry.deleted) == (3, 2)
    assert (real.examined, real.deleted, real.expired) == (dry.examined, dry.deleted, dry.expired)
    (after,) = backend.sweep(older_than=3600, batch_size=100)
    assert (after.examined, after.deleted, after.expired) == (1, 0, ())
    denied(backend, ask("live", owner="four"))


def test_a_fresh_free_key_keeps_its_token_over_a_sweep(
    backend: BaseBackend, clock: FakeClock
) -> None:
    first = granted(backend, ask("a"))
    backend.release(first)
    list(backend.sweep(older_than=3600, batch_size=100))
    assert granted(backend, ask("a")).fencing_tokens[0] == first.fencing_tokens[0] + 1


# Through db_lock


def test_a_renewed_lock_outlives_many_ttls(backend: BaseBackend, clock: FakeClock) -> None:
    with db_lock("a", ttl=5) as lease:
        clock.advance(3600)
        assert not lease.lost
        denied(backend, ask("a", owner="two"))
    granted(backend, ask("a", owner="two"))


def test_a_lock_with_a_longest_hold_ends_there_and_not_before(
    backend: BaseBackend, clock: FakeClock
) -> None:
    lost: list[object] = []
    lease = db_lock("a", ttl=5, max_hold=60, on_lost=lost.append).acquire()
    clock.advance(59)
    assert not lease.lost
    denied(backend, ask("a", owner="two"))
    assert lost == []
    clock.advance(1)
    assert lease.lost
    granted(backend, ask("a", owner="two"))
    # Callbacks come with the granularity of the schedule.
    clock.advance(0.1)
    assert lost == [lease]


def test_an_unrenewed_lock_is_lost_at_its_deadline(backend: BaseBackend, clock: FakeClock) -> None:
    lost: list[object] = []
    lease = db_lock("a", ttl=5, renew=False, on_lost=lost.append).acquire()
    clock.advance(lease.remaining - 0.1)
    assert lost == []
    clock.advance(0.2)
    assert lost == [lease]
    assert lease.lost


def test_a_waiter_gets_a_dead_holders_key_when_its_lease_ends(
    backend: BaseBackend, clock: FakeClock
) -> None:
    granted(backend, ask("a", ttl=20))
    began = clock.now()
    with db_lock("a", timeout=25) as lease:
        assert clock.now() - began == pytest.approx(20, abs=0.1)
        assert lease.waited == pytest.approx(clock.now() - began)


def test_a_waiter_waits_its_full_time_and_no_longer(backend: BaseBackend, clock: FakeClock) -> None:
    granted(backend, ask("a", ttl=30))
    began = clock.now()
    with pytest.raises(LockTimeout, match=r"within 12\.5 s") as caught:
        db_lock("a", timeout=timedelta(seconds=12.5)).acquire()
    assert clock.now() - began == pytest.approx(12.5)
    assert caught.value.holders[0].owner_id == "one"


def test_a_short_lease_may_be_waited_for_longer_than_it_lasts(
    backend: BaseBackend, clock: FakeClock
) -> None:
    granted(backend, ask("a", ttl=30))
    with db_lock("a", ttl=2, timeout=60) as lease:
        assert lease.ttl == 2


async def test_the_asynchronous_verbs_keep_the_same_rules(
    backend: BaseBackend, clock: FakeClock
) -> None:
    grant = await backend.atry_acquire(ask("a", ttl=20))
    assert isinstance(grant, Grant)
    assert isinstance(await backend.atry_acquire(ask("a", owner="two")), Denial)
    answer = await backend.aextend([Extension(grant=grant, ttl_us=25 * SECOND)])
    assert answer.extended == {"one"}
    began = clock.now()
    async with db_lock("a", timeout=None):
        assert clock.now() - began == pytest.approx(25, abs=0.1)
    assert await backend.arelease(grant) is False


def test_each_alias_has_its_own_keys_and_prefixes_stay_inside(clock: FakeClock) -> None:
    memory = "distlocks.backends.memory.MemoryBackend"
    aliases = {
        "default": {"BACKEND": memory},
        "shop": {"BACKEND": memory, "KEY_PREFIX": "shop:"},
    }
    with override_settings(DISTLOCKS=aliases), db_lock("a"):
        lease = db_lock("a", backend="shop").acquire()
        assert lease.keys == ("a",)
        (holder,) = locks["shop"].holders("a")
        assert holder.key == "a"
        with pytest.raises(LockTimeout, match="'a' could not be had") as caught:
            db_lock("a", backend="shop", timeout=0).acquire()
        assert caught.value.holders[0].key == "a"
        assert locks["shop"].force_release("a") is not None
        assert lease.release() is False
        assert [holder.key for holder in locks["default"].holders()] == ["a"]


def test_times_of_holders_are_moments_in_utc(backend: BaseBackend, clock: FakeClock) -> None:
    granted(backend, ask("a"))
    (holder,) = backend.holders()
    assert holder.since == from_us(clock.wall_us())
