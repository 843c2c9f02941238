"""manage.py sweep_locks: what expired is cleared and reported, what is old goes, the rest stays."""

import io
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import override_settings

from distlocks import Lease, LeaseLost, LockTimeout, db_lock, locks
from distlocks.backends.memory import MemoryBackend
from distlocks.models import Lock, LockHolder
from distlocks.signals import locks_expired
from distlocks.testing import flush_events
from tests.factories import SECOND, LockFactory, now_us
from tests.integration.contract.stores import POSTGRES_STORES
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("databases")

HOUR = 3600
DAY = 24 * HOUR
STORES = {
    "sqlite": "default",
    "portable_sqlite": "default",
    "postgres": "postgres",
    "portable_postgres": "postgres",
}


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def using(databases: None, backend: str) -> str:
    """The store's database, with no locks in it."""
    Lock.objects.using(STORES[backend]).delete()
    # Also what processes left behind that other tests have killed.
    LockHolder.objects.using(STORES[backend]).delete()
    return STORES[backend]


def sweep(backend: str | None, *options: str, **more: Any) -> str:
    """What the command prints."""
    out = io.StringIO()
    chosen = ("--backend", backend) if backend else ()
    call_command("sweep_locks", *chosen, *options, stdout=out, stderr=out, **more)
    return out.getvalue()


def rows(using: str) -> dict[str, tuple[str, int, int]]:
    found = Lock.objects.using(using).values_list("key", "owner_id", "fencing_token", "expires_at")
    return {key: tuple(rest) for key, *rest in found}


def summary(output: str) -> tuple[int, int, int]:
    """Examined, cleared, deleted."""
    match = re.search(
        r"examined (\d+) rows, (?:would clear|cleared) (\d+) expired, "
        r"(?:would delete|deleted) (\d+) free, in \d+\.\d s",
        output,
    )
    assert match, output
    return int(match[1]), int(match[2]), int(match[3])


@pytest.fixture
def heard() -> Iterator[list[dict[str, Any]]]:
    """What the signal has told."""
    found: list[dict[str, Any]] = []

    def handle(**event: Any) -> None:
        found.append(event)

    locks_expired.connect(handle)
    yield found
    locks_expired.disconnect(handle)


def every_kind(using: str) -> None:
    """One row in every state that there is."""
    LockFactory(using=using, key="live")
    LockFactory(using=using, key="live, taken long ago", age=30 * DAY)
    LockFactory(using=using, key="cooling", cooling=True)
    LockFactory(using=using, key="expired", expired=True, label="nightly")
    LockFactory(using=using, key="expired, taken long ago", expired=True, age=2 * DAY)
    LockFactory(using=using, key="free", free=True)
    LockFactory(using=using, key="free for 23 hours", free=True, age=23 * HOUR)
    LockFactory(using=using, key="free for 25 hours", free=True, age=25 * HOUR)
    LockFactory(using=using, key="free for a year", free=True, age=365 * DAY)


UNTOUCHED = {"live", "live, taken long ago", "cooling", "free", "free for 23 hours"}
DELETED = {"expired, taken long ago", "free for 25 hours", "free for a year"}


def test_each_state_gets_what_it_is_due(
    backend: str, using: str, heard: list[dict[str, Any]]
) -> None:
    every_kind(using)
    before = rows(using)
    output = sweep(backend)
    after = rows(using)
    assert set(after) == UNTOUCHED | {"expired"}
    for key in UNTOUCHED:
        assert after[key] == before[key]
    owner_id, token, expires_at = after["expired"]
    assert (owner_id, expires_at) == ("", 0)
    assert token >= before["expired"][1]
    assert summary(output) == (9, 2, 3)

    # It says who left them behind, on paper and by signal.
    assert re.search(
        r"expired: 'expired', held by web-1 pid \d+ thread MainThread \(nightly\) since "
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, ran out (29|3\d) s ago",
        output,
    )
    assert "expired: 'expired, taken long ago'" in output
    assert "'live'" not in output
    flush_events()
    assert {key for event in heard for key in event["keys"]} == {
        "expired",
        "expired, taken long ago",
    }
    assert {holder.label for event in heard for holder in event["holders"]} == {"nightly", ""}
    assert all(event["alias"] == backend for event in heard)
    assert all(event["sender"] is type(locks[backend]) for event in heard)


