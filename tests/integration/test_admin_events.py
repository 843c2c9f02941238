"""The history page: what it finds, to whom it shows it, and the files that it makes."""

import csv
import io
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError, connections
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from distlocks import facts
from distlocks.admin import export, history
from distlocks.admin.asked import NotAMoment, moment_us
from distlocks.claims import from_us
from distlocks.keys import SEPARATOR
from distlocks.models import LockEvent
from tests.happenings import event
from tests.integration.test_admin_statistics import DATABASES, MEMORY, WEIRD, kept_in, staff, text

pytestmark = pytest.mark.django_db(databases=["default", "postgres", "mariadb"])

PAGE = "/admin/distlocks/lockevent/"
CSV, JSON = f"{PAGE}export/csv/", f"{PAGE}export/json/"


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    with kept_in("default"):
        yield


@pytest.fixture(params=DATABASES)
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    with kept_in(request.param):
        yield request.param


def keys(response: Any) -> list[str]:
    assert response.status_code == 200
    return [row["key"] for row in response.context["rows"]]


# What it finds


def test_it_shows_the_last_day_and_searches(using: str, admin_client: Client) -> None:
    event(facts.LOST, ago=3600, using=using, key="order:1", backend="redis")
    event(facts.EXPIRED, ago=7200, using=using, key="order:2", owner_id="mine")
    event(facts.TAKEN_OVER, ago=7300, using=using, key="stock:1")
    event(facts.LOST, ago=3 * 86400, using=using, key="old:1")

    def found(**asked: Any) -> list[str]:
        return keys(admin_client.get(PAGE, asked))

    assert found() == ["order:1", "order:2", "stock:1"]
    assert found(key="order:2") == ["order:2"]
    assert found(key="order:*") == ["order:1", "order:2"]
    assert found(key="order") == []
    assert found(kind="lost") == ["order:1"]
    assert found(kind="nonsense") == ["order:1", "order:2", "stock:1"]
    assert found(kind=["expired", "taken_over"]) == ["order:2", "stock:1"]
    assert found(backend="redis") == ["order:1"]
    assert found(pattern="order:*") == ["order:1", "order:2"]
    assert found(key="order:2", owner="mine") == ["order:2"]
    assert found(since="90m") == ["order:1"]
    assert found(since="all") == ["order:1", "order:2", "stock:1", "old:1"]
    assert found(until="2h") == ["order:2", "stock:1", "old:1"]
    assert found(since="4d", until="2d") == ["old:1"]


def test_a_tree_key_is_searched_as_it_is_shown(admin_client: Client) -> None:
    event(facts.LOST, key=f"customer:7{SEPARATOR}order:42")
    for key in ("customer:7 → order:42", f"customer:7{SEPARATOR}order:42", "customer:7 → *"):
        response = admin_client.get(PAGE, {"key": key})
        assert keys(response) == ["customer:7 → order:42"]
        assert key.replace(SEPARATOR, " → ") == response.context["asked"]["key"]


def test_pages_are_followed_by_their_links(using: str, admin_client: Client) -> None:
    for number in range(130):
        event(facts.LOST, ago=60 + number, using=using, key=f"order:{number:03d}")
    event(facts.FORCED, ago=10, using=using)
    seen: list[list[str]] = []
    address = "?kind=lost"
    while address:
        response = admin_client.get(PAGE + address)
        seen.append(keys(response))
        address = response.context["older"]
    assert [len(one) for one in seen] == [50, 50, 30]
    assert [key for one in seen for key in one] == [f"order:{number:03d}" for number in range(130)]
    assert keys(admin_client.get(PAGE + response.context["newer"])) == seen[1]
    assert keys(admin_client.get(PAGE + response.context["newest"])) == seen[0]


