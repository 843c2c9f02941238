"""Each abnormal event is one record in the log, with its facts as attributes."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from django.core.management import call_command
from django.test import override_settings
from pythonjsonlogger.json import JsonFormatter

from distlocks import (
    BackendUnavailable,
    LeaseLost,
    LockTimeout,
    db_lock,
    force_release,
    locks,
    logs,
    signals,
    transactions,
)
from distlocks.backends.database.listener import Listener
from distlocks.backends.fastpath.authority import Authority
from distlocks.backends.fastpath.row import Row
from distlocks.backends.memory import MemoryBackend
from distlocks.backends.phases import DRAIN
from distlocks.backends.redis.turns import Turns
from distlocks.backends.wakeups import Wakeups
from distlocks.claims import Extended
from distlocks.facts import Fact
from distlocks.history import tables
from distlocks.history.journal import Journal, Ledger
from distlocks.history.waits import waits
from distlocks.identity import host, pid
from distlocks.models import Lock, LockWaiter
from distlocks.renewal import renewer
from distlocks.testing import FakeClock, flush_events
from tests.factories import SECOND, now_us

Events = Callable[[], list[dict[str, Any]]]
WHO = {"host": host(), "pid": pid(), "thread": "MainThread"}


@pytest.fixture(autouse=True)
def _locks(lock_clock: FakeClock) -> Iterator[None]:
    memory = {
        "BACKEND": "distlocks.backends.memory.MemoryBackend",
        "GUARD_DATABASES": [],
        "HISTORY_DAYS": 0,
    }
    with override_settings(DISTLOCKS={"default": memory}):
        yield


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Events:
    """The attributes of the records so far, without the prefix of their names."""

    def told() -> list[dict[str, Any]]:
        return [
            {
                name.removeprefix(logs.PREFIX): value
                for name, value in vars(record).items()
                if name.startswith(logs.PREFIX)
            }
            for record in caplog.records
            if record.name == "distlocks" and record.levelno >= logging.WARNING
        ]

    return told


def refuse(*_: object) -> Any:
    raise BackendUnavailable("connection refused")


def test_a_lost_lease(lock_clock: FakeClock, events: Events) -> None:
    lease = db_lock(("customer:7", "order:42"), ttl=10, renew=False, label="import").acquire()
    lock_clock.advance(11)
    assert lease.lost
    assert not lease.release()
    assert events() == [
        {
            "event": "lost",
            "backend": "default",
            "keys": ["customer:7 → order:42"],
            "owner_id": lease.owner_id,
            "fencing_token": lease.fencing_token,
            "label": "import",
            "held": pytest.approx(10, abs=0.2),
            "reason": "it was not extended before its deadline",
        }
    ]


def test_a_lease_that_ends(
    lock_clock: FakeClock, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = db_lock("a", ttl=9).acquire()
    monkeypatch.setattr(
        MemoryBackend,
        "extend",
        lambda *_: Extended(
            extended=frozenset(), lost=frozenset(), ending={lease.owner_id: "Redis is drained"}
        ),
    )
    lock_clock.advance(4)
    (event,) = events()
    assert (event["event"], event["keys"], event["owner_id"]) == ("ending", ["a"], lease.owner_id)
    assert event["reason"] == "Redis is drained"
    assert 4 < event["remaining"] < 6


def test_a_renewal_that_fails(
    lock_clock: FakeClock, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    db_lock("a", "b", ttl=9).acquire()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBackend, "extend", refuse)
        lock_clock.advance(3.1)
    lock_clock.advance(3.1)
    assert events() == [
        {
            "event": "renewal_failed",
            "backend": "default",
            "keys": ["a", "b"],
            "count": 1,
            "error": "connection refused",
        }
    ]


def test_a_release_that_fails(
    lock_clock: FakeClock, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is tried again."""
    tries: list[int] = []

    def release(self: object, grant: object) -> bool:
        tries.append(1)
        return bool(refuse())

    monkeypatch.setattr(MemoryBackend, "release", release)
    with db_lock("a", ttl=30) as lease:
        pass
    renewer.join_workers()
    lock_clock.advance(25)
    assert len(tries) > 2
    (event,) = events()
    assert event["event"] == "release_failed"
    assert (event["keys"], event["owner_id"]) == (["a"], lease.owner_id)
    assert event["error"] == "connection refused"


