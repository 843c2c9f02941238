"""The one thread that keeps the leases of a process, over stores that the test makes misbehave."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from distlocks import BackendUnavailable, clock, releases, renewal
from distlocks.backends.base import BaseBackend
from distlocks.claims import Claim, Extended, Extension, Grant, Request, to_us
from distlocks.renewal import Renewer
from distlocks.waiting import lease_deadline
from tests.waiting import eventually


class HandClock(clock.Clock):
    """Shows what the test says."""

    def __init__(self) -> None:
        self.time = super().now()

    def now(self) -> float:
        return self.time


class Store:
    """Grants every extension, unless it was told otherwise."""

    def __init__(self, alias: str = "default") -> None:
        self.alias = alias
        # The owner ids of each call.
        self.batches: list[list[str]] = []
        self.abandoned: list[str] = []
        self.answer: Callable[[list[str]], Extended] | None = None
        # What the next calls do first, one each.
        self.next: list[Callable[[], object]] = []

    def extend(self, extensions: Sequence[Extension]) -> Extended:
        ids = [extension.grant.owner_id for extension in extensions]
        self.batches.append(ids)
        if self.next:
            self.next.pop(0)()
        if self.answer is not None:
            return self.answer(ids)
        return Extended(extended=frozenset(ids), lost=frozenset())

    def abandon(self, request: Request) -> None:
        if self.next:
            self.next.pop(0)()
        self.abandoned.append(request.owner_id)


class Lease:
    """What the renewer has to know of a lease, and what it did with it."""

    def __init__(self, store: Store, owner_id: str = "one", ttl: float = 30.0) -> None:
        self.store = store
        self.owner_id = owner_id
        self.ttl = ttl
        self.deadline = lease_deadline(clock.lease_now(), ttl)
        self.over = False
        self.renewing = True
        self.first_sends: list[float] = []
        self.lost: list[str] = []
        self.gave_back: list[str] = []

    @property
    def backend(self) -> BaseBackend:
        return cast(BaseBackend, self.store)

    def next_extension(self) -> tuple[Extension, float]:
        grant = Grant(
            claims=(Claim("a"),), owner_id=self.owner_id, fencing_tokens=(1,), acquired_us=0
        )
        return Extension(grant=grant, ttl_us=to_us(self.ttl)), self.ttl

    def extended(self, first_send: float, ttl: float) -> bool:
        if self.lost or clock.lease_now() >= self.deadline:
            return False
        self.first_sends.append(first_send)
        self.deadline = lease_deadline(first_send, ttl)
        return True

    def lose(self, reason: str) -> None:
        self.lost.append(reason)
        self.over = True

    def give_back(self) -> None:
        if self.store.next:
            self.store.next.pop(0)()
        self.gave_back.append(threading.current_thread().name)


@pytest.fixture
def renewer(request: pytest.FixtureRequest) -> Renewer:
    renewer = Renewer()
    if "hand" in request.fixturenames:
        # Driven by hand: its own thread would do now and then what the test is about to do.
        renewer._thread = threading.current_thread()
    return renewer


@pytest.fixture
def hand() -> Iterator[HandClock]:
    hand = HandClock()
    previous = clock.replace(hand)
    yield hand
    clock.replace(previous)


@pytest.fixture
def store() -> Store:
    return Store()


def down() -> None:
    raise BackendUnavailable("connection refused")


def broken() -> None:
    raise RuntimeError("a bug in the driver")


def go_on(renewer: Renewer, hand: HandClock) -> None:
    """Move the clock to the next thing to be done, and do it."""
    hand.time = max(hand.time, renewer.next_due())
    renewer.run_due()


# When


def test_a_lease_is_extended_after_a_third_of_its_ttl_and_not_before(
    renewer: Renewer, hand: HandClock, store: Store
) -> None:
    began = hand.time
    lease = Lease(store, ttl=30)
    renewer.add(lease)
    assert began + 10 <= renewer.next_due() <= began + 10 + renewal.TICK
    hand.time = began + 9.9
    renewer.run_due()
    assert store.batches == []
    go_on(renewer, hand)
    eventually(lambda: lease.first_sends)
    assert store.batches == [["one"]]
    assert lease.lost == []


def test_it_is_extended_again_and_again(renewer: Renewer, hand: HandClock, store: Store) -> None:
    lease = Lease(store, ttl=30)
    renewer.add(lease)
    for times in range(1, 21):
        go_on(renewer, hand)
        eventually(lambda times=times: len(lease.first_sends) == times)
    gaps = [b - a for a, b in zip(lease.first_sends, lease.first_sends[1:], strict=False)]
    assert all(10 <= gap <= 10 + 2 * renewal.TICK for gap in gaps)
    assert lease.lost == []


def test_a_lease_that_is_not_renewed_is_lost_at_its_deadline_and_not_before(
    renewer: Renewer, hand: HandClock, store: Store
) -> None:
    lease = Lease(store)
    lease.renewing = False
    renewer.add(lease)
    hand.time = lease.deadline - 0.01
    renewer.run_due()
    assert lease.lost == []
    go_on(renewer, hand)
    assert lease.lost == ["it was not extended before its deadline"]
    assert hand.time <= lease.deadline + renewal.TICK
    assert store.batches == []
    assert renewer.next_due() == math.inf


def test_a_lease_that_ceased_to_be_renewed_is_watched_to_its_end(
    renewer: Renewer, hand: HandClock, store: Store
) -> None:
    lease = Lease(store)
    renewer.add(lease)
    lease.renewing = False
    while not lease.lost:
        go_on(renewer, hand)
    assert store.batches == []
    assert hand.time >= lease.deadline


def test_the_deadline_counts_from_before_the_request(
    renewer: Renewer, hand: HandClock, store: Store
) -> None:
    lease = Lease(store)
    renewer.add(lease)
    sent = renewer.next_due()
    store.next = [lambda: setattr(hand, "time", hand.time + 5)]
    go_on(renewer, hand)
    eventually(lambda: lease.first_sends)
    assert lease.first_sends == [sent]
    assert lease.deadline == lease_deadline(sent, 30)


# Together


def test_leases_that_are_due_together_travel_together(
    renewer: Renewer, hand: HandClock, store: Store
) -> None:
    leases = [Lease(store, f"{number}") for number in range(50)]
    for lease in leases:
        renewer.add(lease)
    go_on(renewer, hand)
    eventually(lambda: all(lease.first_sends for lease in leases))
    assert [sorted(batch, key=int) for batch in store.batches] == [[str(n) for n in range(50)]]


def test_each_store_gets_a_batch_of_its_own(renewer: Renewer, hand: HandClock) -> None:
    stores = [Store("first"), Store("second")]
    for number in range(6):
        renewer.add(Lease(stores[number % 2], f"{number}"))
    go_on(renewer, hand)
    eventually(lambda: all(store.batches for store in stores))
    assert [[sorted(batch) for batch in store.batches] for store in stores] == [
        [["0", "2", "4"]],
        [["1", "3", "5"]],
    ]


def test_each_lease_of_a_batch_gets_its_own_answer(
    renewer: Renewer, hand: HandClock, store: Store
) -> None:
    kept, lost, busy = (Lease(store, name) for name in ("kept", "lost", "busy"))
    store.answer = lambda ids: Extended(
        extended=frozenset({"kept"} & {*ids}), lost=frozenset({"lost"} & {*ids})
    )
    for lease in (kept, lost, busy):
        renewer.add(lease)
    go_on(renewer, hand)
    eventually(lambda: lost.lost)
    assert lost.lost == ["the store has it no more: it expired, was taken over or force-released"]
    assert (kept.lost, len(kept.first_sends)) == ([], 1)
    assert (busy.lost, busy.first_sends) == ([], [])
    # Asked again long before the next renewal, and alone.
    go_on(renewer, hand)
    eventually(lambda: len(store.batches) == 2)
    assert store.batches[1] == ["busy"]
    assert hand.time < busy.deadline - 15


# What goes wrong


@pytest.mark.parametrize("fault", [down, broken])
def test_a_failed_extension_is_tried_again_before_the_deadline(
    renewer: Renewer,
    hand: HandClock,
    store: Store,
    fault: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    lease = Lease(store)
    renewer.add(lease)
    store.next = [fault] * 3
    for tries in range(1, 5):
        go_on(renewer, hand)
        eventually(lambda tries=tries: len(store.batches) >= tries)
        eventually(lambda: renewer.next_due() < math.inf)
    eventually(lambda: lease.first_sends)
    assert lease.lost == []
    assert lease.deadline == lease_deadline(lease.first_sends[0], 30)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 3
    assert "1 lock(s) of 'default' could not be extended, it is tried again" in warnings[0]


def test_only_the_deadline_ends_the_tries(renewer: Renewer, hand: HandClock, store: Store) -> None:
    lease = Lease(store)
    renewer.add(lease)
    store.next = [down] * 1000
    while not lease.lost:
        before = len(store.batches)
        go_on(renewer, hand)
        assert hand.time <= lease.deadline + renewal.TICK
        if not lease.lost and len(store.batches) > before:
            # The retry has been put on the schedule, before the watched deadline.
            eventually(
                lambda: renewer.next_due() < lease.deadline or hand.time > lease.deadline - 1
            )
    assert lease.lost == ["it was not extended before its deadline"]
    assert hand.time >= lease.deadline
    assert len(store.batches) >= 5


def test_an_answer_after_the_deadline_comes_too_late(
    renewer: Renewer, hand: HandClock, store: Store
) -> None:
    lease = Lease(store)
    renewer.add(lease)
    store.next = [lambda: setattr(hand, "time", lease.deadline)]
    go_on(renewer, hand)
    eventually(lambda: lease.lost)
    assert "deadline" in lease.lost[0]
    assert lease.first_sends == []


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals fall due at once, while there is all the time in the world until the deadline."""
    monkeypatch.setattr(renewal, "renewal_due", lambda now, ttl, deadline: now + 0.06)


