"""The row is lost or put back, and attempts to open Redis come late: never straight to Redis."""

from collections.abc import Callable

import pytest

from distlocks import LockTimeout
from distlocks.backends.fastpath.servers import Servers, epoch_word
from distlocks.backends.redis.scripts import script
from distlocks.backends.redis.wire import packed
from distlocks.claims import Grant
from tests.integration.authority.conftest import Heard
from tests.integration.authority.scene import MAX_TTL, Scene, sent_at

# A database that forgets


def test_a_row_that_is_lost_is_begun_anew_by_draining_redis(
    fast: Scene, heard: Heard, key: str
) -> None:
    held = fast.hold(key)
    assert fast.store_of(held) == "redis"
    fast.aside(lambda: fast.rows.delete())
    # A process that knows nothing of before.
    fast.add("new")
    with pytest.raises(LockTimeout, match="The authority's row was lost from the database"):
        fast.hold(key, alias="new")
    with fast.lock(key, timeout=15, alias="new") as lease:
        assert fast.store_of(lease) == "database"
        assert sent_at(lease) >= held.deadline
        assert lease.fencing_token > held.fencing_token
    fast.reaches("redis", "new")
    heard.hears_of("drain", "db", "closing", "redis", alias="new")


def test_a_row_that_is_put_back_moves_on_past_what_redis_has_seen(
    scene: Scene, heard: Heard, key: str
) -> None:
    scene.begin(epoch=40)
    scene.add()
    scene.reaches("redis")
    seen = scene.row.epoch
    held = scene.hold(key)
    # As a backup was that has been restored, before any process looks again.
    scene.change_row(epoch=3, phase="db")
    scene.add("new")
    scene.reaches("drain", "new")
    row = scene.row
    assert row.epoch > seen
    assert f"Redis has seen epoch {seen} already" in row.why
    with scene.lock(key, timeout=15, alias="new") as lease:
        assert sent_at(lease) >= held.deadline
        assert lease.fencing_token > held.fencing_token
    scene.reaches("redis", "new")
    assert scene.row.epoch > row.epoch
    assert all(said["epoch"] > seen for said in heard.of_phase("redis", "new"))


def test_a_row_that_says_redis_in_an_older_epoch_is_left_for_the_database(
    scene: Scene, key: str
) -> None:
    scene.begin(epoch=40)
    scene.add()
    scene.reaches("redis")
    held = scene.hold(key)
    scene.change_row(epoch=3)
    scene.add("new")
    with pytest.raises(LockTimeout, match="Redis has lost its memory of locks"):
        scene.hold(key, alias="new")
    with scene.lock(key, timeout=15, alias="new") as lease:
        assert scene.store_of(lease) == "database"
        assert sent_at(lease) >= held.deadline


# An attempt to open Redis that comes late


def test_an_attempt_of_an_earlier_epoch_opens_nothing(fast: Scene, key: str) -> None:
    lease = fast.hold(key)
    epoch = fast.row.epoch
    late = Servers(fast.backend.redis)
    for earlier in (1, epoch - 1, epoch):
        assert late.open(earlier, 0) == epoch
        assert lease.owner_id in {holder.owner_id for holder in fast.backend.holders(key)}
        assert fast.lock(key, timeout=0).try_acquire() is None
        lease.extend()
    with fast.lock(f"{key} other", timeout=0):
        pass
    assert fast.row.phase == "redis"


def test_an_attempt_opens_once_at_most(scene: Scene, key: str) -> None:
    """Its request may arrive twice, or after that of a later attempt."""
    backend = scene.add()
    redis = backend.redis
    (hash_name,) = redis.servers.hashes

    def leave(nonce: bytes) -> None:
        redis.servers.run(hash_name, script("mark"), 2, packed((b"n", nonce)))

    def send(epoch: int, nonce: bytes) -> bytes:
        words = packed((epoch_word(epoch), nonce, b"%d" % 1))
        answer: bytes = redis.servers.run(hash_name, script("open"), 3, words)
        return answer

    leave(b"first")
    leave(b"second")
    # Another has begun since.
    assert send(5, b"first") == b"N"
    assert send(6, b"second") == b"O"
    redis.servers.speak(epoch_word(6))
    granted = redis.try_acquire(scene.request(key, ttl=20))
    assert isinstance(granted, Grant)
    assert send(6, b"second") == b"N"
    assert send(7, b"second") == b"N"
    assert send(7, b"") == b"N"
    (holder,) = redis.holders(key)
    assert holder.owner_id == granted.owner_id
    # One that is late, and has left its nonce before it was.
    leave(b"third")
    assert send(6, b"third") == b"e6"
    assert redis.holders(key)
    assert redis.release(granted) is True


