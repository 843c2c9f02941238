"""Fencing tokens grow with every grant of a key, whatever came between."""

import time
from collections.abc import Sequence

import pytest

from distlocks.claims import Grant, Request
from tests.integration.contract.stores import Store


def end(store: Store, request: Request, grant: Grant, how: str) -> None:
    (key,) = grant.keys
    if how == "released":
        assert store.backend.release(grant)
    elif how == "abandoned":
        store.backend.abandon(request)
    elif how == "force-released":
        assert store.backend.force_release(key)
    else:
        store.expire(key)
        if how == "swept":
            list(store.backend.sweep(older_than=86400, batch_size=1000))


ENDS = ("released", "abandoned", "force-released", "expired", "swept")


@pytest.mark.parametrize("ends", [*([one] * 4 for one in ENDS), ENDS], ids=[*ENDS, "all in turn"])
def test_they_grow_over_every_way_in_which_a_hold_ends(
    store: Store, key: str, ends: Sequence[str]
) -> None:
    tokens = []
    for how in (*ends, "released"):
        request = store.request(key)
        grant = store.backend.try_acquire(request)
        assert isinstance(grant, Grant)
        tokens.extend(grant.fencing_tokens)
        end(store, request, grant, how)
    assert tokens == sorted(set(tokens)), "strictly growing"


def test_they_grow_when_the_stores_clock_is_set_back(store: Store, key: str) -> None:
    first = store.grant(key)
    store.backend.release(first)
    store.set_clock_back(1800, key)
    second = store.grant(key)
    store.backend.release(second)
    third = store.grant(key)
    assert first.fencing_tokens < second.fencing_tokens < third.fencing_tokens


def test_they_carry_the_time_and_fit_a_double(store: Store, key: str) -> None:
    (token,) = store.grant(key).fencing_tokens
    assert abs(token - time.time_ns() // 1000) < 60_000_000
    assert token < 2**53


def test_each_key_of_several_has_its_own(store: Store, key: str) -> None:
    a, b = f"{key}:a", f"{key}:b"
    for _ in range(3):
        store.hold(a).release()
    with store.lock(a, b, timeout=0) as first:
        pass
    with store.lock(b, a, timeout=0) as second:
        pass
    for name in (a, b):
        assert second.fencing_tokens[name] > first.fencing_tokens[name]


def test_an_extension_keeps_them(store: Store, key: str) -> None:
    lease = store.hold(key)
    token = lease.fencing_token
    lease.extend()
    assert lease.fencing_token == token
    holder = store.holder(key)
    assert holder is not None
    assert holder.fencing_token == token
