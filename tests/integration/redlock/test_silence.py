"""A server that says nothing keeps nobody from those that answer, whatever went wrong before."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

from distlocks import BackendUnavailable, LockTimeout, db_lock
from distlocks.backends.redlock import RedlockBackend, rounds
from distlocks.backends.redlock.rounds import Round
from distlocks.clock import lease_now
from tests.integration.redlock.conftest import NODE_TIMEOUT, TTL, Make, on_each, through
from tests.servers.proxy import FaultProxy
from tests.servers.redis_groups import IndependentGroup
from tests.waiting import eventually

Start = Callable[..., Future[Any]]


def lock(key: str, **options: Any) -> db_lock:
    return db_lock(key, backend="redlock", **options)


def silenced(make: Make, proxies: list[FaultProxy], key: str, *numbers: int) -> RedlockBackend:
    """A backend that has found these servers silent, and takes them for absent."""
    backend = make(urls=through(proxies))
    lock(key, timeout=0).acquire().release()
    for number in numbers:
        proxies[number].mode = "blackhole"

    def are_absent() -> bool:
        with suppress(BackendUnavailable, LockTimeout):
            lock(key, timeout=0).acquire().release()
        return all(backend.nodes[number].is_absent for number in numbers)

    eventually(are_absent)
    return backend


def test_those_that_are_back_are_asked_although_another_stays_silent(
    make: Make, proxies: list[FaultProxy], key: str
) -> None:
    silenced(make, proxies, key, 0, 1, 2)
    for proxy in proxies[:2]:
        proxy.mode = "pass"
    lock(key, timeout=0).acquire().release()


def test_those_that_are_back_are_asked_when_others_fall_silent(
    make: Make, proxies: list[FaultProxy], key: str
) -> None:
    silenced(make, proxies, key, 0, 1, 2)
    for proxy in proxies[:3]:
        proxy.mode = "pass"
    for proxy in proxies[3:]:
        proxy.mode = "blackhole"
    lock(key, timeout=0).acquire().release()


def test_a_process_that_stood_still_reads_what_has_come_meanwhile(
    make: Make, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers have answered in time, and are not to blame."""
    backend = make()
    lock(key, timeout=0).acquire().release()
    real, stood = rounds.real_now, [0.0]
    monkeypatch.setattr(rounds, "real_now", lambda: real() + stood[0])
    send = Round.send

    def send_and_stand_still(self: Round, *args: Any) -> None:
        send(self, *args)
        stood[0] += 10 * NODE_TIMEOUT
        eventually(lambda: len(self._poll.poll(0)) == 5)

    monkeypatch.setattr(Round, "send", send_and_stand_still)
    lease = lock(key, timeout=0).acquire()
    monkeypatch.undo()
    assert not any(node.is_absent for node in backend.nodes)
    assert lease.release() is True


def test_many_threads_of_a_new_process_are_not_kept_by_one_silent_server(
    five: IndependentGroup, make: Make, start: Start, key: str
) -> None:
    make()
    five.members[0].pause()
    running = [start(lock(f"{key}:{n}", timeout=0).acquire) for n in range(20)]
    for future in running:
        assert future.result(20).release() is True


def test_too_few_connections_are_waited_for(make: Make, start: Start, key: str) -> None:
    backend = make(max_connections=2)
    running = [start(lock(f"{key}:{n}", timeout=0).acquire) for n in range(16)]
    for future in running:
        future.result(20).release()
    assert not any(node.is_absent for node in backend.nodes)


def test_an_interrupt_while_connections_are_opened_costs_none(
    make: Make, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(max_connections=2)

    def interrupted(self: Round, nodes: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(5):
        with monkeypatch.context() as patched:
            patched.setattr(Round, "_open", interrupted)
            with pytest.raises(KeyboardInterrupt):
                lock(f"{key}:interrupted", timeout=0).acquire()
    lock(key, timeout=0).acquire().release()
    for node in backend.nodes:
        eventually(lambda node=node: node.servers.links._open <= 2)  # type: ignore[misc]


def test_a_server_that_may_not_be_told_scripts_is_named(
    five: IndependentGroup, make: Make, key: str
) -> None:
    """It is asked twice, and not without an end."""
    backend = make()
    for member in five.members[:3]:
        member.ask("SCRIPT", "FLUSH")
        member.ask("ACL", "SETUSER", "default", "-script")
    try:
        began = lease_now()
        with pytest.raises(BackendUnavailable, match=r"3 of the 5 .* refuses: NOSCRIPT"):
            lock(key, timeout=0).acquire()
        assert lease_now() - began < 5 * NODE_TIMEOUT
    finally:
        for member in five.members[:3]:
            member.ask("ACL", "SETUSER", "default", "+script")
    assert len(backend.nodes) == 5


def test_a_lease_that_two_never_had_is_released_as_ours(
    make: Make, proxies: list[FaultProxy], key: str
) -> None:
    """Two were away when it was granted, and a third when it is released."""
    silenced(make, proxies, key, 0, 1)
    lease = lock(key, timeout=0).acquire()
    for proxy in proxies[:2]:
        proxy.mode = "pass"
    eventually(lambda: all_asked(key))
    proxies[2].mode = "blackhole"
    assert lease.release() is True


def all_asked(key: str) -> bool:
    from distlocks import locks

    with lock(f"{key}:other", timeout=0):
        backend = locks["redlock"]
        assert isinstance(backend, RedlockBackend)
        return not any(node.is_absent for node in backend.nodes)


def test_a_release_that_a_server_refuses_is_told_it_again(
    five: IndependentGroup, make: Make, key: str
) -> None:
    backend = make(ttl=30)
    lease = lock(key, timeout=0).acquire()
    eventually(lambda: on_each(backend, key) == [lease.owner_id] * 5)
    member = five.members[0]
    member.ask("ACL", "SETUSER", "default", "-evalsha")
    try:
        assert lease.release() is True
    finally:
        member.ask("ACL", "SETUSER", "default", "+evalsha")
    eventually(lambda: on_each(backend, key) == [lease.owner_id, "", "", "", ""])
    # Over the next connection.
    member.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def is_told() -> bool:
        lock(f"{key}:other", timeout=0).acquire().release()
        return on_each(backend, key) == [""] * 5

    eventually(is_told)


@pytest.mark.parametrize("down", [0, 1, 2])
def test_of_two_that_ask_at_once_one_gets_it(
    five: IndependentGroup, make: Make, start: Start, key: str, down: int
) -> None:
    """CASES 4: never none, never both."""
    from threading import Barrier

    make(ttl=TTL)
    lock(f"{key}:warm", timeout=0).acquire().release()
    for member in five.members[:down]:
        member.kill()
    lock(f"{key}:warm", timeout=5).acquire().release()
    barrier = Barrier(2)

    def ask(name: str) -> Any:
        barrier.wait(10)
        return lock(name, timeout=0).try_acquire()

    for number in range(30):
        name = f"{key}:{number}"
        leases = [future.result(20) for future in [start(ask, name), start(ask, name)]]
        assert sum(lease is not None for lease in leases) == 1
