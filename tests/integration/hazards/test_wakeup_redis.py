"""Waiters of the database backend that are woken through Redis: first come, first served, and
nothing but speed is lost with it."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from distlocks import Lease, LockTimeout, db_lock, locks
from distlocks.backends.database import DatabaseBackend
from distlocks.backends.redis.scripts import script
from distlocks.backends.redis.turns import Turns
from distlocks.claims import Request, claims_on
from distlocks.clock import lease_now
from distlocks.identity import new_owner_id
from distlocks.renewal import renewer
from tests.servers.children import Spawner
from tests.servers.redis import RedisServer
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("databases")

Start = Callable[..., Future[Any]]
STORES = ("sqlite", "portable_sqlite", "postgres", "portable_postgres", "mariadb")
FOR_LONG_RUNS = ("portable_sqlite", "portable_postgres")
# Far longer than a look of the database's own takes.
SOON = 4.0


@pytest.fixture
def server(fresh_redis: RedisServer) -> RedisServer:
    return fresh_redis


@pytest.fixture(
    params=[
        pytest.param(store, marks=[pytest.mark.soak] if store in FOR_LONG_RUNS else [])
        for store in STORES
    ]
)
def woken(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[DatabaseBackend]:
    """The alias "default": a database whose waiters are woken through the server."""
    entry: dict[str, Any] = settings.DISTLOCKS[request.param]
    changed = entry | {"OPTIONS": entry["OPTIONS"] | {"wakeup": "redis"}}
    redis = {
        "BACKEND": "distlocks.backends.redis.RedisBackend",
        "OPTIONS": {"url": server.url},
    }
    with override_settings(DISTLOCKS={"default": changed, "redis": redis}):
        backend = locks["default"]
        assert isinstance(backend, DatabaseBackend)
        yield backend
        renewer.releases.settle()
        locks.close_all()


def queued(server: RedisServer, key: str) -> int:
    return int(server.client().zcard(f"{{distlocks.turns}}:q:{key}"))


def wait_in_turn(server: RedisServer, key: str, start: Start, count: int) -> list[Future[Lease]]:
    """So many waiters, each begun when the one before it stood in the queue."""
    waiters = []
    for number in range(count):
        waiters.append(start(db_lock(key, timeout=30, renew=False).acquire))
        eventually(lambda number=number: queued(server, key) == number + 1)  # type: ignore[misc]
    return waiters


def waiting_in(server: RedisServer, key: str) -> list[str]:
    found = server.client().zrange(f"{{distlocks.turns}}:q:{key}", 0, -1)
    return [owner.decode() for owner in found]


def a_request(key: str, waited: float) -> Request:
    return Request(
        claims=claims_on([key]),
        owner_id=new_owner_id(),
        ttl_us=10**7,
        asked_at=lease_now() - waited,
    )


def join(turns: Turns, request: Request, key: str) -> None:
    """Take a place in the queue, and do not wait."""
    words = turns._joining(request, key, b"nobody's")
    turns._servers.run(turns._servers.hash_name(key), script("turns_join"), 5, words)


class TestInTurn:
    def test_first_come_first_served(
        self,
        woken: DatabaseBackend,
        server: RedisServer,
        key: str,
        start: Start,
    ) -> None:
        lease = db_lock(key).acquire()
        waiters = wait_in_turn(server, key, start, 5)
        for waiter in waiters:
            assert lease.release()
            lease = waiter.result(SOON)
        assert lease.release()
        assert queued(server, key) == 0

    def test_who_finds_the_key_free_calls_nobody_past_the_one_that_has_been_called(
        self, woken: DatabaseBackend, server: RedisServer, key: str, start: Start
    ) -> None:
        """A release has called the first; a waiter that has just come to the queue sees the key
        free before the first has taken it."""
        turns = woken._sleepers._turns
        assert turns is not None
        requests = [a_request(key, waited=3 - number) for number in range(3)]
        for request in requests:
            turns.denied(request, key)
            join(turns, request, key)
        first, second, third = [request.owner_id for request in requests]
        turns.call(key, released_by="whoever had it")
        turns.call(key)
        turns.call(key, released_by="who was faster than the first")
        assert waiting_in(server, key) == [second, third]
        # It has tried in vain, and has its place again.
        join(turns, requests[0], key)
        turns.call(key)
        assert waiting_in(server, key) == [second, third]
        # It has had the key, and released it.
        turns.call(key, released_by=first)
        assert waiting_in(server, key) == [third]
        turns.call(key, released_by=None)
        assert waiting_in(server, key) == []

    async def test_tasks_wait_on_their_event_loop(
        self, woken: DatabaseBackend, server: RedisServer, key: str
    ) -> None:
        lease = await db_lock(key).aacquire()

        async def work() -> None:
            async with db_lock(key, timeout=30):
                pass

        tasks = [asyncio.create_task(work()) for _ in range(5)]
        await asyncio.to_thread(lambda: eventually(lambda: queued(server, key) == 5))
        async with asyncio.timeout(SOON):
            await lease.arelease()
            await asyncio.gather(*tasks)
        assert queued(server, key) == 0

    def test_who_gives_up_leaves_the_queue(
        self,
        woken: DatabaseBackend,
        server: RedisServer,
        key: str,
        start: Start,
    ) -> None:
        lease = db_lock(key).acquire()
        with pytest.raises(LockTimeout):
            db_lock(key, timeout=0.1).acquire()
        assert queued(server, key) == 0
        (waiter,) = wait_in_turn(server, key, start, 1)
        lease.release()
        waiter.result(SOON).release()

    def test_a_waiter_that_was_killed_does_not_keep_the_next_from_its_turn(
        self,
        woken: DatabaseBackend,
        server: RedisServer,
        key: str,
        spawn: Spawner,
        start: Start,
    ) -> None:
        lease = db_lock(key).acquire()
        using = woken.using
        child = spawn(
            """
            from django.test import override_settings
            from distlocks import db_lock
            with override_settings(DISTLOCKS=entries):
                db_lock(key, timeout=60).acquire()
            """,
            key=key,
            entries=settings.DISTLOCKS,
        )
        eventually(lambda: queued(server, key) == 1)
        waiter = start(db_lock(key, timeout=30).acquire)
        eventually(lambda: queued(server, key) == 2)
        child.kill()
        lease.release()
        waiter.result(5 + SOON).release()
        assert using == woken.using


class TestWithoutRedis:
    def test_the_database_alone_says_who_has_a_key(
        self, woken: DatabaseBackend, server: RedisServer, key: str
    ) -> None:
        lease = db_lock(key).acquire()
        server.client().flushall()
        assert db_lock(key, timeout=0.1).try_acquire() is None
        assert lease.release()

    @pytest.mark.parametrize("how", ["kill", "pause"])
    def test_what_is_lost_is_speed(
        self,
        woken: DatabaseBackend,
        server: RedisServer,
        key: str,
        how: str,
        start: Start,
    ) -> None:
        lease = db_lock(key).acquire()
        waiters = wait_in_turn(server, key, start, 3)
        getattr(server, how)()
        try:
            for _ in range(3):
                assert lease.release()
                eventually(lambda: any(one.done() for one in waiters))
                (done,) = [one for one in waiters if one.done()]
                waiters.remove(done)
                lease = done.result()
            # And from the beginning.
            waiter = start(db_lock(key, timeout=30).acquire)
            eventually(lambda: not waiter.done())
            assert lease.release(), lease
            lease = waiter.result(SOON)
        finally:
            server.resume() if how == "pause" else server.start()
        lease.release()
        # It comes back by itself.
        lease = db_lock(key).acquire()
        eventually(lambda: woken._sleepers._turns.usable)  # type: ignore[union-attr]
        # What was sent to a server that stood still, it has done since.
        others = queued(server, key)
        last = start(db_lock(key, timeout=30).acquire)
        eventually(lambda: queued(server, key) == others + 1)
        lease.release()
        last.result(10).release()


class TestSettings:
    @pytest.mark.parametrize(
        ("alias", "said"),
        [
            ("absent", "'wakeup'] = 'absent' is no alias"),
            ("memory", "MemoryBackend, and no RedisBackend"),
            (3, "'wakeup'] = 3 is no alias"),
        ],
    )
    def test_what_is_no_redis_backend_is_refused(self, alias: Any, said: str, key: str) -> None:
        entry: dict[str, Any] = settings.DISTLOCKS["default"]
        wrong = entry | {"OPTIONS": entry["OPTIONS"] | {"wakeup": alias}}
        memory = settings.DISTLOCKS["memory"]
        with override_settings(DISTLOCKS={"default": wrong, "memory": memory}):
            with pytest.raises(ImproperlyConfigured) as caught:
                db_lock(key).acquire()
            assert said in str(caught.value)
