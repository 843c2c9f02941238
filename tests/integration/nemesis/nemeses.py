"""What befalls the servers and the workers. Each returns when it has healed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.servers import processes
from tests.servers.redis import RedisServer

if TYPE_CHECKING:
    from tests.integration.nemesis.scene import Scene

Nemesis = Callable[["Scene"], None]
# Seconds for which the network is at fault.
FAULT = 0.8
# Of a flood: bytes of each value, how many at once, and what the server may hold of it.
FLOOD_VALUE, FLOOD_BATCH, FLOOD_ROOM = 20_000, 50, 4_000_000


# What befalls the servers


def restarted_empty(scene: Scene) -> None:
    server = scene.server
    server.kill()
    for path in server.folder.glob("*.rdb"):
        path.unlink()
    server.start()


def restarted_with_old_snapshot(scene: Scene) -> None:
    server = scene.server
    server.snapshot()
    # What the snapshot knows nothing of: leases that began after it, and later tokens.
    scene.await_grants(1)
    scene.hold_across()
    server.kill()
    server.start()
    # Not for the next restart.
    for path in server.folder.glob("*.rdb"):
        path.unlink()


def flushed(scene: Scene) -> None:
    for server in scene.topology.primaries:
        server.ask("FLUSHALL")


def scripts_flushed(scene: Scene) -> None:
    for server in scene.topology.primaries:
        server.ask("SCRIPT", "FLUSH")


def locks_and_scripts_flushed(scene: Scene) -> None:
    scripts_flushed(scene)
    flushed(scene)


def evicted(scene: Scene) -> None:
    """Other keys, newer ones, fill the server that evicts what was used least recently."""
    server = scene.server
    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    server.ask("CONFIG", "SET", "maxmemory", server.info("memory")["used_memory"] + FLOOD_ROOM)
    # Busy locks are not the least recently used: nobody asks while others hold theirs.
    with scene.standing_still():
        _flood(server, scene.hash_name)
    for name in ("maxmemory", "maxmemory-policy"):
        server.ask("CONFIG", "SET", name, {"maxmemory": "0"}.get(name, "noeviction"))
    with server.client() as client:
        for number in itertools.count():
            if not client.delete(*[f"flood:{number}:{one}" for one in range(FLOOD_BATCH)]):
                break


def _flood(server: RedisServer, hash_name: bytes) -> None:
    give_up = time.monotonic() + 5
    with server.client() as client:
        for number in itertools.count():
            with client.pipeline(transaction=False) as pipeline:
                for one in range(FLOOD_BATCH):
                    # Few enough names that they can be removed again.
                    pipeline.set(f"flood:{number % 100}:{one}", b"x" * FLOOD_VALUE)
                pipeline.execute()
            # To look does not count as a use.
            if not client.exists(hash_name):
                return
            assert time.monotonic() < give_up, "the locks were not evicted"


def failed_over(scene: Scene) -> None:
    scene.topology.fail_over(scene.hash_name)


# What befalls the network


def answers_delayed(scene: Scene) -> None:
    scene.proxy.delay = 0.05
    scene.proxy.answers = "delay"
    time.sleep(FAULT)
    scene.proxy.mode = "pass"


def answers_dropped(scene: Scene) -> None:
    """The server does what it is asked, and nobody hears of it, or only much later."""
    scene.proxy.answers = "blackhole"
    time.sleep(FAULT)
    scene.proxy.mode = "pass"


def requests_held_back(scene: Scene) -> None:
    """They arrive when their senders have long given up."""
    scene.proxy.requests = "blackhole"
    time.sleep(FAULT)
    scene.proxy.mode = "pass"


def connections_cut(scene: Scene) -> None:
    """Again and again, in the middle of requests; then new ones too."""
    for _ in range(10):
        scene.proxy.cut()
        time.sleep(FAULT / 20)
    scene.proxy.mode = "reset"
    time.sleep(FAULT / 2)
    scene.proxy.mode = "pass"


# What befalls some of five servers


def some_down(scene: Scene) -> None:
    """One, then two; then they are back, with what they knew."""
    members = scene.quorum.group.members[:2]
    for member in members:
        member.snapshot()
        member.kill()
        scene.await_grants(2)
    for member in members:
        member.start()


def some_restarted_empty(scene: Scene) -> None:
    """One after the other, until there is no majority that remembers."""
    for number, member in enumerate(scene.quorum.group.members[:3]):
        member.kill()
        for path in member.folder.glob("*.rdb"):
            path.unlink()
        member.start()
        if number < 2:
            scene.await_grants(1)


def some_paused(scene: Scene) -> None:
    """One, then two, which do later what they were asked meanwhile."""
    members = scene.quorum.group.members[1:3]
    for member in members:
        member.pause()
        scene.await_grants(2)
    for member in members:
        member.resume()


def some_slow(scene: Scene) -> None:
    for proxy in scene.quorum.proxies[:2]:
        proxy.delay = 0.1
        proxy.answers = "delay"
        scene.await_grants(2)
    for proxy in scene.quorum.proxies[:2]:
        proxy.mode = "pass"


def some_cut_off(scene: Scene) -> None:
    """One, then two, and for a while a third, of which the answers do not come back."""
    for proxy in scene.quorum.proxies[:2]:
        proxy.mode = "blackhole"
        scene.await_grants(2)
    scene.quorum.proxies[2].answers = "blackhole"
    time.sleep(FAULT)
    for proxy in scene.quorum.proxies[:3]:
        proxy.mode = "pass"


# What befalls the workers


def holders_killed_and_paused(scene: Scene) -> None:
    """Past their leases, renewed or not; others wait for their keys."""
    kinds = ("killed", "paused!", "paused", "killed!")[: len(scene.rig.keys)]
    victims = scene.runners[: len(kinds)]
    scene.rig.faults(victims, scene.rig.keys, kinds)
    for victim, kind in zip(victims, kinds, strict=True):
        if kind.startswith("killed"):
            scene.replace(victim)


def first_waiters_killed_and_paused(scene: Scene) -> None:
    """While others hold the keys. Who waits behind them is not kept from its turn."""
    rig = scene.rig
    scenes = []
    for key, fault in zip(rig.keys, (rig.kill, rig.pause), strict=False):
        holder, first, second = (rig.start("follower") for _ in range(3))
        rig.order(holder, "hold", key=key, ttl=scene.ttl, renew=True)
        rig.hear(holder, "holding")
        for waiter in (first, second):
            rig.order(waiter, "inherit", key=key, ttl=scene.ttl, timeout=None)
            scene.await_waiter(key, rig.pid(waiter))
        scenes.append((key, fault, holder, first, second))
    for _, fault, _, first, _ in scenes:
        fault(first)
    for _, _, holder, _, _ in scenes:
        rig.order(holder, "release")
        rig.hear(holder, "released")
    for _, fault, holder, first, second in scenes:
        assert rig.hear(second, "asked")["granted"]
        if fault == rig.pause:
            rig.resume(first)
        rig.order(second, "release")
        rig.hear(second, "released")
        rig.stop(holder, second)
        if fault == rig.pause:
            assert rig.hear(first, "asked")["granted"]
            rig.order(first, "release")
            rig.hear(first, "released")
            rig.stop(first)


def workers_killed_and_paused(scene: Scene) -> None:
    holders_killed_and_paused(scene)
    first_waiters_killed_and_paused(scene)


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    assert processes.wait_until(condition, seconds), f"did not come about within {seconds} s"


AMNESIAS: tuple[Nemesis, ...] = (restarted_empty, restarted_with_old_snapshot)
OF_WORKERS: tuple[Nemesis, ...] = (
    holders_killed_and_paused,
    first_waiters_killed_and_paused,
    workers_killed_and_paused,
)
# By what stands together: what can befall it.
NEMESES: dict[str, tuple[Nemesis, ...]] = {
    "alone": (*AMNESIAS, flushed, evicted, scripts_flushed, *OF_WORKERS[:2]),
    "proxied": (answers_delayed, answers_dropped, requests_held_back, connections_cut),
    "sentinel": (*AMNESIAS, locks_and_scripts_flushed, failed_over, workers_killed_and_paused),
    "quorum": (
        some_down,
        some_restarted_empty,
        some_paused,
        some_slow,
        some_cut_off,
        locks_and_scripts_flushed,
        holders_killed_and_paused,
    ),
    "cluster": (*AMNESIAS, locks_and_scripts_flushed, failed_over, workers_killed_and_paused),
}
