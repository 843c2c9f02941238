"""Fencing tokens grow whatever single servers forget, and whatever their clocks say."""

from typing import Any

import pytest

from distlocks import LockTimeout, NotSupported, db_lock, locks
from distlocks.backends.redlock import RedlockBackend
from distlocks.claims import Denial, Grant, Request, claims_on, from_us, to_us
from distlocks.identity import new_owner_id
from tests.integration.redlock.conftest import Make, on_each
from tests.integration.redlock.one_server import OneServer
from tests.servers.redis_groups import IndependentGroup
from tests.waiting import eventually


def token_of(key: str, alias: str = "redlock", **options: Any) -> int:
    with db_lock(key, backend=alias, timeout=5, **options) as lease:
        return lease.fencing_token


def ahead(backend: RedlockBackend, seconds: float) -> None:
    """Have it believe that the servers' clocks are ahead by so much."""
    for node in backend.nodes:
        # Of some, the answer was not waited for.
        if node.ahead_us is not None:
            node.ahead_us += seconds * 1_000_000


def test_one_round_of_questions_is_enough_where_clocks_agree(make: Make, key: str) -> None:
    backend = make()
    eventually(lambda: is_as_proposed(key))
    before = [calls(backend, number) for number in range(5)]
    for _ in range(10):
        token_of(key)
    eventually(
        lambda: [calls(backend, n) - before[n] for n in range(5)] == [20] * 5  # taken, released
    )


def is_as_proposed(key: str) -> bool:
    """Whether the token is the time of asking. For a while after a quarantine it is not."""
    with db_lock(key, backend="redlock", timeout=5) as lease:
        return lease.acquired_at == from_us(lease.fencing_token)


def calls(backend: RedlockBackend, number: int) -> int:
    from distlocks.backends.redis.wire import pack

    node = backend.nodes[number]
    told = node.servers.ask(node.hash_name, pack(b"INFO", b"commandstats")).decode()
    lines = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    stats = lines.get("cmdstat_evalsha", "calls=0,")
    return int(stats.partition("calls=")[2].partition(",")[0])


def test_a_proposal_that_is_too_low_is_raised(make: Make, key: str) -> None:
    backend = make()
    first = token_of(key)
    ahead(backend, -60)
    second = token_of(key)
    assert second > first
    # The servers' own clocks have been heard since.
    assert token_of(key) > second


def test_a_common_token_is_put_on_a_majority(make: Make, key: str) -> None:
    """Each server had another last token on the key."""
    backend = make()
    token_of(key)
    for number in range(5):
        raise_record(OneServer(backend, number), key, to_us(10 + number))
    lease = db_lock(key, backend="redlock", timeout=0).acquire()
    eventually(lambda: on_each(backend, key) == [lease.owner_id] * 5)
    tokens = [node.half.holders(key)[0].fencing_token for node in backend.nodes]
    assert sum(token == lease.fencing_token for token in tokens) >= 3
    assert lease.release() is True
    assert token_of(key) > lease.fencing_token


def raise_record(server: OneServer, key: str, us: int) -> None:
    was = server.field(key)
    assert was is not None
    server.ask("HSET", key, f"{was[:16]}{int(was[16:32]) + us:016d}{was[32:]}")


def test_a_proposal_far_ahead_is_refused_and_made_again(make: Make, key: str) -> None:
    backend = make()
    first = token_of(key)
    ahead(backend, 3600)
    assert 0 < token_of(key) - first < to_us(60)


def test_they_grow_though_one_server_after_the_other_forgets(
    five: IndependentGroup, make: Make, key: str
) -> None:
    """None of the last majority remembers the first token in the end."""
    backend = make(ttl=1.0)
    tokens = []
    for member in five.members:
        tokens.append(token_of(key))
        member.ask("FLUSHALL")
        tokens.append(token_of(key))
        eventually(lambda: all(votes(backend)))
    tokens.append(token_of(key))
    assert tokens == sorted(set(tokens))


def votes(backend: RedlockBackend) -> list[bool]:
    return [node.half.quarantine() == 0 for node in backend.nodes]


def test_a_server_that_has_forgotten_begins_above_what_it_knew(
    five: IndependentGroup, make: Make, key: str
) -> None:
    """Also if who asks believes that it is still yesterday."""
    backend = make(ttl=1.0)
    before = token_of(key)
    for member in five.members:
        member.ask("FLUSHALL")
    with pytest.raises(LockTimeout, match="have new memories of locks"):
        db_lock(key, backend="redlock", timeout=0).acquire()
    eventually(lambda: all(votes(backend)))
    ahead(backend, -86400)
    assert token_of(key) > before


def test_what_is_under_way_of_an_earlier_try_touches_nothing_of_a_later_one(
    make: Make, key: str
) -> None:
    """Of one asker, who asks again under its owner id: its earlier request arrives late, and so
    does what undoes it."""
    backend = make()
    request = Request(claims=claims_on([key]), owner_id=new_owner_id(), ttl_us=to_us(2))
    early = backend._ask(request, float("inf"))
    assert early.is_granted
    grant = backend.try_acquire(request)
    assert isinstance(grant, Grant)
    eventually(lambda: on_each(backend, key) == [request.owner_id] * 5)
    undo_first_try(backend, request, key)
    assert on_each(backend, key) == [request.owner_id] * 5
    assert backend.release(grant) is True


def undo_first_try(backend: RedlockBackend, request: Request, key: str) -> None:
    """What would undo the first of two tries, on all servers."""
    first = next(backend._tries) - 2
    for number in range(5):
        assert OneServer(backend, number).release(request.owner_id, key, number=first) == "0"


@pytest.mark.parametrize("options", [{"shared": True}, {"limit": 3}], ids=["shared", "permits"])
def test_what_a_majority_cannot_decide_is_refused_by_name(
    make: Make, key: str, options: dict[str, Any]
) -> None:
    make()
    with pytest.raises(NotSupported, match="RedlockBackend"):
        db_lock(key, backend="redlock", timeout=0, **options).acquire()


def test_so_are_tree_keys(make: Make, key: str) -> None:
    make()
    with pytest.raises(NotSupported, match="tree keys"):
        db_lock((key, "below"), backend="redlock", timeout=0).acquire()
    assert isinstance(locks["redlock"], RedlockBackend)


def test_a_split_vote_is_none(make: Make, key: str) -> None:
    """Two have two servers each, and the fifth is quarantined: who asks is told that it may ask
    again soon, and not that somebody has it."""
    backend = make()
    token_of(key)
    for number, owner in ((0, "a"), (1, "a"), (2, "b"), (3, "b")):
        OneServer(backend, number).value(owner, 1, key)
    request = Request(claims=claims_on([key]), owner_id=new_owner_id(), ttl_us=to_us(2))
    denial = backend.try_acquire(request)
    assert isinstance(denial, Denial)
    assert denial.holders == ()
    assert denial.remaining == 0
    assert "at once" in denial.reason
    assert backend.holders(key) == []