def test_a_second_sweep_finds_nothing_more(
    backend: str, using: str, heard: list[dict[str, Any]]
) -> None:
    every_kind(using)
    sweep(backend)
    before = rows(using)
    flush_events()
    heard.clear()
    output = sweep(backend)
    assert summary(output) == (6, 0, 0)
    assert "expired:" not in output
    assert rows(using) == before
    flush_events()
    assert heard == []


def test_a_dry_run_says_the_same_and_changes_nothing(
    backend: str, using: str, heard: list[dict[str, Any]]
) -> None:
    every_kind(using)
    before = rows(using)
    dry = sweep(backend, "--dry-run")
    assert rows(using) == before
    flush_events()
    assert heard == []
    assert "would clear 2 expired, would delete 3 free" in dry
    wet = sweep(backend)
    assert summary(dry) == summary(wet)
    named = re.compile(r"expired: '(.*?)'")
    assert named.findall(dry) == named.findall(wet)


def test_in_batches_of_any_size_the_result_is_the_same(backend: str, using: str) -> None:
    results = []
    for size in (1, 2, 3, 7, 8, 9, 10, 1000):
        Lock.objects.using(using).delete()
        every_kind(using)
        output = sweep(backend, "--batch-size", str(size))
        states = {key: (row[0] == "", row[2] > 0) for key, row in rows(using).items()}
        results.append((summary(output), states))
    assert all(result == results[0] for result in results)
    assert results[0][0] == (9, 2, 3)


def test_an_empty_table_is_no_trouble(backend: str, using: str) -> None:
    assert summary(sweep(backend)) == (0, 0, 0)
    assert summary(sweep(backend, "--dry-run")) == (0, 0, 0)


def test_keys_of_every_kind_are_walked_past(backend: str, using: str) -> None:
    keys = [
        " ",
        "%",
        "'",
        '"',
        "\\",
        "a",
        "A",
        "á",
        "Z",
        "z ",
        "~",
        "ü",
        "鍵",
        "\uffff",
        "🔒",
        "🔒 ",
    ]
    for number, key in enumerate(keys):
        LockFactory(using=using, key=key, expired=True, age=60 if number % 2 else 2 * DAY)
    output = sweep(backend, "--batch-size", "1")
    assert summary(output) == (16, 16, 8)
    assert set(rows(using)) == set(keys[1::2])


def test_many_expired_ones_are_counted_and_named_on_request(backend: str, using: str) -> None:
    for number in range(25):
        LockFactory(using=using, key=f"lost:{number:02d}", expired=True)
    dry = sweep(backend, "--dry-run")
    assert dry.count("expired: ") == 20
    assert "… and 5 more (-v 2 names all)" in dry
    verbose = sweep(backend, "--verbosity", "2")
    assert verbose.count("expired: ") == 25
    assert "more" not in verbose


def test_the_age_at_which_free_rows_go_can_be_set(backend: str, using: str) -> None:
    for hours in (1, 2, 3, 48, 24 * 8):
        LockFactory(using=using, key=f"{hours}", free=True, age=hours * HOUR + 60)
    assert summary(sweep(backend, "--older-than", "7d")) == (5, 0, 1)
    assert summary(sweep(backend, "--older-than", "2.5h")) == (4, 0, 2)
    assert summary(sweep(backend, "--older-than", "7200")) == (2, 0, 1)
    assert summary(sweep(backend, "--older-than", "60m")) == (1, 0, 1)
    assert rows(using) == {}


# With locks at work


def test_a_lock_that_is_held_is_still_held_after_the_sweep(backend: str, using: str) -> None:
    with db_lock("mine", backend=backend) as lease:
        sweep(backend)
        lease.extend()
        assert db_lock("mine", backend=backend, timeout=0).try_acquire() is None
    assert lease.release() is True


