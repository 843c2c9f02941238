"""What every store does for the verbs of a backend."""

import os
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import pytest

from distlocks.claims import Denial, Extension, Grant, to_us
from distlocks.models import Lock
from tests.factories import LockFactory
from tests.integration.contract.stores import DATABASE_STORES, Store, for_stores


def extension(grant: Grant, ttl: float = 30) -> Extension:
    return Extension(grant=grant, ttl_us=to_us(ttl))


class TestTryAcquire:
    def test_a_free_key_is_granted(self, store: Store, key: str) -> None:
        request = store.request(key)
        grant = store.backend.try_acquire(request)
        assert isinstance(grant, Grant)
        assert grant.keys == (key,)
        assert grant.owner_id == request.owner_id
        assert len(grant.fencing_tokens) == 1
        now = datetime.now(UTC).timestamp() * 1_000_000
        assert abs(grant.acquired_us - now) < 60_000_000, "by the store's clock, in microseconds"

    def test_a_held_key_is_denied_and_the_denial_says_who_has_it(
        self, store: Store, key: str
    ) -> None:
        mine = store.request(
            key, host="web-7", pid=4711, thread="worker", label="nightly", metadata={"run": 1}
        )
        grant = store.backend.try_acquire(mine)
        assert isinstance(grant, Grant)
        denial = store.backend.try_acquire(store.request(key))
        assert isinstance(denial, Denial)
        assert denial.key == key
        assert denial.can_wait
        assert 25 < denial.remaining <= 30
        (holder,) = denial.holders
        assert (holder.key, holder.owner_id) == (key, mine.owner_id)
        assert (holder.fencing_token,) == grant.fencing_tokens
        assert (holder.host, holder.pid, holder.thread) == ("web-7", 4711, "worker")
        assert (holder.label, holder.metadata) == ("nightly", {"run": 1})
        assert abs(holder.since - datetime.now(UTC)) < timedelta(minutes=1)
        assert not holder.cooling_down

    def test_a_denied_request_changes_nothing(self, store: Store, key: str) -> None:
        grant = store.grant(key)
        before = store.holder(key)
        assert before is not None
        for _ in range(3):
            assert isinstance(store.backend.try_acquire(store.request(key)), Denial)
        after = store.holder(key)
        assert after is not None
        assert after.remaining <= before.remaining
        assert asdict(after) | {"remaining": 0} == asdict(before) | {"remaining": 0}
        assert store.backend.release(grant)

    def test_a_request_sent_again_has_the_grant_that_it_already_has(
        self, store: Store, key: str
    ) -> None:
        request = store.request(key)
        first = store.backend.try_acquire(request)
        again = store.backend.try_acquire(request)
        assert isinstance(first, Grant)
        assert isinstance(again, Grant)
        assert (again.owner_id, again.fencing_tokens) == (first.owner_id, first.fencing_tokens)
        assert again.acquired_us == first.acquired_us
        assert store.backend.release(first)
        assert store.is_free(key), "it was had once, so one release frees it"

    def test_a_request_sent_again_after_its_lease_has_expired_is_a_new_grant(
        self, store: Store, key: str
    ) -> None:
        request = store.request(key)
        first = store.backend.try_acquire(request)
        assert isinstance(first, Grant)
        store.expire(key)
        again = store.backend.try_acquire(request)
        assert isinstance(again, Grant)
        assert again.fencing_tokens > first.fencing_tokens

    def test_an_expired_lease_is_taken_over(self, store: Store, key: str) -> None:
        old = store.grant(key)
        store.expire(key)
        new = store.grant(key)
        assert new.fencing_tokens > old.fencing_tokens
        holder = store.holder(key)
        assert holder is not None
        assert holder.owner_id == new.owner_id
        assert holder.remaining > 25

    def test_a_lease_is_not_taken_over_before_it_expires(self, store: Store, key: str) -> None:
        store.grant(key, ttl=30)
        store.age(20, key)
        denial = store.backend.try_acquire(store.request(key))
        assert isinstance(denial, Denial)
        assert 5 < denial.remaining <= 10