class Gate:
    """Holds a call until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(20)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.mark.usefixtures("brisk")
def test_a_store_that_hangs_hides_no_deadline(renewer: Renewer, store: Store, gate: Gate) -> None:
    lease = Lease(store, ttl=0.4)
    store.next = [gate]
    renewer.add(lease)
    assert gate.entered.wait(10)
    eventually(lambda: lease.lost)
    assert lease.lost == ["it was not extended before its deadline"]
    assert clock.lease_now() >= lease.deadline
    gate.open()
    # Its late answer changes nothing.
    eventually(lambda: renewer.next_due() == math.inf)
    assert lease.first_sends == []


@pytest.mark.usefixtures("brisk")
def test_a_store_that_hangs_delays_no_other(renewer: Renewer, store: Store, gate: Gate) -> None:
    hung = Lease(store, ttl=0.5)
    store.next = [gate]
    renewer.add(hung)
    assert gate.entered.wait(10)
    other = Lease(Store("other"), "two")
    renewer.add(other)
    eventually(lambda: other.first_sends)
    eventually(lambda: hung.lost)
    extended = len(other.first_sends)
    eventually(lambda: len(other.first_sends) > extended)
    assert other.lost == []
    renewer.discard(other)


@pytest.mark.usefixtures("brisk")
def test_a_lease_released_during_its_extension_does_not_come_back(
    renewer: Renewer, store: Store, gate: Gate
) -> None:
    released, other = Lease(store, "released"), Lease(store, "other")
    store.next = [gate]
    renewer.add(released)
    assert gate.entered.wait(10)
    released.over = True
    renewer.discard(released)
    gate.open()
    # One store's answers are dealt with in their order: after this one, the first one is.
    renewer.add(other)
    eventually(lambda: other.first_sends)
    renewer.discard(other)
    assert released.lost == []
    assert renewer.next_due() == math.inf
    assert [batch for batch in store.batches if "released" in batch] == [["released"]]


@pytest.mark.usefixtures("brisk")
def test_a_lease_released_before_its_batch_is_sent_is_not_sent(
    renewer: Renewer, store: Store, gate: Gate
) -> None:
    first, second = Lease(store, "first"), Lease(store, "second")
    store.next = [gate]
    renewer.add(first)
    assert gate.entered.wait(10)
    # Due while the store is busy with the first one's batch.
    renewer.add(second)
    eventually(lambda: renewer.next_due() >= first.deadline)
    second.over = True
    renewer.discard(second)
    gate.open()
    eventually(lambda: len(first.first_sends) > 1)
    assert "second" not in [owner for batch in store.batches for owner in batch]
    renewer.discard(first)


def test_adding_a_lease_that_is_already_released_keeps_nothing(
    renewer: Renewer, hand: HandClock, store: Store
) -> None:
    lease = Lease(store)
    lease.over = True
    renewer.add(lease)
    assert renewer.next_due() == math.inf


def test_a_lease_that_loses_itself_in_its_callback_hinders_no_other(
    renewer: Renewer, hand: HandClock, store: Store
) -> None:
    leases = [Lease(store, f"{number}") for number in range(3)]
    for lease in leases:
        lease.renewing = False
        renewer.add(lease)
    # Whoever hears of a loss may release another one meanwhile.
    first = leases[0]
    first.lose = lambda reason: (  # type: ignore[method-assign]
        Lease.lose(first, reason),
        renewer.discard(leases[1]),
    )[0]
    hand.time = leases[0].deadline
    go_on(renewer, hand)
    eventually(lambda: leases[2].lost)
    assert len(first.lost) == 1


# The thread


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.mark.usefixtures("brisk")
def test_one_thread_keeps_all_leases_without_being_asked(renewer: Renewer) -> None:
    before = {*threading.enumerate()}
    stores = [Store("first"), Store("second")]
    leases = [Lease(stores[number % 2], f"{number}") for number in range(20)]
    for lease in leases:
        renewer.add(lease)
    eventually(lambda: all(len(lease.first_sends) > 3 for lease in leases))
    assert not any(lease.lost for lease in leases)
    names = sorted(thread.name for thread in new_threads(before))
    assert names == ["distlocks-renewer", "distlocks-worker-first", "distlocks-worker-second"]
    assert all(thread.daemon for thread in new_threads(before))
    for lease in leases:
        renewer.discard(lease)
    assert renewer.next_due() == math.inf


def test_a_lease_that_is_due_sooner_is_not_made_to_wait(renewer: Renewer, store: Store) -> None:
    long, short = Lease(store, "long", ttl=3600), Lease(store, "short", ttl=3)
    renewer.add(long)
    # The thread has gone to sleep until then.
    eventually(lambda: renewer._planned < math.inf)
    renewer.add(short)
    eventually(lambda: short.first_sends)
    assert short.lost == []
    renewer.discard(long)
    renewer.discard(short)


def test_the_thread_ends_when_there_is_nothing_to_keep_and_begins_again(
    renewer: Renewer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "renewal_due", lambda now, ttl, deadline: now + 0.06)
    monkeypatch.setattr(renewal, "LINGER", 0.01)
    monkeypatch.setattr(renewal, "IDLE_AFTER", 0.03)
    before = {*threading.enumerate()}
    for owner in ("one", "two"):
        lease = Lease(store, owner)
        renewer.add(lease)
        eventually(lambda lease=lease: len(lease.first_sends) > 1)
        assert [t.name for t in new_threads(before)].count("distlocks-renewer") == 1
        renewer.discard(lease)
        eventually(lambda: "distlocks-renewer" not in [t.name for t in new_threads(before)])
        assert lease.lost == []


# Releases


def test_a_release_takes_place_in_another_thread(renewer: Renewer, store: Store) -> None:
    lease = Lease(store)
    renewer.releases.put(lease)
    eventually(lambda: lease.gave_back)
    assert lease.gave_back == ["distlocks-worker-default"]
    eventually(lambda: not renewer.releases.pending)


def test_a_release_is_tried_again_until_it_succeeds(
    renewer: Renewer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    lease = Lease(store, ttl=2)
    store.next = [down, down]
    renewer.releases.put(lease)
    eventually(lambda: lease.gave_back)
    assert "it is tried again until its lease ends: connection refused" in caplog.text
    assert caplog.text.count("could not be released yet") == 1


def test_after_its_deadline_a_release_is_not_tried_again(renewer: Renewer, store: Store) -> None:
    lease = Lease(store, ttl=2)
    lease.deadline = clock.lease_now()
    store.next = [down]
    renewer.releases.put(lease)
    eventually(lambda: not store.next and not renewer.releases.pending)
    other = Lease(store, "other")
    renewer.releases.put(other)
    eventually(lambda: other.gave_back)
    assert lease.gave_back == []


def test_an_unexpected_error_in_a_release_hinders_no_other(
    renewer: Renewer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Lease(store, "bad"), Lease(store, "good")
    store.next = [broken]
    renewer.releases.put(bad)
    eventually(lambda: not store.next)
    renewer.releases.put(good)
    eventually(lambda: good.gave_back)
    assert bad.gave_back == []
    assert "a bug in the driver" in caplog.text


def test_who_settles_finds_done_what_was_due(renewer: Renewer, store: Store, gate: Gate) -> None:
    lease, other = Lease(store), Lease(Store("other"), "two")
    store.next = [gate]
    renewer.releases.put(lease)
    assert gate.entered.wait(10)
    assert renewer.releases.pending
    settled = threading.Thread(target=renewer.releases.settle)
    renewer.releases.put(other)
    settled.start()
    eventually(lambda: other.gave_back)
    gate.open()
    settled.join(10)
    assert not settled.is_alive()
    assert lease.gave_back
    assert not renewer.releases.pending


def test_settling_does_not_wait_for_ever_for_a_store_that_hangs(
    renewer: Renewer, store: Store, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "FLUSH_WITHIN", 0.01)
    lease = Lease(store)
    store.next = [gate]
    renewer.releases.put(lease)
    assert gate.entered.wait(10)
    renewer.releases.settle()
    assert lease.gave_back == []


def test_a_release_asked_for_by_a_finaliser_never_blocks(renewer: Renewer, store: Store) -> None:
    """Garbage may be collected anywhere, in the middle of the renewer's own work too."""
    lease = Lease(store)
    with renewer._condition, renewer.releases._condition:
        asking = threading.Thread(target=renewer.releases.put, args=(lease,))
        asking.start()
        asking.join(10)
        assert not asking.is_alive()
    eventually(lambda: lease.gave_back)