def test_a_release_that_fails_after_its_transaction(
    lock_clock: FakeClock, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = db_lock("a", ttl=30).acquire()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBackend, "release", refuse)
        renewer.releases.put(lease)
        renewer.join_workers()
        lock_clock.advance(5)
    lock_clock.advance(5)
    renewer.join_workers()
    assert events() == [
        {
            "event": "release_failed",
            "backend": "default",
            "keys": ["a"],
            "owner_id": lease.owner_id,
            "error": "connection refused",
        }
    ]
    assert lease.owner_id not in renewer.releases._failing


def test_a_lock_that_is_forced_free(events: Events) -> None:
    lease = db_lock("a", label="import").acquire()
    force_release("a", by="jane", reason="it hangs")
    assert events() == [
        {
            "event": "forced",
            "backend": "default",
            "keys": ["a"],
            "owner_id": lease.owner_id,
            "fencing_token": lease.fencing_token,
            "label": "import",
            "by": "jane",
            "reason": "it hangs",
            **WHO,
        }
    ]


@pytest.mark.django_db
def test_leases_that_expired(events: Events) -> None:
    with override_settings(DISTLOCKS={"default": {}}):
        Lock.objects.all().delete()
        lease = db_lock("a", "b", label="import").acquire()
        lease.drop()
        Lock.objects.update(expires_at=now_us() - SECOND)
        call_command("sweep_locks", verbosity=0)
    (event,) = events()
    assert event.pop("fencing_token") in lease.fencing_tokens.values()
    assert event == {
        "event": "expired",
        "backend": "default",
        "keys": ["a", "b"],
        "owner_id": lease.owner_id,
        "label": "import",
        **WHO,
    }


def test_a_lease_that_was_taken_over(events: Events) -> None:
    lease = db_lock("a").acquire()
    holders = locks["default"].holders("a")
    Journal().note_expired("taken_over", locks["default"], holders, None)
    (event,) = events()
    assert (event["event"], event["owner_id"]) == ("taken_over", lease.owner_id)


def waiter(owner_id: str, wants: str, holds: str) -> LockWaiter:
    held = [{"owner_id": f"{owner_id} holds", "backend": "default", "keys": [holds]}]
    return LockWaiter(
        owner_id=owner_id, backend="default", key=wants, since=0, valid_until=0, holds=held
    )


def test_a_circle(events: Events) -> None:
    waits._report([waiter("1", "b", "a"), waiter("2", "a", "b")], locks["default"])
    assert events() == [
        {
            "event": "cycle",
            "backend": "default",
            "keys": ["b", "a"],
            "owner_ids": ["1", "2"],
        }
    ]


