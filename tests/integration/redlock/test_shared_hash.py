"""Aliases that differ in how long their leases may last, on the same servers in one namespace."""

from collections.abc import Sequence

import pytest

from distlocks import LockTimeout, db_lock
from distlocks.backends.redlock import RedlockBackend
from distlocks.clock import lease_now
from tests.integration.redlock.conftest import Make
from tests.integration.redlock.one_server import SECOND, OneServer
from tests.servers.redis_groups import IndependentGroup

# Seconds for which a server keeps out of it that has lost its memory: as long as a lease of the
# alias may last, and twice the difference of the clocks.
LONG, SHORT = 3.2, 1.2


@pytest.fixture
def long(make: Make) -> RedlockBackend:
    return make("long", ttl=3.0)


@pytest.fixture
def short(make: Make) -> RedlockBackend:
    return make("short", ttl=1.0)


@pytest.mark.parametrize(
    "first", [("long", "short"), ("short", "long"), ("short",)], ids=" then ".join
)
def test_each_grants_again_when_its_own_leases_from_before_have_ended(
    five: IndependentGroup,
    long: RedlockBackend,
    short: RedlockBackend,
    key: str,
    first: Sequence[str],
) -> None:
    """Whoever of them finds that the servers have lost their memory, and whoever asks meanwhile."""
    held = db_lock(key, backend="long", timeout=0, renew=False).acquire()
    flushed = lease_now()
    for member in five.members:
        member.ask("FLUSHALL")
    for alias in first:
        with pytest.raises(LockTimeout, match="have new memories of locks"):
            db_lock(f"{key}:first", backend=alias, timeout=0).acquire()

    with db_lock(f"{key}:short", backend="short", timeout=20):
        assert lease_now() - flushed >= SHORT
    with db_lock(key, backend="long", timeout=20) as lease:
        assert lease_now() - flushed >= LONG
        assert lease_now() > held.deadline
        assert lease.fencing_token > held.fencing_token


@pytest.mark.parametrize("is_long_first", [True, False], ids=["long first", "short first"])
def test_each_is_told_how_long_it_has_to_wait_itself(
    five: IndependentGroup,
    long: RedlockBackend,
    short: RedlockBackend,
    key: str,
    is_long_first: bool,
) -> None:
    five.members[0].ask("FLUSHALL")
    # Seconds that they have to wait, and whom that is told.
    both = [(LONG, OneServer(long)), (SHORT, OneServer(short))]
    if not is_long_first:
        both.reverse()
    # The second time, both have asked before.
    for seconds, server in both * 2:
        letter, _, left = server.take("a", 1, key)
        assert letter == b"Q"
        assert seconds - 1 < left / SECOND <= seconds
