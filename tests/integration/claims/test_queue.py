"""Who waits for a key has its turn in order, whatever others do meanwhile."""

import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from distlocks.claims import Denial, Grant, Request, claims_on, to_us
from distlocks.clock import lease_now
from distlocks.identity import new_owner_id
from tests.integration.claims.fair import Ask, Fair
from tests.integration.contract.redis_stores import RedisStore
from tests.integration.contract.stores import for_stores

# Seconds. Reservations end within one step of the clock, leases and waiters after several, and
# never within a second of one.
STEP = 2.3
TTLS = (2.5 * STEP, 50.5 * STEP)
NAMES = ("a", "b")
KINDS = (("exclusive", 0), ("exclusive", 0), ("shared", 0), ("permit", 1), ("permit", 2))
# A test that was kept from running for so long beside the store knows nothing for certain.
PAUSE = 0.4
OFTEN = st.sampled_from((True, True, True, False))
# How many runs, and of how many steps: on a Cluster, each takes hundreds of requests.
RUNS = {"redis": (40, 40), "redis_cluster": (2, 25)}


class Machine(RuleBasedStateMachine):
    """One store, with keys of this run's own, beside the reference.

    Its time stands still but for the steps: what passes in truth is taken back.
    """

    requests: Bundle[tuple[Request, Ask]] = Bundle("requests")

    def __init__(self, store: RedisStore) -> None:
        super().__init__()
        self.store = store
        self.backend = store.backend
        self.root = uuid.uuid4().hex + ":"
        self.reference = Fair()
        self.asked = 0
        self.grants: dict[str, Grant] = {}
        self.tokens: dict[str, int] = {}
        self.moved = lease_now()
        self.paused = False

    def teardown(self) -> None:
        self.store.forget_all(self.root)

    def stand_still(self) -> None:
        now = lease_now()
        self.store.shift_all(self.root, -to_us(now - self.moved))
        self.moved = now

    def is_certain(self) -> bool:
        """Whether the store has seen none of the time that passes in truth."""
        self.paused = self.paused or lease_now() > self.moved + PAUSE
        return not self.paused

    @rule(
        target=requests,
        names=st.sampled_from(("a", "a", "a", "b", "ab")),
        kind=st.sampled_from(KINDS),
        ttl=st.sampled_from(TTLS),
        waits=OFTEN,
    )
    def come(self, names: str, kind: tuple[str, int], ttl: float, waits: bool) -> Any:
        mode, limit = kind
        self.asked += 1
        request = Request(
            claims=claims_on([self.root + name for name in names], mode, limit),
            owner_id=new_owner_id(),
            ttl_us=to_us(ttl),
        )
        keys = sorted(request.keys, key=lambda key: (self.store.bucket(key), key))
        ask = Ask(request.owner_id, self.asked, keys, mode, limit, ttl)
        self.ask((request, ask), waits)
        return request, ask

    @rule(which=requests, waits=OFTEN)
    def ask(self, which: tuple[Request, Ask], waits: bool) -> None:
        """Also by who was called, and by who has it already."""
        self.stand_still()
        request, ask = which
        before = self.grants.get(ask.owner)
        if before and not self.has(ask):
            # It has lost what it had: who wants it back comes as somebody else.
            return
        granted = self.reference.acquire(ask, waits=waits)
        # As long ago as makes its place certain: those who come are a second apart.
        waited = 1000 + self.reference.now - ask.number
        answer = self.backend.try_acquire(
            replace(request, waits=waits, asked_at=lease_now() - waited)
        )
        if not self.is_certain():
            return
        assert isinstance(answer, Grant if granted else Denial), answer
        if isinstance(answer, Denial):
            assert answer.queued == (ask.owner if waits else "")
            assert answer.remaining > 0 or not waits
        elif before:
            assert answer.fencing_tokens == before.fencing_tokens
        else:
            self.grants[ask.owner] = answer
            for key, token in zip(answer.keys, answer.fencing_tokens, strict=True):
                assert token > self.tokens.get(key, 0)
                self.tokens[key] = token

    def has(self, ask: Ask) -> bool:
        """Whether it has all that it asked for, more than kept for it."""
        held = self.reference.holders()
        return all((key, ask.owner, ask.mode, False) in held for key in ask.keys)

    @rule(which=consumes(requests))
    def end(self, which: tuple[Request, Ask]) -> None:
        """It gives back what it has, or gives up what it waits for."""
        self.stand_still()
        request, ask = which
        live = self.has(ask)
        self.reference.end(ask.owner, ask.keys)
        if grant := self.grants.get(ask.owner):
            assert self.backend.release(grant) or not live or not self.is_certain()
        else:
            self.backend.abandon(request)

    @rule(which=consumes(requests))
    def die(self, which: tuple[Request, Ask]) -> None:
        """Nothing more is heard of it."""

    @rule(name=st.sampled_from(NAMES))
    def force_release(self, name: str) -> None:
        self.stand_still()
        had = {one.owner_id for one in self.backend.force_release(self.root + name)}
        assert had == self.reference.force_release(self.root + name) or not self.is_certain()

    @rule()
    def sweep(self) -> None:
        self.stand_still()
        list(self.backend.sweep(older_than=86400, batch_size=100))
        self.reference.sweep()

    @rule(steps=st.sampled_from((1, 1, 1, 3, 6)))
    def time_passes(self, steps: int) -> None:
        self.stand_still()
        self.reference.now += steps * STEP
        self.store.shift_all(self.root, to_us(steps * STEP))

    @invariant()
    def the_same_have_it_and_the_same_wait(self) -> None:
        found = {
            (one.key, one.owner_id, one.mode, not one.fencing_token)
            for one in self.backend.holders(self.root)
        }
        assert found == self.reference.holders() or not self.is_certain()
        for name in NAMES:
            waiters = [one.owner_id for one in self.backend.waiters(self.root + name)]
            assert waiters == self.reference.waiters(self.root + name) or not self.is_certain()


