"""Six processes claim a few keys in every way at once: what they had is held against the table."""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from distlocks.clock import lease_now
from tests.integration.claims import crowd
from tests.integration.contract.stores import Store, for_stores
from tests.integration.rig import journal
from tests.servers.children import Child, Spawner

PROCESSES = 6
SECONDS = 2.5
SOAK_SECONDS = float(os.environ.get("DISTLOCKS_SOAK_SECONDS", "300"))
KINDS = ("sqlite", "postgres", "mariadb", "redis", "redis_cluster", "zookeeper")
TOGETHER = ("shared", "permit", "intention")

every_kind = for_stores(KINDS)


@dataclass
class Had:
    """One claim, for as long as its holder was sure of it."""

    key: str
    mode: str
    limit: int
    token: int
    since: float
    until: float
    pid: int


def begin(children: list[Child]) -> None:
    for child in children:
        child.expect("ready")
    for child in children:
        child.send()


def read(folder: Path, killed: dict[int, float]) -> list[Had]:
    """All that was had, from the journals."""
    found: dict[str, list[Had]] = {}
    for event in journal.read(folder):
        if event["event"] == "had":
            found[event["owner"]] = [
                Had(
                    key,
                    mode,
                    limit,
                    token,
                    event["at"],
                    min(killed.get(event["pid"], float("inf")), event["deadline"]),
                    event["pid"],
                )
                for (key, mode, limit), token in zip(event["claims"], event["tokens"], strict=True)
            ]
        elif event["event"] == "gives back":
            for had in found[event["owner"]]:
                had.until = event["at"]
    return [had for several in found.values() for had in several]


def violations(had: Iterable[Had]) -> list[str]:
    """What stands beside each other that must not, and tokens that did not grow."""
    wrong = []
    by_key: dict[str, list[Had]] = {}
    for one in sorted(had, key=lambda one: one.since):
        by_key.setdefault(one.key, []).append(one)
    for key, several in by_key.items():
        live: list[Had] = []
        tokens = Counter(one.token for one in several)
        wrong += [f"{key!r}: token {token} twice" for token, n in tokens.items() if n > 1]
        for one in several:
            if one.since >= one.until:
                # Stopped for so long that its lease was over before it had the answer.
                continue
            live = [other for other in live if other.until > one.since]
            for other in live:
                if one.mode != other.mode or one.mode not in TOGETHER:
                    wrong.append(f"{key!r}: {one} beside {other}")
            live.append(one)
            permits = sum(other.mode == "permit" for other in live)
            if one.mode == "permit" and permits > one.limit:
                wrong.append(f"{key!r}: {permits} permits of {one.limit}")
    return wrong


def run_crowd(
    store: Store, key: str, spawn: Spawner, folder: Path, seconds: float, **options: Any
) -> list[Had]:
    keys = [[key], [key, "a"], [key, "b"], [f"{key}:x"], [f"{key}:y"]]
    folder.mkdir()
    children = [
        spawn(
            crowd.claim,
            store.alias,
            keys,
            str(folder / f"{number}.jsonl"),
            number,
            seconds,
            **options,
        )
        for number in range(PROCESSES)
    ]
    begin(children)
    victim = children[0]
    children[1].pause()
    victim.kill()
    killed = {victim.pid: lease_now()}
    children[1].resume()
    for child in children[1:]:
        assert child.result(seconds + 60) > 0, "everybody gets a turn"
    return read(folder, killed)


@every_kind
def test_nobody_stands_beside_whom_the_table_keeps_apart(
    store: Store, key: str, spawn: Spawner, tmp_path: Path
) -> None:
    had = run_crowd(store, key, spawn, tmp_path / "journals", SECONDS)
    assert not violations(had), "\n".join(violations(had))
    assert {one.mode for one in had} == {"exclusive", "shared", "permit", "intention"}
    assert len(had) > 100


@pytest.mark.soak
@every_kind
def test_nobody_stands_beside_whom_the_table_keeps_apart_for_long(
    store: Store, key: str, spawn: Spawner, tmp_path: Path
) -> None:
    had = run_crowd(store, key, spawn, tmp_path / "journals", SOAK_SECONDS)
    assert not violations(had), "\n".join(violations(had))


@for_stores(["postgres"])
@pytest.mark.parametrize("control", ["", "one_statement"])
def test_counting_in_the_statement_that_latches_is_caught(
    store: Store, key: str, spawn: Spawner, control: str
) -> None:
    """It admitted 12 where 3 were allowed, when tried."""
    children = [
        spawn(crowd.count_permits, store.alias, key, 2.0, control) for _ in range(PROCESSES)
    ]
    begin(children)
    most = max(child.result(60) for child in children)
    assert (most > crowd.LIMIT) is bool(control), most


def test_the_checker_sees_each_kind_of_violation() -> None:
    def had(mode: str, since: float, until: float, token: int) -> Had:
        return Had("k", mode, 2, token, since, until, 1)

    assert violations([had("shared", 0, 2, 1), had("shared", 1, 3, 2)]) == []
    assert violations([had("exclusive", 0, 1, 1), had("exclusive", 1, 2, 2)]) == []
    assert violations([had("permit", n, 9, n) for n in range(2)]) == []
    assert violations([had("permit", n, 9, n) for n in range(3)])
    assert violations([had("exclusive", 0, 2, 1), had("exclusive", 1, 3, 2)])
    assert violations([had("shared", 0, 2, 1), had("permit", 1, 3, 2)])
    assert violations([had("intention", 0, 2, 1), had("shared", 1, 3, 2)])
    assert violations([had("shared", 0, 2, 1), had("shared", 1, 3, 1)])
    # Not one: the second's lease was over when it had the answer.
    assert violations([had("shared", 0, 2, 1), had("exclusive", 1, 0.9, 2)]) == []


def both_ways(store: Store, key: str, spawn: Spawner, seconds: float) -> None:
    a, b = f"{key}:a", f"{key}:b"
    children = [
        spawn(crowd.lock_both_ways, store.alias, *((a, b) if number % 2 else (b, a)), seconds)
        for number in range(8)
    ]
    begin(children)
    assert all(child.result(seconds + 60) > 0 for child in children)
    assert store.backend.holders(key) == []


@every_kind
def test_a_and_b_against_b_and_a(store: Store, key: str, spawn: Spawner) -> None:
    both_ways(store, key, spawn, 2.0)


@pytest.mark.soak
@every_kind
def test_a_and_b_against_b_and_a_for_long(store: Store, key: str, spawn: Spawner) -> None:
    both_ways(store, key, spawn, 10.0)