def test_a_lock_that_was_swept_is_the_next_ones(backend: str, using: str) -> None:
    lease = db_lock("late", backend=backend, renew=False, ttl=1).acquire()
    Lock.objects.using(using).filter(key="late").update(expires_at=now_us() - SECOND)
    assert summary(sweep(backend)) == (1, 1, 0)
    with db_lock("late", backend=backend, timeout=0) as next_one:
        assert next_one.fencing_token > lease.fencing_token
        assert lease.release() is False
        with pytest.raises(LeaseLost):
            lease.extend()
        assert not next_one.lost


def test_a_freed_row_keeps_its_token_and_a_deleted_one_is_outgrown(
    backend: str, using: str
) -> None:
    LockFactory(using=using, key="fresh", free=True)
    LockFactory(using=using, key="old", free=True, age=2 * DAY)
    tokens = {key: row[1] for key, row in rows(using).items()}
    sweep(backend)
    assert set(rows(using)) == {"fresh"}
    with db_lock("fresh", "old", backend=backend, timeout=0) as lease:
        for key, token in lease.fencing_tokens.items():
            assert token > tokens[key]


def test_a_waiter_is_woken_by_the_sweep_of_its_key(backend: str, using: str) -> None:
    """Its holder is dead, and it need not sleep to the end it was told."""
    LockFactory(using=using, key="dead", expires_at=now_us() + 60 * SECOND)
    with ThreadPoolExecutor(1) as pool:

        def wait() -> None:
            with db_lock("dead", backend=backend, timeout=20):
                pass
            connections.close_all()

        waiting = pool.submit(wait)
        assert not waiting.done()
        Lock.objects.using(using).filter(key="dead").update(expires_at=now_us() - SECOND)
        sweep(backend)
        waiting.result(20)


def in_thread(work: Callable[[], Any]) -> Any:
    """Its result, from a thread of its own that must not take long."""

    def run() -> Any:
        try:
            return work()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(20)


@pytest.mark.parametrize("backend", ["postgres"])
@pytest.mark.parametrize("lock_mode", ["FOR UPDATE", "FOR SHARE"])
def test_a_row_in_another_sessions_hands_is_passed_over(
    backend: str, using: str, lock_mode: str
) -> None:
    every_kind(using)
    in_hands = ["expired", "free for 25 hours", "live"]
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        cursor.execute(
            f"SELECT key FROM distlocks_lock WHERE key = ANY(%s) {lock_mode}", [in_hands]
        )
        # It does not wait, or this would not end.
        output = in_thread(lambda: sweep(backend))
        assert summary(output) == (9, 1, 2)
    assert set(rows(using)) >= {*in_hands}
    assert rows(using)["expired"][0] != ""
    # The next one finds them.
    assert summary(sweep(backend)) == (7, 1, 1)


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_a_live_lock_in_another_sessions_hands_is_not_waited_for(backend: str, using: str) -> None:
    every_kind(using)
    if using == "postgres":
        with transaction.atomic(using=using):
            Lock.objects.using(using).select_for_update().get(key="live")
            in_thread(lambda: sweep(backend))
    else:
        # A sweep that has nothing to do takes no write lock.
        sweep(backend)
        with transaction.atomic(using=using):
            Lock.objects.using(using).filter(key="live").update(label="being changed")
            assert summary(in_thread(lambda: sweep(backend))) == (6, 0, 0)