@for_stores(tuple(RUNS))
def test_the_queue_is_kept(store: RedisStore, explore: Callable[..., None]) -> None:
    explore(Machine, RUNS[store.alias][1], max_examples=RUNS[store.alias][0], derandomize=True)


@pytest.mark.soak
@for_stores(tuple(RUNS))
def test_the_queue_is_kept_for_long(store: RedisStore, explore: Callable[..., None]) -> None:
    explore(
        Machine,
        RUNS[store.alias][1],
        max_examples=int(float(os.environ.get("DISTLOCKS_SOAK_SECONDS", "300"))),
    )


@for_stores(("redis", "redis_cluster"))
def test_a_sweep_hands_on_what_it_clears(store: RedisStore, key: str) -> None:
    """To the first who waits, and to nobody after it; what was cleared is told of."""
    names = [f"{key}:{number}" for number in range(20)]
    grants = [store.grant(name) for name in names]
    first = [store.wait(name) for name in names]
    second = [store.wait(name) for name in names]
    store.expire(*names)
    expired = [one.owner_id for swept in store.sweep() for one in swept.expired]
    assert {grant.owner_id for grant in grants} <= set(expired)
    called = {one.owner_id for one in store.backend.holders(key)}
    assert called == {one.owner_id for one in first}
    for name, request in zip(names, second, strict=True):
        assert [one.owner_id for one in store.backend.waiters(name)] == [request.owner_id]


@for_stores(("redis", "redis_cluster"))
@pytest.mark.parametrize("waits", [True, False])
def test_who_is_denied_another_key_hands_on_the_first(
    store: RedisStore, key: str, waits: bool
) -> None:
    """What was kept for it is the next one's at once, not after a while in which nobody has it."""
    names = (f"{key}:1", f"{key}:2")
    a, b = sorted(names, key=lambda name: (store.bucket(name), name))
    held = {name: store.grant(name) for name in names}
    both = store.wait(a, b)
    following = store.wait(a)
    assert store.backend.release(held[a])
    assert store.owner(a) == both.owner_id
    denial = store.backend.try_acquire(replace(both, waits=waits))
    assert isinstance(denial, Denial)
    assert denial.key == b
    assert store.owner(a) == following.owner_id
    assert [one.owner_id for one in store.backend.waiters(b)] == [both.owner_id] * waits
    answer = store.backend.try_acquire(following)
    assert isinstance(answer, Grant)
    assert store.backend.release(answer)
    assert store.backend.release(held[b])


@for_stores(("redis",))
def test_the_dead_keep_nobody_from_being_first(store: RedisStore, key: str) -> None:
    """Whoever is first looks when the holder's lease ends: beside dead ones, it still is."""
    store.grant(key, ttl=30)
    for _ in range(3):
        store.wait(key)
    store.shift_all(key, to_us(28))
    request = store.request(key, waits=True, asked_at=lease_now())
    denial = store.backend.try_acquire(request)
    assert isinstance(denial, Denial)
    assert 0 < denial.remaining <= 2
    assert [one.owner_id for one in store.backend.waiters(key)] == [request.owner_id]
