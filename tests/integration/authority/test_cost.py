"""What a lock costs while Redis grants: as much as without a fast path."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from distlocks import clock
from distlocks.backends.fastpath.row import AuthorityRow
from tests.integration.authority.scene import MODE_LEASE, Scene, numbered
from tests.statements import watched

CYCLES = 25


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """What is sent to the database over connections that are opened from now on."""
    sent: list[str] = []

    def note(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        sent.append(sql)
        return execute(sql, *args)

    with watched(note):
        yield sent


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the row was read, on the lease clock."""
    moments: list[float] = []
    real = AuthorityRow.read

    def read(row: AuthorityRow) -> Any:
        moments.append(clock.lease_now())
        return real(row)

    monkeypatch.setattr(AuthorityRow, "read", read)
    return moments


def calls(scene: Scene) -> dict[str, int]:
    """How often each command has been sent to Redis, other than by this test."""
    stats = scene.server.info("commandstats")
    by_scripts = ("info", "time", "hmget", "hset", "hget", "hdel", "hrandfield")
    ours = ("config", "client", "hello")
    return {
        name.removeprefix("cmdstat_"): int(one["calls"])
        for name, one in stats.items()
        if name.removeprefix("cmdstat_").split("|")[0] not in (*by_scripts, *ours)
    }


def test_a_cycle_takes_two_requests_and_no_statement(
    scene: Scene, statements: list[str], reads: list[float], key: str
) -> None:
    scene.add(mode_lease=60)
    keys = numbered(key)
    with scene.lock(next(keys), timeout=0):
        pass
    assert reads
    assert statements
    reads.clear()
    statements.clear()
    scene.server.ask("CONFIG", "RESETSTAT")
    for _ in range(CYCLES):
        with scene.lock(next(keys), timeout=0):
            pass
    assert calls(scene) == {"evalsha": 2 * CYCLES}
    assert reads == []
    assert statements == []


async def test_so_does_a_task(
    scene: Scene, statements: list[str], reads: list[float], key: str
) -> None:
    scene.add(mode_lease=60)
    keys = numbered(key)
    async with scene.lock(next(keys), timeout=0):
        pass
    reads.clear()
    statements.clear()
    scene.server.ask("CONFIG", "RESETSTAT")
    for _ in range(CYCLES):
        async with scene.lock(next(keys), timeout=0):
            pass
    assert calls(scene) == {"evalsha": 2 * CYCLES}
    assert reads == []
    assert statements == []


def test_the_row_is_read_about_twice_in_a_mode_lease(
    scene: Scene, reads: list[float], key: str
) -> None:
    scene.add()
    keys = numbered(key)
    with scene.lock(next(keys), timeout=0):
        pass
    reads.clear()
    cycles = 0
    while len(reads) < 4:
        with scene.lock(next(keys), timeout=0):
            cycles += 1
    gaps = [after - before for before, after in pairwise(reads)]
    # Each is due half of a mode lease after the last has begun, however often one asks.
    assert all(gap > MODE_LEASE / 3 for gap in gaps)
    assert cycles > len(reads)


def test_who_does_nothing_reads_nothing(scene: Scene, reads: list[float], key: str) -> None:
    scene.add()
    with scene.lock(key, timeout=0):
        pass
    reads.clear()
    began = clock.lease_now()
    while clock.lease_now() < began + 1.5 * MODE_LEASE:
        assert reads == []


def test_a_cycle_in_the_database_takes_two_statements(
    scene: Scene, statements: list[str], reads: list[float], key: str
) -> None:
    scene.begin(pinned=True)
    scene.add(mode_lease=60)
    for _ in range(2):
        with scene.lock(key, timeout=0):
            pass
    reads.clear()
    statements.clear()
    for _ in range(CYCLES):
        with scene.lock(key, timeout=0):
            pass
    assert len(statements) == 2 * CYCLES
    assert reads == []