class TestSeveralKeys:
    def test_all_are_granted_each_with_its_token(self, store: Store, key: str) -> None:
        keys = (f"{key}:a", f"{key}:b", f"{key}:c")
        grant = store.grant(*keys)
        assert grant.keys == keys
        for one, token in zip(keys, grant.fencing_tokens, strict=True):
            holder = store.holder(one)
            assert holder is not None
            assert (holder.owner_id, holder.fencing_token) == (grant.owner_id, token)

    @pytest.mark.parametrize("taken", ["a", "b", "c"])
    def test_none_is_granted_when_one_is_taken(self, store: Store, key: str, taken: str) -> None:
        rival = store.grant(f"{key}:{taken}")
        request = store.request(f"{key}:a", f"{key}:b", f"{key}:c")
        denial = store.backend.try_acquire(request)
        assert isinstance(denial, Denial)
        assert denial.key == f"{key}:{taken}"
        (holder,) = denial.holders
        assert holder.owner_id == rival.owner_id
        (held,) = store.backend.holders(f"{key}:")
        assert held.key == f"{key}:{taken}"
        assert store.backend.release(rival)
        assert isinstance(store.backend.try_acquire(request), Grant)

    def test_a_denial_takes_nothing_from_what_was_there(self, store: Store, key: str) -> None:
        """Of an earlier grant of the same owner id, a try that fails elsewhere leaves the rest."""
        first = store.grant(f"{key}:a")
        store.backend.release(first)
        store.grant(f"{key}:b")
        denial = store.backend.try_acquire(store.request(f"{key}:a", f"{key}:b"))
        assert isinstance(denial, Denial)
        assert store.grant(f"{key}:a").fencing_tokens > first.fencing_tokens

    def test_a_request_for_several_keys_is_idempotent(self, store: Store, key: str) -> None:
        request = store.request(f"{key}:a", f"{key}:b")
        first, again = store.backend.try_acquire(request), store.backend.try_acquire(request)
        assert isinstance(first, Grant)
        assert isinstance(again, Grant)
        assert again.fencing_tokens == first.fencing_tokens
        assert store.backend.release(first)
        assert store.backend.holders(f"{key}:") == []

    def test_release_frees_all(self, store: Store, key: str) -> None:
        grant = store.grant(f"{key}:a", f"{key}:b")
        assert store.backend.release(grant)
        assert store.backend.holders(f"{key}:") == []

    def test_release_reports_that_one_was_lost_and_frees_the_others(
        self, store: Store, key: str
    ) -> None:
        grant = store.grant(f"{key}:a", f"{key}:b")
        store.backend.force_release(f"{key}:a")
        rival = store.grant(f"{key}:a")
        assert not store.backend.release(grant)
        (holder,) = store.backend.holders(f"{key}:")
        assert holder.owner_id == rival.owner_id

    def test_an_extension_is_lost_when_one_key_is(self, store: Store, key: str) -> None:
        grant = store.grant(f"{key}:a", f"{key}:b")
        store.backend.force_release(f"{key}:b")
        answer = store.backend.extend([extension(grant)])
        assert answer.lost == {grant.owner_id}
        assert not answer.extended


class TestRelease:
    def test_the_key_is_free_at_once(self, store: Store, key: str) -> None:
        grant = store.grant(key)
        assert store.backend.release(grant) is True
        assert store.is_free(key)
        assert isinstance(store.backend.try_acquire(store.request(key)), Grant)

    def test_a_release_sent_again_is_answered_like_the_first(self, store: Store, key: str) -> None:
        grant = store.grant(key)
        assert store.backend.release(grant) is True
        assert store.backend.release(grant) is True

    def test_what_somebody_has_had_since_is_not_released(self, store: Store, key: str) -> None:
        grant = store.grant(key)
        store.expire(key)
        store.backend.release(store.grant(key))
        assert store.backend.release(grant) is False

    def test_what_was_freed_by_force_is_not_released(self, store: Store, key: str) -> None:
        grant = store.grant(key)
        store.backend.force_release(key)
        assert store.backend.release(grant) is False

    def test_what_a_sweep_has_cleared_is_not_released(self, store: Store, key: str) -> None:
        grant = store.grant(key)
        store.expire(key)
        list(store.backend.sweep(older_than=86400, batch_size=1000))
        assert store.backend.release(grant) is False

    def test_the_next_holder_is_not_touched(self, store: Store, key: str) -> None:
        old = store.grant(key)
        store.expire(key)
        new = store.grant(key)
        assert store.backend.release(old) is False
        holder = store.holder(key)
        assert holder is not None
        assert holder.owner_id == new.owner_id
        assert store.backend.release(new) is True

    def test_what_expired_and_nobody_took_can_be_released(self, store: Store, key: str) -> None:
        grant = store.grant(key)
        store.expire(key)
        store.backend.release(grant)
        assert store.is_free(key)
        assert store.grant(key).fencing_tokens > grant.fencing_tokens


