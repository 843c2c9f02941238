"""Signals and callbacks: after the fact, in order, and never in the way of the work."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.dispatch import Signal

from distlocks import db_lock, locks, signals
from distlocks.recording import Recorder
from distlocks.testing import flush_events, memory_locks
from tests.servers.children import Spawner


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


class Sender:
    pass


def test_a_handler_gets_the_sender_and_the_arguments(recorder: Recorder) -> None:
    signal, heard = Signal(), []

    def handle(sender: type, signal: Signal, **arguments: Any) -> None:
        heard.append((sender, arguments, threading.current_thread().name))

    signal.connect(handle)
    recorder.send(signal, Sender, alias="default", keys=("a",))
    assert recorder.flush()
    assert heard == [(Sender, {"alias": "default", "keys": ("a",)}, "distlocks-events")]


def test_events_are_told_one_after_the_other_in_their_order(recorder: Recorder) -> None:
    told: list[int] = []
    for number in range(1000):
        recorder.call(lambda number=number: told.append(number))  # type: ignore[misc]
    assert recorder.flush()
    assert told == list(range(1000))


def test_without_a_listener_nothing_happens(recorder: Recorder) -> None:
    before = threading.active_count()
    recorder.send(Signal(), Sender, alias="default")
    assert recorder.flush()
    assert threading.active_count() == before


def test_a_slow_handler_stalls_nobody_and_is_waited_for_on_request(recorder: Recorder) -> None:
    go, told = threading.Event(), []
    recorder.call(lambda: go.wait(10))
    recorder.call(lambda: told.append(1))
    assert not recorder.flush(0.01)
    assert told == []
    go.set()
    assert recorder.flush()
    assert told == [1]


def test_what_a_handler_raises_is_logged_and_hinders_no_other(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    signal, heard = Signal(), []

    def broken(**_: Any) -> None:
        raise RuntimeError("no disk space")

    def working(**_: Any) -> None:
        heard.append(1)

    signal.connect(broken)
    signal.connect(working)
    recorder.send(signal, Sender)
    recorder.call(lambda: 1 / 0)
    recorder.send(signal, Sender)
    assert recorder.flush()
    assert heard == [1, 1]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    raised = {record.exc_info[0] for record in errors if record.exc_info}
    assert raised == {RuntimeError, ZeroDivisionError}


def test_events_from_many_threads_are_all_told(recorder: Recorder) -> None:
    told: list[int] = []
    barrier = threading.Barrier(4)
    before = threading.active_count()

    def tell() -> None:
        barrier.wait(10)
        for number in range(100):
            recorder.call(lambda number=number: told.append(number))  # type: ignore[misc]

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.flush()
    assert sorted(told) == sorted([*range(100)] * 4)
    assert threading.active_count() == before + 1


def test_a_forked_process_tells_its_own_events_only(spawn: Spawner) -> None:
    child = spawn(
        """
        import os, threading
        from distlocks.recording import recorder

        go = threading.Event()
        reading, writing = os.pipe()
        recorder.call(lambda: go.wait(20))
        recorder.call(lambda: os.write(writing, b"parent "))
        forked = os.fork()
        if not forked:
            recorder.call(lambda: os.write(writing, b"child "))
            os._exit(not recorder.flush())
        code = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        go.set()
        told = recorder.flush()
        result = [code, told, os.read(reading, 100).decode()]
        """
    )
    assert child.result() == [0, True, "child parent "]


# What a lock tells


@pytest.fixture
def heard() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The signals of locks in memory, in their order."""
    found: list[tuple[str, dict[str, Any]]] = []
    names = ("lock_acquired", "lock_denied", "lock_released", "lease_lost")
    handlers = []
    for name in names:

        def handle(name: str = name, **arguments: Any) -> None:
            found.append((name, arguments))

        handlers.append(handle)
        getattr(signals, name).connect(handle)
    with memory_locks():
        yield found
        flush_events()
    for name, handler in zip(names, handlers, strict=True):
        getattr(signals, name).disconnect(handler)


def test_a_lock_tells_of_its_life(heard: list[tuple[str, dict[str, Any]]]) -> None:
    with db_lock("b", "a", label="nightly") as lease:
        db_lock("c", "a", timeout=0, label="second").try_acquire()
    flush_events()
    acquired, denied, released = heard
    assert [name for name, _ in heard] == ["lock_acquired", "lock_denied", "lock_released"]
    tokens = tuple(lease.fencing_tokens.values())
    for _, arguments in (acquired, released):
        assert arguments["alias"] == "default"
        assert arguments["keys"] == ("a", "b")
        assert arguments["owner_id"] == lease.owner_id
        assert arguments["fencing_tokens"] == tokens
        assert arguments["label"] == "nightly"
    assert acquired[1]["waited"] >= 0
    assert released[1]["ours"] is True
    assert denied[1]["keys"] == ("a", "c")
    assert denied[1]["holders"][0].label == "nightly"
    assert denied[1]["label"] == "second"


def test_a_lost_lease_is_told_once_and_its_release_says_so(
    heard: list[tuple[str, dict[str, Any]]],
) -> None:
    lost: list[object] = []
    lease = db_lock("a", on_lost=lost.append).acquire()
    locks["default"].force_release("a")
    assert lease.release() is False
    assert lease.release() is False
    flush_events()
    assert [name for name, _ in heard] == ["lock_acquired", "lease_lost", "lock_released"]
    assert lost == [lease]
    assert "the store had it no more" in heard[1][1]["reason"]
    assert heard[2][1]["ours"] is False


def test_what_on_lost_raises_is_logged_and_hurts_nobody(
    heard: list[tuple[str, dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    def on_lost(lease: object) -> None:
        raise RuntimeError("the pager is off")

    lease = db_lock("a", on_lost=on_lost).acquire()
    locks["default"].force_release("a")
    assert lease.release() is False
    flush_events()
    assert "the pager is off" in caplog.text
    assert [name for name, _ in heard][-2:] == ["lease_lost", "lock_released"]
