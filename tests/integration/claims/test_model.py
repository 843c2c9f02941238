"""Every store answers like the reference, whatever is asked of it in whatever order."""

import os
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from distlocks import clock
from distlocks.claims import Denial, Extension, Grant, Request, claims_on, to_us
from distlocks.identity import new_owner_id
from distlocks.keys import SEPARATOR, Key
from tests.integration.claims.reference import Reference
from tests.integration.contract.stores import Store

# Seconds. A lease ends between two steps of the clock, and never near one.
STEP = 60.0
TTLS = (100.0, 200.0)
NAMES = ("a", "b", SEPARATOR.join("ax"), SEPARATOR.join("ay"), SEPARATOR.join("axz"))
KINDS = (("exclusive", 0), ("shared", 0), ("permit", 1), ("permit", 2), ("permit", 3))
EXAMPLES = 12
STEPS = 30
# To look at all that a Cluster holds takes hundreds of requests.
EXAMPLES_ON_CLUSTER = 3


class Machine(RuleBasedStateMachine):
    """One store, with keys of this run's own, beside the reference."""

    leases: Bundle[tuple[Request, Grant]] = Bundle("leases")
    requests: Bundle[Request] = Bundle("requests")

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.backend = store.backend
        self.root = uuid.uuid4().hex + ":"
        self.reference = Reference()
        self.tokens: dict[str, int] = {}
        self.real_clock = clock.current()

    def teardown(self) -> None:
        clock.replace(self.real_clock)
        self.store.forget_all(self.root)

    @rule(
        target=leases,
        names=st.sets(st.sampled_from(NAMES), min_size=1, max_size=2),
        kind=st.sampled_from(KINDS),
        ttl=st.sampled_from(TTLS),
        min_hold=st.sampled_from((0.0, 0.0, *TTLS)),
    )
    def acquire(self, names: set[str], kind: tuple[str, int], ttl: float, min_hold: float) -> Any:
        mode, limit = kind
        request = Request(
            claims=claims_on([self.root + name for name in names], mode, limit),
            owner_id=new_owner_id(),
            ttl_us=to_us(ttl),
            min_hold_us=to_us(min_hold),
        )
        wanted = {claim.key: claim.mode for claim in request.claims}
        granted = self.reference.acquire(request.owner_id, wanted, limit, ttl, min_hold)
        answer = self.backend.try_acquire(request)
        assert isinstance(answer, Grant if granted else Denial), answer
        if isinstance(answer, Denial):
            assert answer.holders
            assert answer.remaining > 0
            return multiple()
        for key, token in zip(answer.keys, answer.fencing_tokens, strict=True):
            assert token > self.tokens.get(key, 0)
            self.tokens[key] = token
        for one in answer.expired:
            self.reference.forget(self._name(one.key), one.owner_id)
        # Sent again, because the answer was lost.
        again = self.backend.try_acquire(request)
        assert isinstance(again, Grant)
        assert again.fencing_tokens == answer.fencing_tokens
        return request, answer

    @rule(lease=leases, ttl=st.sampled_from(TTLS))
    def extend(self, lease: tuple[Request, Grant], ttl: float) -> None:
        request, grant = lease
        answer = self.backend.extend([Extension(grant=grant, ttl_us=to_us(ttl))])
        if self.reference.extend(request.owner_id, list(grant.keys), ttl):
            assert answer.extended == {request.owner_id}
        else:
            assert answer.lost == {request.owner_id}
            # As its holder does: part of it may still be there.
            assert self.backend.release(grant) is False
            self.reference.release(request.owner_id, list(grant.keys))

    @rule(lease=consumes(leases), twice=st.booleans())
    def release(self, lease: tuple[Request, Grant], twice: bool) -> None:
        request, grant = lease
        ours = self.reference.release(request.owner_id, list(grant.keys))
        assert self.backend.release(grant) is ours
        if twice:
            assert self.backend.release(grant) is ours

    @rule(lease=consumes(leases))
    def crash(self, lease: tuple[Request, Grant]) -> None:
        """Nothing more is heard of the holder."""

    @rule(lease=consumes(leases))
    def abandon(self, lease: tuple[Request, Grant]) -> None:
        request, grant = lease
        self.backend.abandon(request)
        for key in grant.keys:
            for had in list(self.reference.keys.get(key, ())):
                if had.owner == request.owner_id and not had.released:
                    self.reference.keys[key].remove(had)

    @rule(name=st.sampled_from(NAMES))
    def force_release(self, name: str) -> None:
        had = self.backend.force_release(self.root + name)
        assert {one.owner_id for one in had} == self.reference.force_release(self.root + name)

    @rule()
    def sweep(self) -> None:
        list(self.backend.sweep(older_than=86400, batch_size=100))
        self.reference.sweep()

    @rule()
    def time_passes(self) -> None:
        self._move(STEP)

    @rule()
    def the_clock_is_set_back(self) -> None:
        # What has ended by the clock alone would live again.
        if self.reference.has_cooled():
            return
        self.sweep()
        self._move(-STEP)

    @invariant()
    def the_same_have_the_same(self) -> None:
        held = self.backend.holders(self.root)
        found = {(self._name(one.key), one.owner_id, one.mode) for one in held}
        assert found == self.reference.holders()

    @staticmethod
    def _name(key: Key) -> str:
        return key if isinstance(key, str) else SEPARATOR.join(key)

    def _move(self, seconds: float) -> None:
        self.reference.now += seconds
        self.store.shift_all(self.root, to_us(seconds))


def test_the_store_answers_like_the_reference(store: Store, explore: Callable[..., None]) -> None:
    examples = EXAMPLES_ON_CLUSTER if store.alias == "redis_cluster" else EXAMPLES
    explore(Machine, STEPS, max_examples=examples, derandomize=True)


@pytest.mark.soak
def test_the_store_answers_like_the_reference_for_long(explore: Callable[..., None]) -> None:
    explore(
        Machine, STEPS, max_examples=int(float(os.environ.get("DISTLOCKS_SOAK_SECONDS", "300")))
    )