class TestExtend:
    def test_the_time_left_is_replaced(self, store: Store, key: str) -> None:
        grant = store.grant(key, ttl=30)
        store.age(20, key)
        answer = store.backend.extend([extension(grant, 25)])
        assert answer.extended == {grant.owner_id}
        assert not answer.lost
        holder = store.holder(key)
        assert holder is not None
        assert 20 < holder.remaining <= 25
        assert (holder.fencing_token,) == grant.fencing_tokens

    def test_it_may_shorten(self, store: Store, key: str) -> None:
        grant = store.grant(key, ttl=30)
        store.backend.extend([extension(grant, 5)])
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining <= 5

    def test_an_expired_lease_is_lost_even_if_nobody_took_it(self, store: Store, key: str) -> None:
        grant = store.grant(key)
        store.expire(key)
        assert store.backend.extend([extension(grant)]).lost == {grant.owner_id}
        assert store.is_free(key)

    def test_a_lease_taken_over_is_lost(self, store: Store, key: str) -> None:
        old = store.grant(key)
        store.expire(key)
        new = store.grant(key, ttl=10)
        assert store.backend.extend([extension(old, 30)]).lost == {old.owner_id}
        holder = store.holder(key)
        assert holder is not None
        assert holder.owner_id == new.owner_id
        assert holder.remaining <= 10

    def test_a_released_lease_is_lost_and_stays_free(self, store: Store, key: str) -> None:
        grant = store.grant(key)
        store.backend.release(grant)
        assert store.backend.extend([extension(grant)]).lost == {grant.owner_id}
        assert store.is_free(key)

    def test_each_of_a_batch_has_its_own_ttl_and_its_own_answer(
        self, store: Store, key: str
    ) -> None:
        long, short, gone = (store.grant(f"{key}:{name}") for name in ("long", "short", "gone"))
        store.backend.release(gone)
        answer = store.backend.extend([extension(long, 29), extension(short, 3), extension(gone)])
        assert answer.extended == {long.owner_id, short.owner_id}
        assert answer.lost == {gone.owner_id}
        remaining = {one.key: one.remaining for one in store.backend.holders(f"{key}:")}
        assert remaining.keys() == {f"{key}:long", f"{key}:short"}
        assert 20 < remaining[f"{key}:long"] <= 29
        assert 0 < remaining[f"{key}:short"] <= 3

    def test_an_empty_batch_is_answered(self, store: Store) -> None:
        answer = store.backend.extend([])
        assert (answer.extended, answer.lost) == (frozenset(), frozenset())


class TestHolders:
    def test_they_come_in_the_order_of_the_keys(self, store: Store, key: str) -> None:
        names = [f"{key}:b", f"{key}:a", f"{key}:c", f"{key}:B"]
        for name in names:
            store.grant(name)
        assert [one.key for one in store.backend.holders(f"{key}:")] == sorted(names)

    def test_only_so_many(self, store: Store, key: str) -> None:
        for name in "cab":
            store.grant(f"{key}:{name}")
        found = store.backend.holders(f"{key}:", limit=2)
        assert [one.key for one in found] == [f"{key}:a", f"{key}:b"]

    def test_neither_the_released_nor_the_expired(self, store: Store, key: str) -> None:
        held, released, expired = (store.grant(f"{key}:{n}") for n in ("1", "2", "3"))
        store.backend.release(released)
        store.expire(f"{key}:3")
        store.backend.try_acquire(store.request(f"{key}:1", owner_id=held.owner_id))
        assert [one.key for one in store.backend.holders(f"{key}:")] == [f"{key}:1"]
        assert expired.keys == (f"{key}:3",)

    def test_without_a_prefix_everybody(self, store: Store, key: str) -> None:
        store.grant(key)
        assert key in [one.key for one in store.backend.holders()]

    def test_a_prefix_is_taken_as_it_stands(self, store: Store, key: str) -> None:
        """Nothing in it is a wild card, and case and accents count."""
        for name in ("50 apples", "axb", "a/b", "anything", "a", "a:", "e\u0301"):
            store.grant(f"{key}{name}!")
        for prefix in ("50%", "a_b", "a\\b", "*", "[ab]", "A:", "é"):
            wanted = f"{key}{prefix}!"
            store.grant(wanted)
            assert [one.key for one in store.backend.holders(f"{key}{prefix}")] == [wanted]

    def test_the_last_holder_of_a_key_that_is_cooling_down(self, store: Store, key: str) -> None:
        store.backend.release(store.grant(key, min_hold=20, host="web-3", label="nightly"))
        holder = store.holder(key)
        assert holder is not None
        assert holder.cooling_down
        assert holder.owner_id == ""
        assert (holder.host, holder.label) == ("web-3", "nightly")
        assert 15 < holder.remaining <= 20


