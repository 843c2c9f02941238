"""A process forks while it holds locks: they stay its own."""

from tests.integration.contract.stores import (
    FEWER_SHARED_STORES,
    POSTGRES_STORES,
    Store,
    for_stores,
)
from tests.integration.hazards import endings
from tests.servers.children import Spawner


@for_stores(FEWER_SHARED_STORES)
def test_the_child_owns_nothing_and_its_end_harms_nobody(
    store: Store, key: str, spawn: Spawner
) -> None:
    """The parent's lease is kept and renewed while the child looks at it, releases it, collects
    its garbage and exits; the child can take and renew locks of its own.
    """
    child = spawn(endings.fork_while_holding, store.alias, key)
    found = child.result()
    assert found["child"].pop("check").endswith("from which this one was forked.")
    assert found["child"].pop("extend").endswith("from which this one was forked.")
    assert found == {
        "child": {
            "lost": True,
            "released": False,
            "denied": True,
            "other owner": True,
            "own pid": True,
            "own released": True,
        },
        "status": 0,
        "kept": True,
        "still held by it": True,
        "released": True,
        # However a child leaves a block of its parent's, the parent is still in it.
        "blocks": {
            "exits": 0,
            "exits: kept": True,
            "raises": 0,
            "raises: kept": True,
            "ends": 0,
            "ends: kept": True,
        },
    }
    assert child.errors_about(key) == ""
    assert store.backend.holders(f"{key}:") == []


@for_stores(("sqlite",))
def test_a_renewal_that_is_just_under_way_is_no_trap(
    store: Store, key: str, spawn: Spawner
) -> None:
    """The application has one thread; that another one of ours writes at times, it cannot know.

    What SQLite has locked in the parent would count as locked in the child for ever.
    """
    child = spawn(endings.fork_during_renewal, store.alias, key)
    assert child.result() == {"child": 0, "kept": True}
    assert child.errors_about(key) == ""


# SQLite itself does not survive a fork while other threads of the application use it.
@for_stores((*POSTGRES_STORES, "redis", "zookeeper", "advisory"))
def test_no_moment_is_a_bad_one(store: Store, key: str, spawn: Spawner) -> None:
    """Other threads are in the middle of what they do with locks; the child can use its own."""
    child = spawn(endings.fork_at_any_moment, store.alias, key)
    assert set(child.result()) == {0}
    assert child.errors_about(key) == ""
    assert store.backend.holders(f"{key}:") == []