def test_a_row_tells_everything_and_leads_on(admin_client: Client) -> None:
    event(
        facts.TIMED_OUT,
        key="order:7",
        waited=10.0,
        fencing_token=1_790_000_000_000_007,
        label="checkout",
        metadata={"items": 3, "<b>": "<i>"},
        reason="The key was taken.",
        other={
            **{"host": "web-2", "pid": 9, "thread": "t", "label": "nightly"},
            **{"owner_id": "owner-2", "metadata": {"request": "af32"}},
        },
    )
    response = admin_client.get(PAGE)
    page = text(response)
    for told in (
        *("timed out", "order:7", "default", "checkout", "web-1, pid 4711, MainThread", "10 s"),
        *("nightly", "web-2, pid 9, t", "1790000000000007", "The key was taken.", "owner-2"),
        *("items", "<b>", "<i>", "af32"),
    ):
        assert told in page
    (row,) = response.context["rows"]
    for link in ("same_key", "same_pattern", "same_owner"):
        assert keys(admin_client.get(PAGE + row[link])) == ["order:7"]
    assert keys(admin_client.get(PAGE + row["other_owner"])) == []


STRANGE = (
    *WEIRD,
    "9" * 30 + "m",
    "999999d",
    "0000-00-00",
    "9999-12-31",
    "1-1-1",
    "99999999999",
    "1-1-" + "9" * 5000,
)


def test_weird_questions_have_an_answer(using: str, admin_client: Client) -> None:
    event(facts.LOST, using=using)
    for value in STRANGE:
        names = ("key", "pattern", "backend", "owner", "since", "until", "older", "newer")
        for asked in ({"key": value, "owner": value, "since": value}, dict.fromkeys(names, value)):
            response = admin_client.get(PAGE, asked)
            assert response.status_code == 200
            assert "<script>alert(1)" not in response.content.decode()
        saved: Any = admin_client.get(JSON, {"key": value, "since": value, "until": value})
        json.loads(b"".join(saved.streaming_content))


@override_settings(USE_THOUSAND_SEPARATOR=True)
def test_numbers_that_count_nothing_have_no_separators(admin_client: Client) -> None:
    shown = {"pid": 4711, "fencing_token": 1234567, "metadata": {"run": 7654321}}
    event(facts.LOST, other={"host": "web-2", "metadata": {"run": 8765432}}, **shown)
    page = text(admin_client.get(PAGE))
    for number in ("4711", "1234567", "7654321", "8765432"):
        assert number in page


def test_what_cannot_be_understood_is_told_and_left_out(admin_client: Client) -> None:
    event(facts.LOST, ago=60)
    response = admin_client.get(PAGE, {"since": "yesterday", "until": "soon", "owner": "somebody"})
    assert keys(response) == ["order:42"]
    assert set(response.context["errors"]) == {"since", "until", "owner"}
    page = response.content.decode()
    assert page.count('aria-invalid="true"') == 3
    assert "“yesterday” is no moment" in page


def test_the_number_of_queries_is_the_same_with_many_rows(using: str, admin_client: Client) -> None:
    def queries(**asked: Any) -> int:
        with (
            CaptureQueriesContext(connections["default"]) as users,
            CaptureQueriesContext(connections[using]) as captured,
        ):
            assert admin_client.get(PAGE, asked).status_code == 200
        asked_for = sum("SAVEPOINT" not in one["sql"] for one in captured)
        return asked_for + (len(users) if using != "default" else 0)

    questions: list[dict[str, Any]] = [
        *({}, {"key": "order:*"}, {"kind": ["lost", "expired"]}, {"pattern": "order:*"}),
    ]
    event(facts.LOST, using=using)
    few = [queries(**asked) for asked in questions]
    for number in range(120):
        event(facts.LOST, ago=number, using=using, metadata={"number": number})
    assert [queries(**asked) for asked in questions] == few
    assert max(few) <= 5


# Moments


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2026-01-31", datetime(2026, 1, 31, 6, tzinfo=UTC)),
        ("2026-01-31 18:00", datetime(2026, 2, 1, tzinfo=UTC)),
        ("2026-01-31T18:00:30", datetime(2026, 2, 1, 0, 0, 30, tzinfo=UTC)),
        ("2026-01-31T18:00Z", datetime(2026, 1, 31, 18, tzinfo=UTC)),
        ("2026-01-31T18:00+01:00", datetime(2026, 1, 31, 17, tzinfo=UTC)),
        ("2026-01-31T18:00 01:00", datetime(2026, 1, 31, 17, tzinfo=UTC)),
        ("2026-01-31T18:00:00.000001Z", datetime(2026, 1, 31, 18, 0, 0, 1, tzinfo=UTC)),
        ("1790000000", datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)),
        (" 1790000000.5 ", datetime(2026, 9, 21, 14, 13, 20, 500_000, tzinfo=UTC)),
    ],
)
def test_moments_are_read(written: str, meant: datetime) -> None:
    with timezone.override("America/Chicago"):
        assert from_us(moment_us(written)) == meant