class TestForceRelease:
    def test_it_frees_the_key_and_says_who_had_it(self, store: Store, key: str) -> None:
        grant = store.grant(key, label="stuck", pid=os.getpid())
        (had,) = store.backend.force_release(key)
        assert (had.key, had.owner_id, had.label) == (key, grant.owner_id, "stuck")
        assert (had.fencing_token,) == grant.fencing_tokens
        assert store.is_free(key)

    def test_the_old_holder_loses_it_and_cannot_touch_the_next(
        self, store: Store, key: str
    ) -> None:
        old = store.grant(key)
        store.backend.force_release(key)
        assert store.backend.extend([extension(old)]).lost == {old.owner_id}
        new = store.grant(key)
        assert store.backend.release(old) is False
        assert store.backend.release(new) is True

    def test_a_free_an_expired_and_an_unknown_key_have_no_holder(
        self, store: Store, key: str
    ) -> None:
        store.backend.release(store.grant(f"{key}:free"))
        store.grant(f"{key}:expired")
        store.expire(f"{key}:expired")
        for name in ("free", "expired", "unknown"):
            assert store.backend.force_release(f"{key}:{name}") == []

    def test_it_ends_a_minimum_hold(self, store: Store, key: str) -> None:
        store.backend.release(store.grant(key, min_hold=20))
        (had,) = store.backend.force_release(key)
        assert had.cooling_down
        assert store.is_free(key)

    def test_other_keys_stay(self, store: Store, key: str) -> None:
        both = store.grant(f"{key}:a", f"{key}:b")
        other = store.grant(f"{key}:c")
        store.backend.force_release(f"{key}:a")
        left = [(f"{key}:b", both.owner_id)] if store.frees_single_keys else []
        found = [(one.key, one.owner_id) for one in store.backend.holders(f"{key}:")]
        assert found == [*left, (f"{key}:c", other.owner_id)]


class TestAbandon:
    def test_it_frees_whatever_the_owner_id_has(self, store: Store, key: str) -> None:
        request = store.request(f"{key}:a", f"{key}:b")
        assert isinstance(store.backend.try_acquire(request), Grant)
        store.backend.abandon(request)
        assert store.backend.holders(f"{key}:") == []

    def test_what_was_never_granted_is_no_error(self, store: Store, key: str) -> None:
        store.backend.abandon(store.request(key))
        assert store.is_free(key)

    def test_other_owners_keep_theirs(self, store: Store, key: str) -> None:
        rival = store.grant(f"{key}:b")
        store.backend.abandon(store.request(f"{key}:a", f"{key}:b"))
        (holder,) = store.backend.holders(f"{key}:")
        assert holder.owner_id == rival.owner_id

    def test_no_minimum_hold_is_kept_for_work_that_never_began(
        self, store: Store, key: str
    ) -> None:
        request = store.request(key, min_hold=20)
        assert isinstance(store.backend.try_acquire(request), Grant)
        store.backend.abandon(request)
        assert store.is_free(key)


class TestSweep:
    DAY = 86400.0

    def sweep(self, store: Store, *, older_than: float = DAY, dry_run: bool = False):
        assert store.backend.supports_sweep
        batches = list(store.backend.sweep(older_than=older_than, batch_size=1000, dry_run=dry_run))
        return [one for batch in batches for one in batch.expired], batches

    def test_the_expired_are_cleared_and_reported(self, store: Store, key: str) -> None:
        dead = store.grant(f"{key}:dead", label="crashed")
        store.expire(f"{key}:dead")
        expired, _ = self.sweep(store)
        mine = [one for one in expired if one.key.startswith(key)]
        reported = [(f"{key}:dead", dead.owner_id, "crashed")] if store.reports_the_dead else []
        assert [(one.key, one.owner_id, one.label) for one in mine] == reported
        assert not [one for one in self.sweep(store)[0] if one.key.startswith(key)], "only once"

    def test_the_live_and_the_cooling_are_left_alone(self, store: Store, key: str) -> None:
        live = store.grant(f"{key}:live")
        cooling = store.grant(f"{key}:cooling", min_hold=25)
        store.backend.release(cooling)
        before = store.backend.holders(f"{key}:")
        self.sweep(store)
        after = store.backend.holders(f"{key}:")
        assert [(one.key, one.owner_id) for one in after] == [
            (one.key, one.owner_id) for one in before
        ]
        assert store.backend.extend([extension(live)]).extended == {live.owner_id}

    def test_a_dry_run_reports_and_changes_nothing(self, store: Store, key: str) -> None:
        store.grant(key)
        store.expire(key)
        for _ in range(2):
            expired, _ = self.sweep(store, dry_run=True)
            assert (key in [one.key for one in expired]) is store.reports_the_dead

    def test_tokens_grow_over_a_sweep(self, store: Store, key: str) -> None:
        old = store.grant(key)
        store.expire(key)
        self.sweep(store)
        assert store.grant(key).fencing_tokens > old.fencing_tokens


