"""Which locks there are now, over all stores: snapshots, and stores that are slow or down."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from distlocks import BackendUnavailable, db_lock, force_release
from distlocks.backends.memory import MemoryBackend
from distlocks.claims import Holder
from distlocks.handler import locks
from distlocks.live import Listing, NoAnswer, Wanted, asking, listing, refresh, snapshots
from distlocks.live.asking import ask
from tests.factories import LockFactory
from tests.waiting import eventually

pytestmark = pytest.mark.django_db

HERE = "tests.integration.test_live"


class Slow(MemoryBackend):
    """A store that answers when it is let, and counts the questions."""

    may_answer = threading.Event()
    asked = 0
    error: Exception | None = None

    def scan(self) -> Iterator[Holder]:
        type(self).asked += 1
        assert self.may_answer.wait(20)
        if self.error:
            raise self.error
        yield from super().scan()


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Slow.may_answer, Slow.asked, Slow.error = threading.Event(), 0, None
    Slow.may_answer.set()
    monkeypatch.setattr(snapshots, "FRESH", 0.0)
    monkeypatch.setattr(snapshots, "SPARING", 0.0)
    aliases = {
        "default": settings.DISTLOCKS["default"],
        "slow": {"BACKEND": f"{HERE}.Slow"},
    }
    with override_settings(DISTLOCKS=aliases):
        yield
        Slow.may_answer.set()


def names(found: Listing) -> list[str]:
    return [entry.name for entry in found.entries]


def test_what_is_new_is_there_at_once_if_the_store_is_quick() -> None:
    assert names(listing(Wanted())) == []
    with db_lock("a", backend="slow"):
        assert names(listing(Wanted())) == ["a"]
    assert names(listing(Wanted())) == []


def test_a_store_that_is_slow_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "TIME", 0.2)
    monkeypatch.setattr("distlocks.live.together.TIME", 0.2)
    LockFactory(key="here")
    Slow.may_answer.clear()
    with db_lock("there", backend="slow"):
        began = time.monotonic()
        found = listing(Wanted())
        assert time.monotonic() - began < 5
        assert names(found) == ["here"]
        assert [store.reading for store in found.stores] == [False, True]
        # However many ask, the store is asked once.
        for _ in range(5):
            listing(Wanted(backend="slow"))
        assert Slow.asked == 1
        Slow.may_answer.set()
        eventually(lambda: names(listing(Wanted())) == ["here", "there"])


def test_a_list_from_before_is_shown_while_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "GRACE", 0.01)
    with db_lock("a", backend="slow"):
        eventually(lambda: names(listing(Wanted())) == ["a"])
        Slow.may_answer.clear()
        eventually(lambda: listing(Wanted()) and Slow.asked > 1)
        found = listing(Wanted())
        assert names(found) == ["a"]
        assert found.stores[1].found is not None
        # After a while it counts as down.
        monkeypatch.setattr(snapshots, "SILENT", 0.0)
        assert "no answer for" in listing(Wanted()).stores[1].error


def test_a_store_that_fails_is_asked_again() -> None:
    Slow.error = BackendUnavailable("It is away.\nReally.")
    assert listing(Wanted()).stores[1].error == "It is away."
    Slow.error = None
    with db_lock("a", backend="slow"):
        eventually(lambda: names(listing(Wanted())) == ["a"])


def test_nobody_looks_so_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "KEPT", 0.05)
    assert listing(Wanted()).stores[1].found is not None
    watch = snapshots.watch(locks["slow"])
    eventually(lambda: watch._thread is None)
    assert watch._snapshot is None
    assert listing(Wanted()).stores[1].found is not None


def test_a_store_is_not_read_more_often_than_it_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FRESH", 60.0)
    for _ in range(5):
        listing(Wanted())
    assert Slow.asked == 1


def test_what_was_freed_is_not_shown_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FRESH", 60.0)
    lease = db_lock("a", backend="slow").acquire()
    assert names(listing(Wanted())) == ["a"]
    force_release("a", backend="slow")
    refresh("slow")
    assert names(listing(Wanted())) == []
    assert not lease.release()


def test_more_than_fit_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_READ", 3)
    leases = [db_lock(f"{n}", backend="slow").acquire() for n in range(5)]
    found = listing(Wanted())
    assert names(found) == ["0", "1", "2"]
    assert found.stores[1].found is not None
    assert found.stores[1].found.cut
    for lease in leases:
        lease.release()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, ["a", "b", "c", "t", "t\x1fx"]),
        ({"sort": "key", "descending": True}, ["t\x1fx", "t", "c", "b", "a"]),
        ({"mode": "shared"}, ["b"]),
        ({"mode": "intention"}, ["t"]),
        ({"search": "LABEL"}, ["a", "c"]),
        ({"search": "label cherry"}, ["c"]),
        ({"search": "t → x"}, ["t\x1fx"]),
        ({"below": "t"}, ["t\x1fx"]),
        ({"longer_than": 60.0}, []),
        ({"waited_for": True}, []),
        ({"size": 2}, ["a", "b"]),
        ({"size": 2, "page": 3}, ["t\x1fx"]),
        # There may have been more a moment ago.
        ({"size": 2, "page": 4}, ["t\x1fx"]),
    ],
)
@pytest.mark.parametrize("alias", ["default", "slow"])
def test_both_kinds_of_stores_find_the_same(
    alias: str, wanted: dict[str, Any], expected: list[str]
) -> None:
    leases = [
        db_lock("a", backend=alias, label="label apple").acquire(),
        db_lock("b", backend=alias, shared=True).acquire(),
        db_lock("c", backend=alias, label="label cherry").acquire(),
        db_lock(("t", "x"), backend=alias).acquire(),
    ]
    found = listing(Wanted(backend=alias, **wanted))
    assert names(found) == expected
    ages = [
        entry.name for entry in listing(Wanted(backend=alias, sort="age", descending=True)).entries
    ]
    assert ages[0] == "a"
    for lease in leases:
        lease.release()


def test_a_question_that_nobody_answers_is_not_asked_for_ever() -> None:
    release = threading.Event()
    questions = {"stuck": ("", lambda: release.wait(20))}
    answers = [ask(questions)["stuck"] for _ in range(asking.MAX_ASKING + 1)]
    with pytest.raises(NoAnswer, match="earlier questions"):
        answers[-1].result(time.monotonic())
    with pytest.raises(NoAnswer, match="no answer within"):
        answers[0].result(time.monotonic())
    release.set()
    assert all(answer.result(time.monotonic() + 10) for answer in answers[:-1])
    eventually(lambda: not asking._asking["stuck"])


def test_a_question_waits_for_its_turn() -> None:
    """As many pages as one likes may be looked at in the same moment."""
    release = threading.Event()
    questions = {"slow": ("", lambda: release.wait(20))}
    answers = [ask(questions)["slow"] for _ in range(3 * asking.MAX_ASKING)]
    assert asking._asking["slow"] == asking.MAX_ASKING
    release.set()
    assert all(answer.result(time.monotonic() + 10) for answer in answers)
    eventually(lambda: not asking._asking["slow"])


# Redis


def test_redis_is_read_without_order(redis_server: Any, key: str) -> None:
    entry = _entry("redis") | {"KEY_PREFIX": f"{key[-32:]}:"}
    with override_settings(DISTLOCKS={"default": entry}):
        locks["default"].quarantine(end=True)
        leases = [
            db_lock("b").acquire(),
            db_lock("a", label="nightly").acquire(),
            db_lock("s", shared=True).acquire(),
            db_lock("s", shared=True).acquire(),
            db_lock(("t", "x")).acquire(),
        ]
        found = listing(Wanted())
        assert names(found) == ["a", "b", "s", "t", "t\x1fx"]
        assert [entry.count for entry in found.entries] == [1, 1, 2, 1, 1]
        backend = locks["default"]
        assert [one.label for one in backend.holders_of("a")] == ["nightly"]
        assert len(backend.holders_of("s")) == 2
        assert len(backend.holders_of("s", limit=1)) == 1
        assert [one.mode for one in backend.holders_of("t")] == ["intention"]
        assert backend.holders_of("free") == []
        for lease in leases:
            lease.release()
        assert names(listing(Wanted())) == []


@pytest.mark.parametrize("alias", ["sqlite", "portable_sqlite", "memory"])
def test_the_holders_of_one_key(alias: str) -> None:
    with override_settings(DISTLOCKS={"default": _entry(alias)}):
        leases = [
            db_lock("s", shared=True).acquire(),
            db_lock("s", shared=True).acquire(),
            db_lock(("a", "x")).acquire(),
            db_lock("ab").acquire(),
        ]
        backend = locks["default"]
        assert len(backend.holders_of("s")) == 2
        assert len(backend.holders_of("s", limit=1)) == 1
        assert [one.mode for one in backend.holders_of("a")] == ["intention"]
        assert [one.key for one in backend.holders_of("a\x1fx")] == [("a", "x")]
        assert backend.holders_of("free") == []
        assert sorted(str(one.key) for one in backend.scan()) == sorted(
            str(one.key) for one in backend.holders()
        )
        for lease in leases:
            lease.release()


def _entry(alias: str) -> Any:
    from tests import settings as all_settings

    return all_settings.DISTLOCKS[alias]
