"""Events in pages: none is left out, none comes twice, whatever is asked for."""

import time
from itertools import pairwise
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from distlocks import facts
from distlocks.claims import to_us
from distlocks.history.events import Cursor, Page, Wanted, every, page
from distlocks.models import LockEvent
from tests.happenings import event, event_at

pytestmark = pytest.mark.django_db(databases=["default", "postgres", "mariadb"])

on_each = pytest.mark.parametrize("using", ["default", "postgres", "mariadb"])
ALL = ["default", "postgres", "mariadb"]
NOW = 1_790_000_000.25


def keys(found: Page) -> list[str]:
    assert found.troubles == []
    return [one.key for one in found.events]


def wanted_keys(using: str, **wanted: Any) -> list[str]:
    return keys(page([using], Wanted(**wanted), size=50))


def walk(databases: list[str], wanted: Wanted, size: int) -> list[str]:
    """The keys of all pages, which must be the same on the way back."""
    pages = [page(databases, wanted, size=size)]
    assert pages[0].newer is None
    while (older := pages[-1].older) is not None:
        pages.append(page(databases, wanted, size=size, older_than=older))
    for newer, older_page in pairwise(pages):
        back = page(databases, wanted, size=size, newer_than=older_page.newer)
        assert keys(back) == keys(newer)
    return [key for one in pages for key in keys(one)]


@on_each
@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_pages_go_on_where_the_last_has_ended(using: str, size: int) -> None:
    for number in range(7):
        event_at(NOW - number // 3, facts.LOST, using=using, key=f"{number}")
    # Those of one moment come by their number.
    assert walk([using], Wanted(), size) == ["2", "1", "0", "5", "4", "3", "6"]


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_several_databases_are_one_list(size: int) -> None:
    for number in range(4):
        for using in ALL:
            event_at(NOW - number // 2, facts.LOST, using=using, key=f"{using} {number}")
            event_at(NOW - number // 2, facts.FORCED, using=using, key=f"{using} {number}f")
    expected = [
        f"{using} {number}{kind}"
        for numbers in ((1, 0), (3, 2))
        for using in ALL
        for number in numbers
        for kind in ("f", "")
    ]
    assert walk(ALL, Wanted(), size) == expected
    assert walk(ALL, Wanted(kinds=(facts.LOST, facts.FORCED)), size) == expected
    assert walk(ALL, Wanted(kinds=facts.KINDS), size) == expected
    lost = [key for key in expected if not key.endswith("f")]
    assert walk(ALL, Wanted(kinds=(facts.LOST,)), size) == lost
    assert walk(ALL, Wanted(backend="default"), size) == expected
    of_one = Wanted(pattern="postgres *", kinds=(facts.LOST,), backend="default")
    assert walk(ALL, of_one, size) == [key for key in lost if key.startswith("postgres")]


def test_who_goes_back_to_the_beginning_sees_what_is_new() -> None:
    for number in range(4):
        event_at(NOW - number, facts.LOST, key=f"{number}")
    second = page(
        ["default"], Wanted(), size=2, older_than=page(["default"], Wanted(), size=2).older
    )
    event_at(NOW + 1, facts.LOST, key="new")
    first = page(["default"], Wanted(), size=3, newer_than=second.newer)
    assert keys(first) == ["new", "0", "1"]
    assert first.newer is None
    assert first.older is not None
    LockEvent.objects.all().delete()
    assert keys(page(["default"], Wanted(), size=2, newer_than=second.newer)) == []


@on_each
def test_a_key_is_found_as_it_is_or_by_its_beginning(using: str) -> None:
    for number, key in enumerate(
        ["order:1", "order:12", "Order:1", "order:1 ", "order:", "order", "orderly", "órder:1", ""]
    ):
        event_at(NOW - number, facts.LOST, using=using, key=key)
    event_at(NOW - 20, facts.LOST, using=using, key="order:\U0010fffd")
    assert wanted_keys(using, key="order:1") == ["order:1"]
    assert wanted_keys(using, key="order:", is_beginning=True) == [
        *("order:1", "order:12", "order:1 ", "order:", "order:\U0010fffd"),
    ]
    assert wanted_keys(using, key="order:1", is_beginning=True) == [
        *("order:1", "order:12", "order:1 "),
    ]
    assert wanted_keys(using, key="%", is_beginning=True) == []
    assert len(wanted_keys(using, key="", is_beginning=True)) == 10


@on_each
def test_filters_go_together(using: str) -> None:
    event_at(NOW, facts.LOST, using=using, key="order:1", backend="redis")
    event_at(NOW - 1, facts.TIMED_OUT, using=using, key="order:1", owner_id="mine")
    event_at(NOW - 2, facts.EXPIRED, using=using, key="stock:1")
    event_at(NOW - 3, facts.TAKEN_OVER, using=using, key="order:2")
    assert wanted_keys(using, backend="redis") == ["order:1"]
    assert wanted_keys(using, kinds=(facts.TIMED_OUT,)) == ["order:1"]
    assert wanted_keys(using, kinds=(facts.EXPIRED, facts.TAKEN_OVER)) == ["stock:1", "order:2"]
    assert wanted_keys(using, pattern="order:*") == ["order:1", "order:1", "order:2"]
    assert wanted_keys(using, pattern="order:*", backend="default", key="order:2") == ["order:2"]
    assert wanted_keys(using, key="order:1", owner_id="mine") == ["order:1"]
    assert wanted_keys(using, since=to_us(NOW - 1)) == ["order:1", "order:1"]
    assert wanted_keys(using, until=to_us(NOW - 1)) == ["stock:1", "order:2"]
    assert wanted_keys(using, since=to_us(NOW - 2), until=to_us(NOW - 1)) == ["stock:1"]


@on_each
def test_all_of_them_come_in_pages(using: str) -> None:
    for number in range(5):
        event_at(NOW - number, facts.LOST, using=using, key=f"{number}")
    sizes = [len(one.events) for one in every([using], Wanted(), limit=100, chunk=2)]
    assert sizes == [2, 2, 1]
    pages = list(every([using], Wanted(), limit=3, chunk=2))
    assert [key for one in pages for key in keys(one)] == ["0", "1", "2"]
    # There would have been more.
    assert pages[-1].older is not None
    assert list(every([using], Wanted(), limit=5, chunk=5))[-1].older is None


@on_each
@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(),
        Wanted(key="order:", is_beginning=True),
        Wanted(kinds=(facts.CONTENDED,), backend="default", pattern="order:*"),
        Wanted(since=0),
    ],
)
def test_a_page_is_one_query_however_many_there_are(using: str, wanted: Wanted) -> None:
    def queries(**where: Any) -> int:
        with CaptureQueriesContext(connections[using]) as captured:
            assert page([using], wanted, size=5, **where).events
        return sum("SAVEPOINT" not in one["sql"] for one in captured)

    event(using=using, ago=100)
    assert queries() == 1
    for number in range(30):
        event(using=using, ago=number)
    assert queries() == 1
    assert queries(older_than=page([using], wanted, size=5).older) == 1


@pytest.mark.parametrize(
    "text", ["", "1", "1-2", "1-2-3-4", "a-b-c", "-1-2-3", "1-2-٣", "9" * 20 + "-0-0"]
)
def test_what_is_no_cursor_is_none(text: str) -> None:
    assert Cursor.read(text) is None


def test_a_cursor_is_read_back() -> None:
    made = event(ago=1)
    cursor = Cursor.of(LockEvent.objects.get(pk=made.pk), ["default"])
    assert Cursor.read(str(cursor)) == cursor
    assert abs(cursor.at / 1e6 - time.time()) < 60