def test_moments_may_be_told_by_how_long_ago_they_were() -> None:
    for written, seconds in (("15m", 900), ("2h", 7200), ("30d", 30 * 86400)):
        assert abs(moment_us(written) / 1e6 - (time.time() - seconds)) < 5


@pytest.mark.parametrize(
    "written", ["", "x", "1", "1w", "-1h", "2026-13-01", "2026-01-31 25:00", "٣h"]
)
def test_what_is_no_moment_is_refused(written: str) -> None:
    with pytest.raises(NotAMoment):
        moment_us(written)


# Who may


def test_who_may_see_it(client: Client) -> None:
    event(facts.LOST, key="secret")
    for path in (PAGE, CSV, JSON):
        assert client.get(path)["Location"].startswith("/admin/login/")
    somebody = staff("view_lock", "view_lockrollup", "change_lockevent")
    for path in (PAGE, CSV, JSON):
        assert somebody.get(path).status_code == 403


def test_the_permission_is_enough() -> None:
    event(facts.LOST)
    somebody = staff("view_lockevent")
    page = somebody.get(PAGE)
    assert keys(page) == ["order:42"]
    assert "/admin/distlocks/lockrollup/" not in page.content.decode()
    assert PAGE in somebody.get("/admin/").content.decode()
    assert len(lines(somebody.get(CSV))) == 2
    assert somebody.get(f"{PAGE}export/xml/").status_code == 404
    assert somebody.get(f"{PAGE}add/").status_code == 404
    assert somebody.post(PAGE).status_code == 405


# Files


def lines(response: Any) -> list[list[str]]:
    assert response.status_code == 200
    assert isinstance(response, StreamingHttpResponse)
    content = b"".join(cast("Iterator[bytes]", response.streaming_content)).decode("utf-8-sig")
    return list(csv.reader(io.StringIO(content, newline="")))


@pytest.mark.parametrize(
    "evil",
    [
        "=1+1",
        "+1",
        "-1",
        "@SUM(A1)",
        "\t=1",
        "  =1",
        "=cmd|'/C calc'!A0",
        '=HYPERLINK("x")',
        "\uff1d1",
        "\uff0b1",
        "\uff0d1",
        "\uff20A",
    ],
)
def test_no_spreadsheet_calculates_what_is_in_a_key(admin_client: Client, evil: str) -> None:
    event(
        facts.LOST, key=evil, label=evil, reason=evil, host=evil, held=-0.5, metadata={evil: evil}
    )
    header, row = lines(admin_client.get(CSV))
    cells = dict(zip(header, row, strict=True))
    for name in ("key", "label", "reason", "host"):
        assert cells[name] == f"'{evil}"
    assert cells["held"] == "-0.5"
    assert json.loads(cells["metadata"]) == {evil: evil}


