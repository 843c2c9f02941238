"""What is too old goes: from every table of the history, by what each backend keeps."""

import io
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from distlocks import facts
from distlocks.claims import to_us
from distlocks.history.pruning import Pruned, prune
from distlocks.history.rollups import HOUR, MINUTE
from distlocks.models import LockEvent, LockRollup, LockWaiter
from tests.happenings import counted, event

pytestmark = pytest.mark.django_db(databases=["default", "postgres", "mariadb"])

DATABASES = ["default", "postgres", "mariadb"]
DAY = 86400.0
MEMORY = "distlocks.backends.memory.MemoryBackend"


def kept(**days: tuple[float, str]) -> Any:
    """Backends that keep so many days, in that database."""
    return override_settings(
        DISTLOCKS={
            alias: {"BACKEND": MEMORY, "HISTORY_DAYS": count, "HISTORY_DATABASE": database}
            for alias, (count, database) in days.items()
        }
    )


@pytest.fixture(params=DATABASES)
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """The database of the history: of "default" 10 days, of "brief" 2."""
    with kept(default=(10, request.param), brief=(2, request.param)):
        yield request.param


def events(using: str) -> list[str]:
    return sorted(LockEvent.objects.using(using).values_list("key", flat=True))


def test_events_are_kept_as_long_as_their_backend_says(using: str) -> None:
    for backend in ("default", "brief", "gone"):
        for days in (1, 3, 9, 11):
            event(using=using, ago=days * DAY, backend=backend, key=f"{backend} {days}")
    (pruned,) = prune()
    # Of a backend that nobody knows any more, as long as of the one of which most is kept.
    assert events(using) == [
        *("brief 1", "default 1", "default 3", "default 9", "gone 1", "gone 3", "gone 9"),
    ]
    assert pruned == Pruned(using, events=5)
    assert list(prune()) == [Pruned(using)]


def test_minutes_are_kept_for_three_days_and_hours_as_long_as_events(using: str) -> None:
    now = time.time()
    for span in (MINUTE, HOUR):
        for days in (1, 2.5, 4, 11):
            for backend in ("default", "brief"):
                counted(at=now - days * DAY, span=span, using=using, backend=backend, acquired=1)
    (pruned,) = prune()
    left = {
        (row.backend, row.span, round((now - row.began) / DAY, 1))
        for row in LockRollup.objects.using(using).filter(pattern="")
    }
    assert left == {
        ("default", MINUTE, 1.0),
        ("default", MINUTE, 2.5),
        ("default", HOUR, 1.0),
        ("default", HOUR, 2.5),
        ("default", HOUR, 4.0),
        ("brief", MINUTE, 1.0),
        ("brief", HOUR, 1.0),
    }
    assert (pruned.minutes, pruned.hours) == (10, 8)


def test_who_has_not_been_heard_of_for_a_day_waits_no_more(using: str) -> None:
    for days in (0.5, 2):
        told = to_us(time.time() - days * DAY)
        LockWaiter.objects.using(using).create(
            owner_id=f"{days}", backend="default", key="a", since=told, valid_until=told
        )
    (pruned,) = prune()
    assert pruned.waiters == 1
    assert [one.owner_id for one in LockWaiter.objects.using(using).all()] == ["0.5"]


def test_a_dry_run_counts_and_deletes_nothing(using: str) -> None:
    for backend in ("default", "brief", "gone"):
        for days in (1, 3, 11, 12):
            event(using=using, ago=days * DAY, backend=backend)
    counted(at=time.time() - 20 * DAY, using=using, acquired=1)
    (found,) = prune(dry_run=True)
    assert found == Pruned(using, events=7, minutes=2)
    assert LockEvent.objects.using(using).count() == 12
    assert list(prune()) == [found]


def test_rows_go_in_batches_each_by_itself(using: str) -> None:
    for number in range(25):
        event(using=using, ago=20 * DAY + number)
    with CaptureQueriesContext(connections[using]) as captured:
        (pruned,) = prune(batch_size=10)
    assert pruned.events == 25
    deletes = [one["sql"] for one in captured if one["sql"].startswith("DELETE")]
    assert len(deletes) == 3
    assert events(using) == []


def test_of_a_backend_without_history_nothing_is_kept() -> None:
    with kept(default=(0, "default"), other=(5, "postgres")):
        event(ago=1)
        event(ago=1, using="postgres", backend="other")
        list(prune())
        assert events("default") == []
        assert events("postgres") == ["order:42"]


def test_only_the_databases_of_the_named_backends_are_looked_at() -> None:
    with kept(default=(1, "default"), other=(1, "postgres")):
        for database in ("default", "postgres"):
            event(ago=2 * DAY, using=database)
        assert [one.database for one in prune(["other"])] == ["postgres"]
        assert (len(events("default")), len(events("postgres"))) == (1, 0)


# The command


def sweep(**options: Any) -> str:
    out = io.StringIO()
    call_command("sweep_locks", stdout=out, **options)
    return out.getvalue()


@pytest.fixture(params=DATABASES)
def swept(request: pytest.FixtureRequest) -> Iterator[str]:
    """The database of the locks and of their history."""
    backend = {
        "BACKEND": "distlocks.backends.database.DatabaseBackend",
        "OPTIONS": {"using": request.param},
        "HISTORY_DAYS": 10,
        "HISTORY_DATABASE": request.param,
        "GUARD_DATABASES": [],
    }
    with override_settings(DISTLOCKS={"default": backend}):
        yield request.param


def test_the_command_prunes_and_says_so(swept: str) -> None:
    for days in (1, 11, 12):
        event(using=swept, ago=days * DAY)
    counted(at=time.time() - 4 * DAY, using=swept, acquired=1)
    said = f"history on {swept}: would delete 2 events, 2 minutes and 0 hours of statistics"
    assert said in sweep(dry_run=True)
    assert len(events(swept)) == 3
    said = f"history on {swept}: deleted 2 events, 2 minutes and 0 hours of statistics"
    assert said in sweep(batch_size=1)
    assert len(events(swept)) == 1


def test_without_the_tables_the_command_says_what_makes_them(
    swept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LockEvent._meta, "db_table", "distlocks_missing")
    with pytest.raises(CommandError, match=f"migrate distlocks --database {swept}"):
        sweep()


def test_kinds_of_events_make_no_difference(using: str) -> None:
    for kind in facts.KINDS:
        event(kind, using=using, ago=11 * DAY)
    (pruned,) = prune()
    assert pruned.events == len(facts.KINDS)
