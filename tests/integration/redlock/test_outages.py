"""CASES 45 to 48: some servers are down, slow or late; no majority; a lease that took too long."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distlocks import BackendUnavailable, LeaseLost, LockTimeout, db_lock
from distlocks.backends.redlock import RedlockBackend
from distlocks.claims import Extension, Grant, to_us
from distlocks.clock import lease_now
from tests.integration.redlock.conftest import NODE_TIMEOUT, TTL, Make, on_each, through
from tests.servers.proxy import FaultProxy
from tests.servers.redis_groups import IndependentGroup
from tests.waiting import eventually

Start = Callable[..., Future[Any]]


def lock(key: str, alias: str = "redlock", **options: Any) -> db_lock:
    return db_lock(key, backend=alias, **options)


@pytest.mark.parametrize("down", [1, 2])
@pytest.mark.parametrize("how", ["killed", "paused"])
def test_a_minority_that_is_down_is_in_nobodys_way(
    five: IndependentGroup, make: Make, key: str, down: int, how: str
) -> None:
    make()
    with lock(f"{key}:warm", timeout=0):
        pass
    for member in five.members[:down]:
        member.kill() if how == "killed" else member.pause()
    tokens = []
    for _ in range(5):
        with lock(key, timeout=0) as lease:
            tokens.append(lease.fencing_token)
            lease.extend()
            with pytest.raises(LockTimeout):
                lock(key, timeout=0).acquire()
    assert tokens == sorted(set(tokens))


def test_a_server_that_is_back_votes_again(five: IndependentGroup, make: Make, key: str) -> None:
    backend = make()
    five.members[0].kill()
    with lock(key, timeout=0):
        pass
    five.members[0].start()
    five.members[1].kill()
    five.members[2].kill()
    # Empty, it has to keep out of it first.
    with lock(key, timeout=TTL * 3):
        assert on_each_but(backend, key, down=2) == 3


def on_each_but(backend: RedlockBackend, key: str, down: int) -> int:
    running = [node for node in backend.nodes if not node.is_absent]
    assert len(running) == len(backend.nodes) - down
    return sum(bool(node.half.holders(key)) for node in running)


@pytest.mark.parametrize("how", ["killed", "paused"])
def test_without_a_majority_nobody_is_granted_anything(
    five: IndependentGroup, make: Make, key: str, how: str
) -> None:
    backend = make()
    with lock(f"{key}:warm", timeout=0):
        pass
    for member in five.members[:3]:
        member.kill() if how == "killed" else member.pause()
    began = lease_now()
    with pytest.raises(BackendUnavailable, match=r"3 of the 5 .* no majority") as caught:
        lock(key, timeout=60).acquire()
    assert caught.value.keys == (key,)
    assert lease_now() - began < NODE_TIMEOUT * 6
    for member in five.members[:3]:
        member.start() if how == "killed" else member.resume()
    # Also those that did later what they had been asked.
    eventually(lambda: on_each(backend, key) == [""] * 5)


def test_with_every_server_down_an_error_comes_in_time(
    five: IndependentGroup, make: Make, key: str
) -> None:
    backend = make()
    for member in five.members:
        member.kill()
    began = lease_now()
    for verb in (
        lambda: lock(key, timeout=60).acquire(),
        lambda: backend.holders(),
        lambda: backend.force_release(key),
        lambda: backend.quarantine(),
    ):
        with pytest.raises(BackendUnavailable, match=r"\d of the 5 Redis servers"):
            verb()
    assert lease_now() - began < NODE_TIMEOUT * 20


class TestRefused:
    """Somebody else has it, and what was taken in vain is freed."""

    def test_on_the_servers_that_had_been_free(
        self, five: IndependentGroup, make: Make, key: str
    ) -> None:
        backend = make()
        for member in five.members[:2]:
            member.kill()
        held = lock(key, timeout=0).acquire()
        for member in five.members[:2]:
            member.start()
        eventually(lambda: backend.quarantine(end=True) == 0 and not absent(backend))
        assert on_each(backend, key)[:2] == ["", ""]
        with pytest.raises(LockTimeout) as caught:
            lock(key, timeout=0).acquire()
        assert caught.value.holders[0].owner_id == held.owner_id
        assert on_each(backend, key) == ["", "", *[held.owner_id] * 3]

    def test_on_those_that_answer_late(
        self, five: IndependentGroup, make: Make, proxies: list[FaultProxy], key: str
    ) -> None:
        """They have done what they were asked, and are heard of when all is over."""
        backend = make(urls=through(proxies))
        quick = make("quick")
        grant = lock(f"{key}:warm", timeout=0).acquire()
        grant.release()
        # Nobody asks these three but through the proxies.
        for member in five.members[2:]:
            member.pause()
        for proxy in proxies[:2]:
            proxy.answers = "blackhole"
        with pytest.raises(BackendUnavailable):
            lock(key, timeout=0).acquire()
        for member in five.members[2:]:
            member.resume()
        for proxy in proxies[:2]:
            proxy.mode = "pass"
        eventually(lambda: on_each(quick, key) == [""] * 5)
        assert backend.alias != quick.alias

    def test_a_release_that_a_server_has_not_heard_of_is_told_it_when_it_is_back(
        self, five: IndependentGroup, make: Make, proxies: list[FaultProxy], key: str
    ) -> None:
        make(urls=through(proxies), ttl=30)
        quick = make("quick", ttl=30)
        lease = lock(key, timeout=0).acquire()
        eventually(lambda: on_each(quick, key) == [lease.owner_id] * 5)
        proxies[0].mode = "reset"
        assert lease.release() is True
        eventually(lambda: on_each(quick, key) == [lease.owner_id, "", "", "", ""])
        proxies[0].mode = "pass"

        def is_told() -> bool:
            with lock(f"{key}:other", timeout=0):
                return on_each(quick, key) == [""] * 5

        eventually(is_told)


def absent(backend: RedlockBackend) -> bool:
    """Whether a server is taken for absent, after it has been asked."""
    with lock("somebody:asks", backend.alias, timeout=0):
        return any(node.is_absent for node in backend.nodes)


class TestValidity:
    """What is left of a lease counts from before it was asked for."""

    def test_a_grant_that_took_longer_than_the_lease_is_none(
        self, five: IndependentGroup, make: Make, proxies: list[FaultProxy], key: str
    ) -> None:
        backend = make(urls=through(proxies), ttl=1.0, node_timeout=5)
        quick = make("quick", ttl=1.0)
        lock(f"{key}:warm", timeout=0).acquire().release()
        for proxy in proxies[:3]:
            proxy.delay, proxy.answers = 1.1, "delay"
        answer = backend.try_acquire(request(backend, key))
        assert not isinstance(answer, Grant)
        eventually(lambda: on_each(quick, key) == [""] * 5)

    def test_a_lease_lasts_from_the_time_of_asking(
        self, make: Make, proxies: list[FaultProxy], key: str
    ) -> None:
        make(urls=through(proxies), node_timeout=5)
        lock(f"{key}:warm", timeout=0).acquire().release()
        for proxy in proxies[:3]:
            proxy.delay, proxy.answers = 0.4, "delay"
        before = lease_now()
        lease = lock(key, timeout=0, renew=False).acquire()
        assert lease_now() - before >= 0.4
        assert lease.deadline <= before + 0.01 + TTL * 0.99

    def test_an_extension_needs_a_majority_that_still_has_the_key(
        self, five: IndependentGroup, make: Make, key: str
    ) -> None:
        backend = make()
        lease = lock(key, timeout=0, renew=False).acquire()
        eventually(lambda: on_each(backend, key) == [lease.owner_id] * 5)
        for member in five.members[:2]:
            member.ask("FLUSHALL")
        lease.extend()
        five.members[2].ask("FLUSHALL")
        # Three that have forgotten it keep out of it: nobody can be let in, nor go on.
        with pytest.raises((LeaseLost, BackendUnavailable)):
            lease.extend()
        with pytest.raises(LockTimeout, match="3 of the 5 Redis servers have new memories"):
            lock(key, timeout=0).acquire()


def request(backend: RedlockBackend, key: str) -> Any:
    from distlocks.claims import Request, claims_on
    from distlocks.identity import new_owner_id

    return Request(claims=claims_on([key]), owner_id=new_owner_id(), ttl_us=to_us(1.0))


def test_an_interrupted_extension_is_no_loss(
    make: Make, proxies: list[FaultProxy], key: str
) -> None:
    """Of two servers, nobody knows: the lease lasts until its deadline, and is extended later."""
    backend = make(urls=through(proxies))
    lease = lock(key, timeout=0, renew=False).acquire()
    for proxy in proxies[:3]:
        proxy.answers = "blackhole"
    extension = Extension(grant=lease._grant, ttl_us=to_us(TTL))
    with pytest.raises(BackendUnavailable):
        backend.extend([extension])
    assert not lease.lost
    for proxy in proxies[:3]:
        proxy.mode = "pass"
    eventually(lambda: extended(backend, extension), within=TTL / 2)
    assert lease.release() is True


def extended(backend: RedlockBackend, extension: Extension) -> bool:
    try:
        return bool(backend.extend([extension]).extended)
    except BackendUnavailable:
        time.sleep(0.02)
        return False


def test_servers_that_close_idle_connections_are_asked_again(
    five: IndependentGroup, make: Make, key: str
) -> None:
    make()
    lock(key, timeout=0).acquire().release()
    for member in five.members:
        member.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    lock(key, timeout=0).acquire().release()


def test_many_threads_share_the_connections(make: Make, start: Start, key: str) -> None:
    make(max_connections=4)
    tokens: list[int] = []

    def work() -> None:
        for _ in range(5):
            with lock(key, timeout=30) as lease:
                tokens.append(lease.fencing_token)

    for running in [start(work) for _ in range(8)]:
        running.result(30)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 40
