"""A process dies or stands still in the middle of an acquire: what it leaves behind passes."""

import pytest

from tests.integration.contract.stores import (
    ADVISORY_STORES,
    FEWER_SHARED_STORES,
    Store,
    for_stores,
)
from tests.integration.hazards import endings, roles
from tests.servers.children import Spawner


@pytest.mark.parametrize(
    ("store", "options"),
    # Of advisory locks, see tests/integration/advisory.
    [(store, {}) for store in FEWER_SHARED_STORES if store not in ADVISORY_STORES]
    + [(store, {"shared": True}) for store in ("sqlite", "postgres", "mariadb", "redis")],
    indirect=["store"],
)
def test_no_lock_is_ever_left_without_an_expiry_nor_half_of_what_was_asked(
    store: Store, key: str, spawn: Spawner, options: dict[str, bool]
) -> None:
    """Killed before and after each statement, it holds all its keys for one ttl, or none.

    On the servers of a Cluster it may hold some.
    """
    wholly = store.alias != "redis_cluster"
    by_count = spawn(endings.die_at_every_statement, store.alias, key, **options).result()
    for count, killed in by_count.items():
        assert killed > 1
        asked = [
            [f"{key}:{count}:{number}:{i}" for i in range(int(count))]
            for number in range(killed + 1)
        ]
        found = store.backend.holders(f"{key}:{count}:")
        assert all(0 < holder.remaining <= 30 for holder in found)
        for keys in asked:
            owners = [holder.owner_id for holder in found if holder.key in keys]
            assert len(owners) in (0, len(keys)) or not wholly
            assert len(set(owners)) <= 1
        assert {holder.key for holder in found} >= set(asked[-1]), "the last one was not killed"
        store.age(30, *(one for keys in asked for one in keys))
        assert store.backend.holders(f"{key}:{count}:") == []
        for keys in asked:
            store.hold(*keys, renew=False)


@for_stores(("postgres", "mariadb"))
@pytest.mark.parametrize("ends", [True, False], ids=["for good", "for a while"])
def test_who_stands_still_between_two_keys_keeps_nobody_from_the_first(
    store: Store, key: str, spawn: Spawner, ends: bool
) -> None:
    """It has the row of the first in its hands, and its own lease of it has not even begun."""
    keys = [f"{key}:{number}" for number in range(2)]
    stalled = spawn(roles.take_with_a_halt, store.alias, *keys)
    stalled.expect("has the first")
    stalled.pause()
    lease = store.hold(keys[0], timeout=20)
    if ends:
        stalled.kill()
    else:
        stalled.resume()
        stalled.send()
        # Its session is gone: it has asked again for both.
        stalled.expect("denied")
    lease.extend()
    assert [holder.owner_id for holder in store.backend.holders(key)] == [lease.owner_id]