def test_beside_all_kinds_of_work_no_live_lock_is_lost(backend: str, using: str) -> None:
    """Acquired, extended, released, left to expire and taken over, while the sweep never rests."""
    stop, swept, lost = threading.Event(), [0], []
    tokens: dict[str, list[int]] = {key: [] for key in ("a", "b", "c")}
    holding: dict[str, int] = {}
    dead: list[Lease] = []

    def keep_sweeping() -> None:
        while not stop.is_set():
            for size in (1, 2, 100):
                # Free rows are deleted almost at once, which the command would never do.
                for _ in locks[backend].sweep(older_than=0.02, batch_size=size):
                    pass
            swept[0] += 1
        connections.close_all()

    def work(number: int) -> None:
        for turn in range(15):
            key = "abc"[(number + turn) % 3]
            lease = db_lock(key, backend=backend, timeout=30, on_lost=lost.append).acquire()
            assert holding.setdefault(key, number) == number
            tokens[key].append(lease.fencing_token)
            lease.extend()
            del holding[key]
            if turn % 5 == 4:
                # Its holder has died: expired as far as the store can tell.
                overdue = now_us() - SECOND
                Lock.objects.using(using).filter(owner_id=lease.owner_id).update(expires_at=overdue)
                dead.append(lease)
            else:
                assert lease.release() is True
        connections.close_all()

    # Held throughout, under the eyes of every sweep.
    with (
        db_lock("held", backend=backend, on_lost=lost.append) as held,
        ThreadPoolExecutor(4) as pool,
    ):
        sweeper = pool.submit(keep_sweeping)
        try:
            for worker in [pool.submit(work, number) for number in range(3)]:
                worker.result(50)
        finally:
            stop.set()
        sweeper.result(20)
        held.extend()
        assert not held.lost
    for lease in dead:
        lease.release()
    assert swept[0] > 0
    for given in tokens.values():
        assert given == sorted(set(given))
        assert len(given) == 15
    flush_events()
    assert held not in lost


# Which stores


class Forgetful(MemoryBackend):
    """A store that forgets dead leases by itself."""

    supports_sweep = False


FORGETFUL = {"BACKEND": f"{__name__}.Forgetful"}


def test_an_unknown_alias_is_answered_with_the_known_ones() -> None:
    with pytest.raises(CommandError, match=r"no lock backend 'nowhere'.*'?default'?, .*memory"):
        sweep("nowhere")


def test_an_alias_with_nothing_to_sweep_is_an_error_only_when_it_is_named() -> None:
    aliases = settings.DISTLOCKS | {"forgetful": FORGETFUL}
    with override_settings(DISTLOCKS=aliases):
        with pytest.raises(CommandError, match="'forgetful' has nothing to sweep"):
            sweep("forgetful")
        assert "forgetful" not in sweep(None)


def test_with_nothing_at_all_to_sweep_it_says_so() -> None:
    with (
        override_settings(DISTLOCKS={"default": FORGETFUL}),
        pytest.raises(CommandError, match="No configured lock backend has anything to sweep"),
    ):
        sweep(None)


def test_aliases_that_share_a_table_sweep_it_once() -> None:
    for using in ("default", "postgres"):
        Lock.objects.using(using).delete()
        LockFactory(using=using, expired=True)
    output = sweep(None)
    assert output.count("examined 1 rows, cleared 1 expired") == 2
    told = re.findall(r"^(\w+): examined", output, re.MULTILINE)
    # One line for each table. What a fast path has in a table is swept with its locks in Redis.
    tables = (
        "sqlite",
        "portable_sqlite",
        "default",
        *POSTGRES_STORES,
        "mariadb",
        "portable_mariadb",
    )
    assert len([alias for alias in told if alias in tables]) == len(
        {"default", "postgres", "mariadb"}
    )
    # Advisory locks have a table of their own.
    assert "advisory" in told


def test_several_aliases_may_be_named() -> None:
    out = io.StringIO()
    call_command("sweep_locks", "--backend", "sqlite", "--backend", "postgres", stdout=out)
    assert re.findall(r"^(\w+): examined", out.getvalue(), re.MULTILINE) == ["sqlite", "postgres"]


@pytest.mark.parametrize("using", ["default", "postgres"])
def test_a_prefix_is_not_shown(using: str) -> None:
    Lock.objects.using(using).delete()
    database = settings.DISTLOCKS["default"]["BACKEND"]
    shop = {"BACKEND": database, "KEY_PREFIX": "shop:", "OPTIONS": {"using": using}}
    LockFactory(using=using, key="shop:order:42", expired=True)
    with override_settings(DISTLOCKS={"default": shop}):
        assert "expired: 'order:42'" in sweep(None)


