"""What befalls a fast path. Each returns when the authority is with Redis again, or has stayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.integration.fastpath.scene import PATIENCE, now_us
from tests.servers import processes

if TYPE_CHECKING:
    from tests.integration.fastpath.scene import Scene

Nemesis = Callable[["Scene"], None]


# What befalls Redis


def redis_killed(scene: Scene) -> None:
    """And started again, empty, only when the database has taken over."""
    began = now_us()
    scene.stores.primary.kill()
    scene.change("killed", began)
    scene.stores.primary.start()
    scene.come_back()


def redis_restarted_empty(scene: Scene) -> None:
    began = now_us()
    scene.stores.primary.kill()
    scene.stores.primary.start()
    scene.change("restarted empty", began)
    scene.come_back()


def redis_restarted_with_old_snapshot(scene: Scene) -> None:
    server = scene.stores.primary
    server.snapshot()
    # What the snapshot knows nothing of.
    scene.await_grants("redis")
    scene.hold_across()
    began = now_us()
    server.kill()
    server.start()
    for path in server.folder.glob("*.rdb"):
        path.unlink()
    scene.change("old snapshot", began)
    scene.come_back()


def redis_flushed(scene: Scene) -> None:
    began = now_us()
    scene.stores.primary.ask("FLUSHALL")
    scene.change("flushed", began)
    scene.come_back()


def redis_failed_over(scene: Scene) -> None:
    """To a replica that lags behind."""
    _let_replica_lag(scene)
    scene.hold_across()
    began = now_us()
    scene.stores.primary.kill()
    scene.stores.replica.promote()
    scene.stores.lead_to(scene.stores.replica)
    scene.change("failed over", began)
    scene.stores.swap()
    scene.come_back()


def redis_split(scene: Scene) -> None:
    """Some find the replica that was promoted, the others the old primary, which lives."""
    _let_replica_lag(scene)
    scene.hold_across()
    began = now_us()
    scene.stores.replica.promote()
    scene.stores.lead_to(scene.stores.replica, scene.stores.left)
    scene.change("split", began)
    scene.stores.swap()
    scene.come_back()


def _let_replica_lag(scene: Scene) -> None:
    primary, replica = scene.stores.primary, scene.stores.replica
    assert processes.wait_until(replica.is_replica_in_sync, PATIENCE, 0.02)
    # From here on it hears no more of the primary.
    replica.ask("REPLICAOF", primary.host, 1)
    scene.await_grants("redis")


# What befalls the network


def some_are_cut_off(scene: Scene) -> None:
    """Half of the workers cannot reach Redis, which the others do."""
    began = now_us()
    scene.stores.left.mode = "reset"
    scene.change("some cut off", began)
    scene.stores.left.mode = "pass"
    scene.come_back()


def answers_dropped(scene: Scene) -> None:
    """Redis does what it is asked, and nobody hears of it, or only much later."""
    began = now_us()
    for proxy in scene.stores.proxies:
        proxy.answers = "blackhole"
    scene.change("answers dropped", began)
    for proxy in scene.stores.proxies:
        proxy.mode = "pass"
    scene.come_back()


# What befalls the database and the workers


def database_restarted(scene: Scene) -> None:
    """When Redis grants no more without it."""
    began = now_us()
    scene.stores.postgres.kill()
    scene.await_outage()
    scene.stores.postgres.start()
    scene.store.reopened()
    scene.await_grants("redis")
    scene.settle("database restarted", began)


def workers_killed_and_paused(scene: Scene) -> None:
    """Holders, past their leases, renewed or not; others wait for their keys."""
    kinds = ("killed", "paused!", "paused")
    victims = scene.runners[: len(kinds)]
    scene.rig.faults(victims, scene.rig.keys, kinds)
    scene.replace(victims[0])
    scene.await_grants("redis")


def workers_paused_over_a_change(scene: Scene) -> None:
    """Who stood still while the authority changed goes on as if nothing had happened."""
    victims = scene.runners[:2]
    pids = [scene.rig.pid(victim) for victim in victims]
    for pid in pids:
        processes.freeze(pid)
    began = now_us()
    scene.stores.primary.ask("FLUSHALL")
    scene.change("flushed while some stood still", began)
    for pid in pids:
        processes.thaw(pid)
    scene.come_back()


SINGLE: tuple[Nemesis, ...] = (
    redis_killed,
    redis_restarted_empty,
    redis_restarted_with_old_snapshot,
    redis_flushed,
    redis_failed_over,
    redis_split,
    some_are_cut_off,
    answers_dropped,
    database_restarted,
    workers_killed_and_paused,
    workers_paused_over_a_change,
)
# Those after which the database has granted too.
CHANGING = tuple(n for n in SINGLE if n not in (database_restarted, workers_killed_and_paused))