def test_a_file_has_what_is_looked_for_and_says_if_there_is_more(
    using: str, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        event(facts.LOST, ago=100 + number, using=using, key=f"order:{number}")
    event(facts.FORCED, using=using, key="a\x1fb", waited=0.5)
    response = admin_client.get(CSV, {"kind": "lost"})
    assert response["Content-Type"] == "text/csv; charset=utf-8"
    assert 'filename="lock-history-' in response["Content-Disposition"]
    assert [row[2] for row in lines(response)[1:]] == [f"order:{number}" for number in range(5)]

    def saved(**asked: str) -> Any:
        response: Any = admin_client.get(JSON, asked)
        return json.loads(b"".join(response.streaming_content))

    (forced,) = saved(kind="forced")["events"]
    assert (forced["key"], forced["waited"], forced["backend"]) == (["a", "b"], 0.5, "default")
    assert saved(kind="lost")["complete"]
    assert saved(kind="error") == {
        **{"events": [], "complete": True, "older_than": None, "errors": []},
    }
    monkeypatch.setattr(history, "LIMIT", 3)
    assert not saved(kind="lost")["complete"]
    assert len(saved(kind="lost")["events"]) == 3
    table = lines(admin_client.get(CSV, {"kind": "lost"}))
    assert len(table) == 5
    assert table[-1][0].startswith("There are older ones: export again, until 20")
    # That can be done, and what happened in the same microsecond as the last is not lost.
    older = lines(admin_client.get(CSV, {"kind": "lost", "until": table[-1][0].split()[-1][:-1]}))
    assert [row[2] for row in older[1:]] == ["order:2", "order:3", "order:4"]


def test_a_file_is_read_page_by_page(admin_client: Client) -> None:
    LockEvent.objects.bulk_create(
        LockEvent(
            at=datetime.now(UTC) - timedelta(seconds=number),
            kind="lost",
            backend="default",
            key="a",
        )
        for number in range(2500)
    )
    with CaptureQueriesContext(connections["default"]) as captured:
        response = cast(Any, admin_client.get(CSV))
        before = len(captured)
        content = iter(response.streaming_content)
        next(content)
        assert sum("SELECT" in one["sql"] for one in list(captured)[before:]) == 1
        rest = b"".join(content)
    assert rest.count(b"lost") == 1500
    assert sum("distlocks_lockevent" in one["sql"] for one in captured) == 3


def test_a_file_says_that_it_is_incomplete(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    event(facts.LOST)

    def down(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("the server has gone away")

    with kept_in("default", "postgres"):
        monkeypatch.setattr(connections["postgres"], "cursor", down)
        *_, last = lines(admin_client.get(CSV))
        assert last == [
            "Incomplete: the database postgres could not be read. the server has gone away"
        ]
        response = cast(Any, admin_client.get(JSON))
        saved = json.loads(b"".join(response.streaming_content))
        assert keys(admin_client.get(PAGE)) == ["order:42"]
    assert not saved["complete"]
    assert len(saved["events"]) == 1
    assert "gone away" in saved["errors"][0]


async def test_under_asgi_it_is_sent_page_by_page_too(async_client: AsyncClient) -> None:

    pages = iter([export.Page(events=[], older=None, newer=None, troubles=[])])
    sent = export._sent_by_loop(export.json_lines(pages))
    assert json.loads("".join([part async for part in sent]))["complete"]
    assert (await async_client.get(JSON)).status_code == 302


# What to do when there is nothing, or nothing can be read


def test_with_nothing_in_it_it_says_where_to_look(admin_client: Client) -> None:
    page = text(admin_client.get(PAGE))
    assert "Nothing out of the ordinary has happened" in page
    assert "Look further back" in page
    assert "No event of this time matches" in text(admin_client.get(PAGE, {"kind": "lost"}))


def test_without_history_it_says_how_to_keep_one(admin_client: Client) -> None:
    with override_settings(DISTLOCKS={"default": {"BACKEND": MEMORY, "HISTORY_DAYS": 0}}):
        assert "HISTORY_DAYS is 0 for every backend" in text(admin_client.get(PAGE))


def test_a_missing_table_is_told_with_the_command(
    using: str, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LockEvent._meta, "db_table", "distlocks_missing")
    response: HttpResponse = admin_client.get(PAGE)
    assert f"manage.py migrate distlocks --database {using}" in text(response)
    assert admin_client.get(CSV).status_code == 200


@pytest.mark.parametrize("key", ["order:42", "a\x1fb", "../x?y=1&z#é 🔒"])
def test_a_key_leads_to_its_lock_for_who_may_see_it(key: str) -> None:
    event(facts.LOST, key=key, ago=60, backend="default")
    event(facts.LOST, key=key, ago=30, backend="gone")
    gone, there = staff("view_lockevent", "view_lock").get(PAGE).context["rows"]
    assert gone["lock"] == ""
    assert there["lock"] == reverse("admin:distlocks_lock_one", args=["default", key])
    User.objects.all().delete()
    assert {row["lock"] for row in staff("view_lockevent").get(PAGE).context["rows"]} == {""}