def test_keys_of_another_alias_in_the_same_table_are_swept_and_named_in_full() -> None:
    """A table is swept as a whole, whoever's keys are in it."""
    Lock.objects.all().delete()
    database = settings.DISTLOCKS["default"]["BACKEND"]
    shop = {"BACKEND": database, "KEY_PREFIX": "shop:"}
    LockFactory(key="blog:post:7", expired=True)
    with override_settings(DISTLOCKS={"default": shop}):
        output = sweep(None)
    assert summary(output) == (1, 1, 0)
    assert "expired: 'blog:post:7'" in output


# Wrong words


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--older-than", "59m", "'59m' is too short: at least 1h"),
        ("--older-than", "3599", "'3599' is too short"),
        ("--older-than", "0", "'0' is no length of time"),
        ("--older-than", "-1d", "'-1d' is no length of time"),
        ("--older-than", "1w", "'1w' is no length of time: give seconds, or a number with a unit"),
        ("--older-than", "", "'' is no length of time"),
        ("--older-than", "d", "'d' is no length of time"),
        ("--older-than", "nan", "'nan' is no length of time"),
        ("--older-than", "inf", "'inf' is no length of time"),
        ("--older-than", "a day", "'a day' is no length of time"),
        ("--batch-size", "0", "'0' is not a number of rows"),
        ("--batch-size", "-5", "'-5' is not a number of rows"),
        ("--batch-size", "1.5", "'1.5' is not a number of rows"),
        ("--batch-size", "many", "'many' is not a number of rows"),
        ("--batch-size", "100001", "'100001' is not a number of rows"),
        ("--interval", "0", "'0' is no length of time"),
        ("--interval", "soon", "'soon' is no length of time"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_touched(
    option: str, value: str, words: str
) -> None:
    Lock.objects.all().delete()
    LockFactory(expired=True)
    before = rows("default")
    with pytest.raises(CommandError) as caught:
        sweep("sqlite", f"{option}={value}")
    assert option in str(caught.value)
    assert words in str(caught.value)
    assert rows("default") == before


@pytest.mark.parametrize("value", ["3600", "1h", "60m", "1d", "0.5d", "365d"])
def test_ages_are_seconds_or_have_a_unit(value: str) -> None:
    Lock.objects.all().delete()
    assert summary(sweep("sqlite", "--older-than", value)) == (0, 0, 0)


def test_quiet_means_quiet_about_progress_only() -> None:
    Lock.objects.all().delete()
    LockFactory(expired=True)
    assert summary(sweep("sqlite", "--verbosity", "0")) == (1, 1, 0)


def test_the_sweep_itself_waits_for_no_lock_of_the_same_name() -> None:
    """It takes no lock to work: two may run at once."""
    Lock.objects.all().delete()
    for number in range(50):
        LockFactory(key=f"{number}", expired=True)
    with ThreadPoolExecutor(2) as pool:

        def run() -> int:
            try:
                return summary(sweep("sqlite", "--batch-size", "3"))[1]
            finally:
                connections.close_all()

        assert sum(one.result(30) for one in [pool.submit(run) for _ in range(2)]) == 50


def test_lock_timeouts_are_not_swept_under_the_carpet(backend: str, using: str) -> None:
    """What the sweep leaves is still in the way of who asks for it."""
    every_kind(using)
    sweep(backend)
    for key in ("live", "live, taken long ago", "cooling"):
        with pytest.raises(LockTimeout):
            db_lock(key, backend=backend, timeout=0).acquire()
    for key in sorted(UNTOUCHED | DELETED | {"expired"} - {"live"}):
        if not key.startswith(("live", "cooling")):
            with db_lock(key, backend=backend, timeout=0):
                pass


def test_time_passes_between_two_looks(backend: str, using: str) -> None:
    """A lock that was live when the sweep began may be expired at the next one."""
    LockFactory(using=using, key="short", expires_at=now_us() + 300_000)
    assert summary(sweep(backend)) == (1, 0, 0)
    eventually(lambda: time.sleep(0.05) or summary(sweep(backend)) == (1, 1, 0))