def test_a_request_that_nobody_knows_the_fate_of_is_abandoned(
    renewer: Renewer, store: Store
) -> None:
    request = Request(claims=(Claim("a"),), owner_id="unknown", ttl_us=2_000_000)
    store.next = [down]
    renewer.releases.abandon(cast(BaseBackend, store), request, clock.lease_now() + 2)
    eventually(lambda: store.abandoned == ["unknown"])


def test_releases_and_extensions_of_many_threads_do_not_get_in_each_others_way(
    renewer: Renewer,
) -> None:
    stores = [Store("first"), Store("second")]
    kept: list[Lease] = []

    def work(number: int) -> None:
        for turn in range(100):
            lease = Lease(stores[turn % 2], f"{number}-{turn}", ttl=2)
            renewer.add(lease)
            kept.append(lease)
            if turn % 2:
                lease.over = True
                renewer.discard(lease)
            else:
                renewer.releases.put(lease)
            if turn % 10 == 0:
                time.sleep(0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    renewer.releases.settle()
    eventually(lambda: not renewer.releases.pending)
    assert sum(len(lease.gave_back) for lease in kept) == 200
    for lease in kept:
        renewer.discard(lease)
    assert renewer.next_due() == math.inf
    assert not any(lease.lost for lease in kept)


@pytest.mark.usefixtures("brisk")
def test_the_schedule_outlives_whatever_a_lease_does(
    renewer: Renewer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Lease(store, "bad"), Lease(store, "good")

    def explode(*_: Any) -> bool:
        raise RuntimeError("a bug of ours")

    bad.extended = explode  # type: ignore[method-assign]
    renewer.add(bad)
    eventually(lambda: "a bug of ours" in caplog.text)
    renewer.add(good)
    eventually(lambda: len(good.first_sends) > 3)
    assert good.lost == []
    renewer.discard(good)
