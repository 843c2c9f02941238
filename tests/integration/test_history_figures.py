"""What has happened in a time, in numbers: read from the tables of every database."""

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from distlocks.history.figures import MAX_PATTERNS, RANGES, Window, summary
from distlocks.history.rollups import HOUR, MINUTE, Cells
from tests.happenings import counted

pytestmark = pytest.mark.django_db(databases=["default", "postgres", "mariadb"])

# A moment in the middle of a minute, an hour and a day.
NOW = 1_790_000_000 // 86400 * 86400 + 45_030.0

on_each = pytest.mark.parametrize("using", ["default", "postgres", "mariadb"])


def last(name: str) -> Window:
    return Window.back_from(NOW, name)


@pytest.mark.parametrize("name", RANGES)
def test_a_window_begins_with_a_point_and_ends_now(name: str) -> None:
    length, step = RANGES[name]
    window = last(name)
    moments = list(window.moments())
    assert window.since % step == 0
    assert length <= window.until - window.since < length + step + 1
    assert [at for at, _ in moments] == list(range(window.since, window.until, step))
    assert sum(seconds for _, seconds in moments) == window.until - window.since
    assert 10 <= len(moments) <= 170


@on_each
def test_numbers_are_added_up_by_time(using: str) -> None:
    for backend in ("default", "redis"):
        counted(at=NOW - 600, using=using, backend=backend, acquired=5, contended=2)
        counted(at=NOW - 640, using=using, backend=backend, pattern="stock:*", acquired=1)
        counted(at=NOW - 7000, using=using, backend=backend, acquired=100)
        # Hours are the same again.
        counted(at=NOW - 600, span=HOUR, using=using, backend=backend, acquired=1000)
    found = summary([using], last("1h"))
    assert found.troubles == []
    assert found.total.counts["acquired"] == 12
    assert found.total.counts["contended"] == 4
    assert list(found.patterns) == ["order:*", "stock:*"]
    assert found.patterns["order:*"].counts["acquired"] == 10
    by_time = {
        point.at: point.figures.counts["acquired"] for point in found.points if point.figures
    }
    assert {at: count for at, count in by_time.items() if count} == {
        int(NOW - 600) // 60 * 60: 10,
        int(NOW - 640) // 60 * 60: 2,
    }
    assert summary([using], last("24h")).total.counts["acquired"] == 2000


@on_each
def test_of_six_hours_a_point_is_five_minutes(using: str) -> None:
    at = int(NOW - 3600) // 300 * 300
    for minute in range(5):
        counted(at=at + minute * 60, using=using, acquired=1)
    found = summary([using], last("6h"))
    (point,) = [one for one in found.points if one.figures and one.figures.counts["acquired"]]
    assert (point.at, point.per_minute("acquired")) == (at, 1.0)


@on_each
def test_one_backend_or_one_pattern_can_be_asked_for(using: str) -> None:
    counted(at=NOW - 60, using=using, acquired=1)
    counted(at=NOW - 60, using=using, backend="redis", acquired=10)
    counted(at=NOW - 60, using=using, pattern="stock:*", acquired=100)

    def acquired(**filters: str) -> tuple[int, list[str]]:
        found = summary([using], last("15m"), **filters)
        return found.total.counts["acquired"], sorted(found.patterns)

    assert acquired() == (111, ["order:*", "stock:*"])
    assert acquired(backend="redis") == (10, ["order:*"])
    assert acquired(pattern="stock:*") == (100, ["order:*", "stock:*"])
    assert acquired(pattern="order:*", backend="default") == (1, ["order:*", "stock:*"])
    assert acquired(pattern="Order:*") == (0, ["order:*", "stock:*"])


@on_each
def test_waits_and_holds_have_percentiles(using: str) -> None:
    counted(at=NOW - 60, using=using, acquired=100, waits=(0.0005,) * 98 + (20.0,) * 2)
    counted(at=NOW - 60, using=using, pattern="b", acquired=1, holds=(0.2,) * 10)
    found = summary([using], last("15m"))
    assert found.total.wait(50) == pytest.approx(0.0005, abs=0.0005)
    assert found.total.wait(99) == pytest.approx(20, abs=10)
    assert found.total.hold(95) == pytest.approx(0.2, abs=0.15)
    assert found.total.wait_seconds == pytest.approx(0.049 + 40)
    # Of patterns, only the seconds in all are read.
    assert found.patterns["order:*"].wait_seconds == pytest.approx(0.049 + 40)
    assert found.patterns["b"].hold_seconds == pytest.approx(2)


@on_each
def test_before_anything_was_counted_nothing_is_known_and_afterwards_none_is_zero(
    using: str,
) -> None:
    assert {point.figures for point in summary([using], last("15m")).points} == {None}
    assert summary([using], last("15m")).known_since is None
    counted(at=NOW - 300, using=using, acquired=1)
    found = summary([using], last("15m"))
    first = int(NOW - 300) // 60 * 60
    assert found.known_since == first
    for point in found.points:
        expected = None if point.at < first else int(point.at == first)
        assert point.per_minute("acquired") == expected
        # How long nothing took, nobody knows.
        assert point.figures is None or point.figures.wait(50) is None
    # What another backend has counted is known of this one, too: it was none.
    assert summary([using], last("15m"), backend="redis").points[-1].per_minute("acquired") == 0


def test_a_minute_that_has_just_begun_is_not_shown_yet() -> None:
    counted(at=NOW - 60, acquired=1)
    begun = int(NOW) // 60 * 60
    assert summary(["default"], Window.back_from(begun + 5, "15m")).points[-1].at == begun - 60
    counted(at=begun, acquired=3)
    point = summary(["default"], Window.back_from(begun + 30, "15m")).points[-1]
    # Nor is its rate that of a whole one.
    assert (point.at, point.seconds, point.per_minute("acquired")) == (begun, 30, 6.0)


@on_each
def test_the_most_contended_patterns_come_first_and_are_few(using: str) -> None:
    for number in range(MAX_PATTERNS + 5):
        counted(at=NOW - 60, using=using, pattern=f"p{number:02d}", acquired=1, contended=number)
    names = list(summary([using], last("15m")).patterns)
    assert names == [f"p{number:02d}" for number in range(MAX_PATTERNS + 4, 4, -1)]


def test_several_databases_are_added_up() -> None:
    for using in ("default", "postgres"):
        counted(at=NOW - 60, using=using, acquired=3)
    counted(at=NOW - 120, using="postgres", acquired=4)
    found = summary(["default", "postgres"], last("15m"))
    assert found.total.counts["acquired"] == 10
    assert found.patterns["order:*"].counts["acquired"] == 10
    assert found.known_since == int(NOW - 120) // 60 * 60


@on_each
def test_more_rows_are_not_more_queries(using: str) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connections[using]) as captured:
            summary([using], last("6h"))
        return sum(one["sql"].startswith("SELECT") for one in captured)

    counted(at=NOW - 60, using=using, acquired=1)
    few = queries()
    for number in range(30):
        counted(at=NOW - 60 * number, using=using, pattern=f"p{number}", acquired=1, contended=1)
    assert queries() == few == 3


def test_what_is_about_no_key_is_counted_once() -> None:
    cells = Cells()
    cells.count("errors", "default", "", NOW)
    counts = {(key.span, key.pattern): cell.counts["errors"] for key, cell in cells.take()}
    assert counts == {(MINUTE, ""): 1, (HOUR, ""): 1}