class TestAsyncTwins:
    async def test_they_do_what_the_verbs_do(self, store: Store, key: str) -> None:
        backend = store.backend
        request = store.request(key)
        grant = await backend.atry_acquire(request)
        assert isinstance(grant, Grant)
        assert isinstance(await backend.atry_acquire(store.request(key)), Denial)
        again = await backend.atry_acquire(request)
        assert isinstance(again, Grant)
        assert again.fencing_tokens == grant.fencing_tokens
        answer = await backend.aextend([extension(grant)])
        assert answer.extended == {grant.owner_id}
        assert await backend.arelease(grant) is True
        assert (await backend.aextend([extension(grant)])).lost == {grant.owner_id}

    async def test_abandon(self, store: Store, key: str) -> None:
        request = store.request(key, min_hold=20)
        assert isinstance(await store.backend.atry_acquire(request), Grant)
        await store.backend.aabandon(request)
        assert store.is_free(key)


@for_stores(DATABASE_STORES)
class TestRows:
    """What the store makes of rows in each of the states that they can be in."""

    def test_a_held_one_is_denied(self, store: Store) -> None:
        row = store.aside(lambda: LockFactory(using=store.using, label="nightly"))
        denial = store.backend.try_acquire(store.request(row.key))
        assert isinstance(denial, Denial)
        (holder,) = denial.holders
        assert (holder.owner_id, holder.label) == (row.owner_id, "nightly")

    def test_a_cooling_one_is_denied(self, store: Store) -> None:
        row = store.aside(lambda: LockFactory(using=store.using, cooling=True))
        denial = store.backend.try_acquire(store.request(row.key))
        assert isinstance(denial, Denial)
        (holder,) = denial.holders
        assert holder.cooling_down

    @pytest.mark.parametrize("state", ["expired", "free"])
    def test_an_expired_and_a_free_one_are_granted(self, store: Store, state: str) -> None:
        row = store.aside(lambda: LockFactory(using=store.using, **{state: True}))
        assert store.is_free(row.key)
        (token,) = store.grant(row.key).fencing_tokens
        assert token > row.fencing_token

    def test_what_they_are_is_what_the_manager_says(self, store: Store) -> None:
        """By the clock of the store's server."""

        def named() -> dict[str, set[str]]:
            rows = {
                state: LockFactory(using=store.using, **{state: True}).key
                for state in ("held", "cooling", "expired", "free")
            }
            every = Lock.objects.using(store.using).filter(key__in=rows.values())
            return {
                verb: {name for name, key in rows.items() if getattr(every, verb)().filter(key=key)}
                for verb in ("held", "taken", "expired")
            }

        assert store.aside(named) == {
            "held": {"held"},
            "taken": {"held", "cooling"},
            "expired": {"expired"},
        }


class TestWhoHasOneKey:
    def test_it_is_known_without_a_walk_through_all(self, store: Store, key: str) -> None:
        store.hold(key, label="nightly")
        store.hold(f"{key}x")
        (holder,) = store.backend.holders_of(key)
        assert (holder.key, holder.label) == (key, "nightly")
        assert 0 < holder.remaining <= 30
        assert store.backend.holders_of(f"{key}-free") == []
        (scanned,) = [one for one in store.backend.scan() if one.key == key]
        assert scanned.owner_id == holder.owner_id

    def test_of_several_all_or_as_many_as_are_wanted(self, store: Store, key: str) -> None:
        if not store.backend.supports_shared:
            assert store.backend.holders_of(key) == []
            return
        for number in range(3):
            store.hold(key, shared=True, label=f"{number}")
        found = store.backend.holders_of(key)
        assert [holder.label for holder in found] == ["0", "1", "2"]
        assert len(store.backend.holders_of(key, limit=2)) == 2
