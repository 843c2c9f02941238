"""Only who holds a lock can release or extend it."""

import os
from dataclasses import replace

import pytest

from distlocks import LeaseLost
from distlocks.claims import Extension, Grant, to_us
from distlocks.identity import new_owner_id
from distlocks.testing import flush_events
from tests.integration.contract.stores import (
    KINDS_OF_SHARED_STORES,
    QUORUM_STORES,
    Store,
    for_stores,
)
from tests.integration.hazards import roles
from tests.servers.children import Spawner
from tests.waiting import eventually


class TestLateHolder:
    """A holder that comes back when its lease has expired and somebody else has the key."""

    def test_its_release_leaves_the_next_holder_alone_and_it_is_told(
        self, store: Store, key: str
    ) -> None:
        heard = []
        late = store.hold(key, on_lost=heard.append)
        store.expire(key)
        heir = store.hold(key)
        assert late.release() is False
        assert late.lost
        flush_events()
        assert heard == [late]
        assert store.owner(key) == heir.owner_id
        heir.extend()
        assert heir.release() is True

    def test_the_end_of_its_block_leaves_the_next_holder_alone(
        self, store: Store, key: str
    ) -> None:
        lock = store.lock(key, timeout=0)
        with pytest.raises(LeaseLost, match=key[-32:]), lock:
            heir = store.lose(key, "taken over")
        assert heir is not None
        assert store.owner(key) == heir.owner_id

    def test_its_extension_takes_nothing_back(self, store: Store, key: str) -> None:
        late = store.hold(key)
        store.expire(key)
        heir = store.hold(key, ttl=5)
        with pytest.raises(LeaseLost):
            late.extend()
        assert store.owner(key) == heir.owner_id
        holder = store.holder(key)
        assert holder is not None
        assert holder.remaining <= 5

    def test_nor_does_it_take_back_what_nobody_has(self, store: Store, key: str) -> None:
        """Between expiry and extension somebody may have had the key and released it."""
        late = store.hold(key)
        store.expire(key)
        store.hold(key).release()
        with pytest.raises(LeaseLost):
            late.extend()
        assert store.is_free(key)

    @for_stores((*KINDS_OF_SHARED_STORES, *QUORUM_STORES))
    def test_a_process_that_was_paused_past_its_lease_knows_when_it_wakes(
        self, store: Store, key: str, spawn: Spawner
    ) -> None:
        """By its own clock, before it has asked the store; and it has harmed nobody."""
        child = spawn(roles.hold, store.alias, key, ttl=1)
        child.readline()
        child.pause()
        heir = store.lock(key, timeout=20).acquire()
        child.resume()
        child.send("lost?")
        assert child.readline() == "lost"
        child.send("release")
        assert child.readline() == "released False"

        def told() -> bool:
            child.send("told?")
            return child.readline() == "told"

        eventually(told)
        assert store.owner(key) == heir.owner_id
        assert heir.release() is True
        child.send("end")
        child.result()


class TestLookalike:
    """Who knows the key, and even what is shown of its holder, is not the holder."""

    @pytest.mark.parametrize("forged", ["owner id", "token", "old grant"])
    def test_it_neither_releases_nor_extends(self, store: Store, key: str, forged: str) -> None:
        request = store.request(key)
        grant = store.backend.try_acquire(request)
        assert isinstance(grant, Grant)
        if forged == "old grant":
            lookalike = grant
            store.expire(key)
            grant = store.backend.try_acquire(request)
            assert isinstance(grant, Grant)
        elif forged == "token":
            lookalike = replace(grant, fencing_tokens=(grant.fencing_tokens[0] + 1,))
        else:
            lookalike = replace(grant, owner_id=new_owner_id())
        extension = Extension(grant=lookalike, ttl_us=to_us(5))
        assert not store.backend.extend([extension]).extended
        assert store.backend.release(lookalike) is False
        holder = store.holder(key)
        assert holder is not None
        assert (holder.owner_id, (holder.fencing_token,)) == (grant.owner_id, grant.fencing_tokens)
        assert holder.remaining > 20

    def test_a_second_lock_object_has_no_way_to_end_the_first(self, store: Store, key: str) -> None:
        lease = store.hold(key)
        twin = store.lock(key, timeout=0)
        assert twin.try_acquire() is None
        with pytest.raises(RuntimeError):
            twin.__exit__(None, None, None)
        assert store.owner(key) == lease.owner_id

    def test_abandoning_another_request_frees_nothing(self, store: Store, key: str) -> None:
        lease = store.hold(key)
        store.backend.abandon(store.request(key))
        assert store.owner(key) == lease.owner_id


@for_stores((*KINDS_OF_SHARED_STORES, *QUORUM_STORES))
def test_two_processes_are_two_owners(store: Store, key: str, spawn: Spawner) -> None:
    """Also two of one host, which the store might take for one client."""
    child = spawn(roles.hold, store.alias, key)
    theirs = child.readline()
    mine = store.hold(f"{key}:mine")
    assert theirs != f"held by {mine.owner_id}"
    assert store.lock(key, timeout=0).try_acquire() is None
    holder = store.holder(key)
    assert holder is not None
    assert theirs == f"held by {holder.owner_id}"
    assert holder.pid == child.pid != os.getpid()
    child.send("release")
    assert child.readline() == "released True"
    assert store.is_free(key)
    child.send("end")
    child.result()