def test_an_opening_clears_what_was_there_and_keeps_the_tokens(scene: Scene, key: str) -> None:
    backend = scene.add()
    redis, servers = backend.redis, Servers(backend.redis)
    assert servers.open(5, 0) == 0
    redis.servers.speak(epoch_word(5))
    keys = [f"{key} {number}" for number in range(3)]
    grants = [
        redis.try_acquire(scene.request(keys[0], ttl=20)),
        redis.try_acquire(scene.request(keys[1], ttl=20, mode="shared")),
        redis.try_acquire(scene.request(keys[2], ttl=20, mode="permit", limit=2)),
    ]
    assert all(isinstance(grant, Grant) for grant in grants)
    tokens = [grant.fencing_tokens[0] for grant in grants if isinstance(grant, Grant)]
    assert servers.open(6, 0) == 0
    redis.servers.speak(epoch_word(6))
    assert redis.holders() == []
    with scene.server.client() as client:
        # Nothing of the namespace is left behind beside the record.
        names = client.keys(f"*{scene.name}*")
    assert names == redis.servers.hashes
    for one in keys:
        granted = redis.try_acquire(scene.request(one))
        assert isinstance(granted, Grant)
        assert granted.fencing_tokens[0] > max(tokens)
        tokens.append(granted.fencing_tokens[0])
    ahead = max(tokens) + 10**12
    assert servers.open(7, ahead) == 0
    redis.servers.speak(epoch_word(7))
    granted = redis.try_acquire(scene.request(key))
    assert isinstance(granted, Grant)
    assert granted.fencing_tokens[0] > ahead


def test_what_redis_has_of_an_epoch_without_a_row_is_not_trusted(fast: Scene, key: str) -> None:
    """It was opened by an attempt whose answer was lost; the row went another way."""
    fast.hold(f"{key} 1")
    epoch = fast.row.epoch
    assert Servers(fast.backend.redis).open(epoch + 1, 0) == 0
    with pytest.raises(LockTimeout, match="Redis has lost its memory"):
        fast.hold(key)
    fast.reaches("drain")
    with fast.lock(key, timeout=15) as lease:
        assert fast.store_of(lease) == "database"
        # As long as if somebody had been granted something there.
        assert lease.waited >= MAX_TTL
    fast.reaches("redis")
    assert fast.row.epoch > epoch + 1


# On every database


@pytest.mark.parametrize(
    "database", ["sqlite", "portable_sqlite", "postgres", "portable_postgres", "mariadb"]
)
def test_the_authority_goes_round_on_every_database(
    make_scene: Callable[..., Scene], database: str, key: str
) -> None:
    scene = make_scene(database)
    backend = scene.add()
    with scene.lock(key, timeout=0) as lease:
        assert scene.store_of(lease) == "redis"
        tokens = [lease.fencing_token]
    backend.authority.drain("Redis is to be replaced.")
    assert scene.row.pinned
    # Another process has waited already.
    scene.change_row(phase="db")
    backend.authority.look()
    with scene.lock(key, timeout=0) as lease:
        assert scene.store_of(lease) == "database"
        tokens.append(lease.fencing_token)
        with scene.lock(f"{key} 1", f"{key} 2", timeout=0):
            pass
        assert scene.lock(key, timeout=0).try_acquire() is None
    with scene.lock(key, timeout=0, shared=True), scene.lock(key, timeout=0, shared=True):
        pass
    backend.authority.resume("Redis has been replaced.", end_leases=False)
    scene.reaches("redis")
    with scene.lock(key, timeout=0) as lease:
        assert scene.store_of(lease) == "redis"
        tokens.append(lease.fencing_token)
    assert tokens == sorted(set(tokens))
    # Longer terms of another process.
    scene.add("longer", max_ttl=3 * MAX_TTL)
    scene.hold(f"{key} more", alias="longer")
    assert scene.row.max_ttl == 3 * MAX_TTL * 1_000_000


@pytest.mark.parametrize("phase", ["redis", "db"])
def test_who_remembers_a_later_epoch_does_not_believe_the_row(
    fast: Scene, key: str, phase: str
) -> None:
    fast.hold(key)
    latest = fast.row.epoch
    # As a backup had it, for instance.
    fast.change_row(epoch=latest - 1, phase=phase)
    assert fast.backend.authority.look().phase == "drain"
    row = fast.row
    assert row.epoch == latest + 1
    assert f"Epoch {latest} has been here already" in row.why