def test_a_history_that_cannot_be_written(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once when it begins and once when it is over."""
    monkeypatch.setattr(
        "distlocks.history.ledger.connections", {"default": SimpleNamespace(close=int)}
    )
    monkeypatch.setattr(tables, "add_up", lambda *_: None)
    ledger = Ledger("default")
    ledger.note(Fact(kind="lost", alias="default", at=0.0, name="a"))
    monkeypatch.setattr(tables, "write_events", refuse)
    for _ in range(3):
        ledger.write(0.0, all_of_it=True)
    ledger.drop("default", "a", 0.0, 4)
    assert [event["event"] for event in events()] == ["history_failing"]
    monkeypatch.setattr(tables, "write_events", lambda *_: None)
    ledger.write(0.0, all_of_it=True)
    failing, back = events()
    assert failing == {
        "event": "history_failing",
        "backend": "",
        "keys": [],
        "database": "default",
        "error": "BackendUnavailable: connection refused",
    }
    assert back == {
        "event": "history_back",
        "backend": "",
        "keys": [],
        "database": "default",
        "dropped": 4,
    }


def test_an_observer_that_fails(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    journal.observers.append(refuse)
    journal._entries.append((locks["default"], ("a",), None, 0.0, False))
    journal.look()
    assert [event["event"] for event in events()] == ["history_fault"]
    assert "connection refused" in caplog.text


def test_a_handler_that_fails(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    def page_somebody(**_: Any) -> None:
        raise RuntimeError("the pager is off")

    signals.lock_acquired.connect(page_somebody)
    try:
        db_lock("a").acquire()
        flush_events()
    finally:
        signals.lock_acquired.disconnect(page_somebody)
    (event,) = events()
    assert (event["event"], event["backend"], event["keys"]) == ("handler_failed", "default", ["a"])
    assert "page_somebody" in event["handler"]
    assert "the pager is off" in caplog.text


def test_a_callback_that_fails(lock_clock: FakeClock, events: Events) -> None:
    db_lock("a", ttl=10, renew=False, on_lost=lambda lease: 1 / 0).acquire()
    lock_clock.advance(11)
    flush_events()
    lost, failed = events()
    assert lost["event"] == "lost"
    assert failed == {
        "event": "job_failed",
        "backend": "",
        "keys": [],
        "thread": "distlocks-events",
    }


def test_an_authority_that_changes(events: Events) -> None:
    row = Row(
        epoch=8, phase=DRAIN, why="Redis is down", mode_lease_us=1, max_ttl_us=1, patience_us=0
    )
    changes = SimpleNamespace(made=(8, DRAIN))
    fast = SimpleNamespace(_alias="fast", _changes=changes, _changed=lambda *_: None)
    Authority._tell(cast(Any, fast), None, row)
    assert events() == [
        {
            "event": "authority",
            "backend": "fast",
            "keys": [],
            "authority": "drain",
            "epoch": 8,
            "reason": "Redis is down",
            "made_here": True,
        }
    ]


def test_waiters_that_have_to_poll(events: Events) -> None:
    """Told once, however often the connection fails before it is there again."""
    closed = threading.Event()
    tries: list[int] = []

    def connect() -> Any:
        tries.append(1)
        if len(tries) == 3:
            closed.set()
        return SimpleNamespace(ensure_connection=refuse, alias="default", close=int)

    wakeups = Wakeups()
    listener = Listener(connect, lambda _: None, wakeups)
    listener._retire = lambda _: False  # type: ignore[method-assign]
    monkey = SimpleNamespace(is_set=closed.is_set, wait=lambda _: None)
    listener._run(cast(Any, monkey))
    assert events() == [
        {
            "event": "polling",
            "backend": "",
            "keys": [],
            "database": "default",
            "error": "connection refused",
        }
    ]


def test_waiters_that_are_not_called(events: Events) -> None:
    turns = SimpleNamespace(usable=True, _alias="redis", _alone_until=0.0)
    Turns._give_up(cast(Any, turns), BackendUnavailable("connection refused"))
    (event,) = events()
    assert (event["event"], event["backend"]) == ("polling", "redis")


def test_what_only_misconfigured_databases_do(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "_warned", set())
    wrapper = SimpleNamespace(in_atomic_block=True, vendor="postgresql", alias="reports")
    monkeypatch.setattr(transactions, "_used", lambda: [wrapper])
    monkeypatch.setattr(transactions, "_has_snapshot", lambda _: True)
    transactions.warn_of_old_snapshots()
    for _ in range(2):
        transactions._warn_of_autocommit("reports")
    rest = {"backend": "", "keys": [], "database": "reports"}
    assert events() == [
        {"event": "old_snapshot", **rest},
        {"event": "autocommit_off", **rest},
    ]


def test_what_is_ordinary_or_raised_is_not_logged(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    with db_lock("a"):
        with pytest.raises(LockTimeout):
            db_lock("a", timeout=0).acquire()
        assert db_lock("a", timeout=0).try_acquire() is None
    monkeypatch.setattr(MemoryBackend, "try_acquire", refuse)
    with pytest.raises(BackendUnavailable):
        db_lock("b").acquire()
    assert events() == []


def test_a_formatter_shows_it_all(lock_clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LeaseLost), db_lock("a", ttl=10, renew=False):
        lock_clock.advance(11)
    (record,) = caplog.records
    line = json.loads(JsonFormatter("%(message)s").format(record))
    assert line["distlocks_event"] == "lost"
    assert line["distlocks_keys"] == ["a"]
    # Who reads the log is led to where it happened.
    assert record.pathname.endswith("held.py")


def test_of_many_keys_some_are_named(events: Events) -> None:
    logs.event(logging.WARNING, "kind", "default", [f"k:{n}" for n in range(50)], "said")
    (event,) = events()
    assert len(event["keys"]) == logs.MAX_KEYS
