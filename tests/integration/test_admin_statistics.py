"""The dashboard: what it shows, to whom, and what it does when something is down."""

import html
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.checks import CheckMessage, Error, Warning
from django.db import OperationalError, connections
from django.http import HttpResponse
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import translation

from distlocks.admin import health, wording
from distlocks.backends.fastpath.row import Row
from distlocks.backends.memory import MemoryBackend
from distlocks.claims import from_us, to_us
from distlocks.history.figures import RANGES
from distlocks.models import PHASES, LockRollup
from distlocks.patterns import OTHERS
from tests.happenings import counted, counted_in_both

pytestmark = pytest.mark.django_db(databases=["default", "postgres", "mariadb"])

PAGE = "/admin/distlocks/lockrollup/"
DATABASES = ["default", "postgres", "mariadb"]
MEMORY = "distlocks.backends.memory.MemoryBackend"


def kept_in(*databases: str, **more: Any) -> Any:
    """Backends by the name of the database that has their history; and others."""
    entries = {name: {"BACKEND": MEMORY, "HISTORY_DATABASE": name} for name in databases}
    return override_settings(DISTLOCKS={**entries, **more})


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    with kept_in("default"):
        yield


@pytest.fixture(params=DATABASES)
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    with kept_in(request.param):
        yield request.param


def text(response: HttpResponse) -> str:
    """What a reader of the page reads."""
    return html.unescape(re.sub(r"<[^>]*>", " ", response.content.decode()))


def numbers(response: Any) -> dict[str, str]:
    assert response.status_code == 200
    return {one.name: one.value for one in response.context["numbers"]}


def staff(*permissions: str) -> Client:
    user = User.objects.create_user("somebody", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


# What it shows


def test_every_range_is_a_page(using: str, admin_client: Client) -> None:
    counted_in_both(ago=20, using=using, acquired=1200, contended=4, errors=1)
    for name in (*RANGES, "", "nonsense"):
        response = admin_client.get(PAGE, {"range": name})
        assert numbers(response) == {
            **{"acquired": "1,200", "contended": "4", "timed_out": "0", "lost": "0"},
            **{"expired": "0", "errors": "1", "forced": "0"},
        }
        assert response.context["range"] == (name if name in RANGES else "1h")


def test_numbers_lead_to_their_rows_and_links_keep_the_state(admin_client: Client) -> None:
    counted(at=time.time() - 60, pattern="stock:*", expired=3, backend="redis")
    asked = {"range": "6h", "backend": "redis", "pattern": "stock:*"}
    response = admin_client.get(PAGE, asked)
    expired = next(one for one in response.context["numbers"] if one.name == "expired")
    window = response.context["found"].window
    since = from_us(window.since * 1_000_000).strftime("%Y-%m-%dT%H%%3A%M%%3A%SZ")
    assert expired.link.startswith("/admin/distlocks/lockevent/?kind=expired&kind=taken_over&")
    assert f"backend=redis&pattern=stock%3A%2A&since={since}&until=" in expired.link
    assert admin_client.get(expired.link).status_code == 200
    links = {key: link for key, _, link in response.context["ranges"]}
    assert links["24h"] == "?range=24h&backend=redis&pattern=stock%3A%2A"
    # There are no rows of nothing.
    assert all(not one.link for one in response.context["numbers"] if one.value == "0")


def test_what_is_counted_as_others_is_no_link(admin_client: Client) -> None:
    counted(at=time.time() - 120, pattern=OTHERS, contended=2)
    counted(at=time.time() - 120, pattern="order:*", contended=2)
    found = admin_client.get(PAGE).context["patterns"]
    links = {one["name"]: any(number.link for number in one["numbers"]) for one in found}
    assert links == {OTHERS: False, "order:*": True}


def test_dropped_events_are_told_only_if_there_are_any(admin_client: Client) -> None:
    counted(at=time.time() - 60, acquired=1)
    assert "missing from the history" not in text(admin_client.get(PAGE))
    counted(at=time.time() - 60, dropped=1500)
    assert "1,500 events are missing from the history." in text(admin_client.get(PAGE))


def test_several_databases_are_one_page(admin_client: Client) -> None:
    with kept_in("default", "postgres"):
        for using in ("default", "postgres"):
            counted(at=time.time() - 60, using=using, backend=using, acquired=2)
        assert numbers(admin_client.get(PAGE))["acquired"] == "4"
        assert numbers(admin_client.get(PAGE, {"backend": "postgres"}))["acquired"] == "2"


WEIRD = [
    *("<script>alert(1)</script>", "\0", "'\"--", "%00", "{{ a }}", "x" * 1000),
    *("🔒", "a\x1fb", "_"),
]


def test_weird_questions_have_an_answer(using: str, admin_client: Client) -> None:
    for value in WEIRD:
        pattern = value[:200].replace("\0", "0")
        counted(at=time.time() - 60, using=using, pattern=pattern, acquired=1)
    for value in WEIRD:
        asked = {"range": value, "backend": value, "pattern": value}
        response = admin_client.get(PAGE, asked)
        assert response.status_code == 200
        assert "<script>alert(1)" not in response.content.decode()


def test_the_number_of_queries_is_the_same_with_many_rows(using: str, admin_client: Client) -> None:
    def queries(name: str) -> int:
        with (
            CaptureQueriesContext(connections["default"]) as users,
            CaptureQueriesContext(connections[using]) as captured,
        ):
            assert admin_client.get(PAGE, {"range": name}).status_code == 200
        return len(captured) + (len(users) if using != "default" else 0)

    counted_in_both(ago=20, using=using, acquired=1)
    few = {name: queries(name) for name in ("1h", "30d")}
    for number in range(30):
        counted_in_both(ago=60 * number, using=using, pattern=f"p{number}", acquired=1, errors=1)
    assert {name: queries(name) for name in few} == few
    assert max(few.values()) <= 12


# Who may


def test_who_may_see_it(client: Client) -> None:
    assert client.get(PAGE)["Location"].startswith("/admin/login/")
    assert staff("view_lock", "view_lockevent").get(PAGE).status_code == 403


def test_numbers_are_no_links_for_who_may_not_follow_them() -> None:
    counted(at=time.time() - 60, lost=1)
    page = staff("view_lockrollup").get(PAGE)
    assert numbers(page)["lost"] == "1"
    assert "/admin/distlocks/lockevent/" not in page.content.decode()


def test_there_is_nothing_to_change() -> None:
    counted(at=time.time() - 60, lost=1)
    row = LockRollup.objects.first()
    client = staff("view_lockrollup", "change_lockrollup", "delete_lockrollup", "add_lockrollup")
    assert row is not None
    for path in ("add/", f"{row.pk}/change/", f"{row.pk}/delete/"):
        assert client.get(PAGE + path).status_code == 404
    assert client.post(PAGE).status_code == 405


# What to do when there is nothing, or nothing can be read


def test_without_history_it_says_how_to_keep_one(admin_client: Client) -> None:
    with kept_in(one={"BACKEND": MEMORY, "HISTORY_DAYS": 0}):
        page = text(admin_client.get(PAGE))
    assert "HISTORY_DAYS is 0 for every backend" in page
    assert '"HISTORY_DAYS": 30' in page


def test_a_missing_table_is_told_with_the_command(
    using: str, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LockRollup._meta, "db_table", "distlocks_missing")
    page = text(admin_client.get(PAGE))
    assert f"The database “{using}” lacks the tables" in page
    assert f"manage.py migrate distlocks --database {using}" in page


def test_a_database_that_is_down_hides_only_what_is_in_it(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(at=time.time() - 60, acquired=5)

    def down(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("the server has gone away")

    with kept_in("default", "postgres"):
        monkeypatch.setattr(connections["postgres"], "cursor", down)
        response = admin_client.get(PAGE)
    assert numbers(response)["acquired"] == "5"
    assert "cannot be read from the database “postgres”: the server has gone away" in text(response)


# Backends


class Backend(MemoryBackend):
    """Says what a test wants it to say."""

    supports_quarantine = True
    messages: list[CheckMessage] = []
    answers = threading.Event()
    asked = 0

    def check_store(self) -> list[CheckMessage]:
        type(self).asked += 1
        assert self.answers.wait(20)
        return self.messages

    def quarantine(self, *, end: bool = False) -> float:
        return 12.0


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Backend]]:
    """One that answers at once, that there is nothing wrong."""
    monkeypatch.setattr(Backend, "messages", [])
    monkeypatch.setattr(Backend, "answers", threading.Event())
    monkeypatch.setattr(Backend, "asked", 0)
    Backend.answers.set()
    with kept_in(tested={"BACKEND": f"{__name__}.Backend"}, other={"BACKEND": MEMORY}):
        yield Backend
    Backend.answers.set()


def rows(response: HttpResponse) -> dict[str, health.Health]:
    return {row["health"].alias: row["health"] for row in response.context["backends"]}  # type: ignore[attr-defined]


def test_backends_tell_how_they_are(backend: type[Backend], admin_client: Client) -> None:
    backend.messages = [Warning("Set maxmemory-policy.", id="distlocks.W009")]
    response = admin_client.get(PAGE)
    assert {alias: one.state for alias, one in rows(response).items()} == {
        **{"tested": "up", "other": "up"},
    }
    page = text(response)
    assert "Set maxmemory-policy." in page
    assert "In quarantine: it has lost its memory and grants nothing for 12 s more." in page
    backend.messages = [Error("It does not answer.", id="distlocks.E019")]
    response = admin_client.get(PAGE)
    assert rows(response)["tested"].state == "down"
    assert "It does not answer." in text(response)


def test_one_that_hangs_costs_little_and_is_not_asked_again(
    backend: type[Backend], admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PATIENCE", 0.05)
    backend.answers.clear()
    for _ in range(3):
        response = admin_client.get(PAGE)
        assert {alias: one.state for alias, one in rows(response).items()} == {
            **{"tested": "silent", "other": "up"},
        }
        assert "no answer" in text(response)
    assert backend.asked == 1
    monkeypatch.setattr(health, "PATIENCE", 20.0)
    monkeypatch.setattr(health, "SLOW", 0.0)
    backend.answers.set()
    assert rows(admin_client.get(PAGE))["tested"].state == "slow"


def test_one_that_raises_breaks_nothing(
    backend: type[Backend], admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Backend) -> list[CheckMessage]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(backend, "check_store", broken)
    response = admin_client.get(PAGE)
    assert rows(response)["tested"].state == "down"
    assert "ZeroDivisionError: a bug" in text(response)


def test_one_that_cannot_be_made_is_told(admin_client: Client) -> None:
    with kept_in("default", wrong={"BACKEND": "no.such.Backend"}):
        response = admin_client.get(PAGE)
    assert rows(response)["wrong"].state == "wrong"
    assert "cannot be imported" in text(response)
    with kept_in("default", wrong={"BACKEND": MEMORY, "HISTORY_DAYS": "many"}):
        response = admin_client.get(PAGE)
    assert rows(response)["wrong"].state == "wrong"
    assert "must be a number of days" in text(response)


class FastPath(Backend):
    """Another store may grant."""

    supports_quarantine = False
    supports_authority = True
    row: Row

    @property
    def authority(self) -> "FastPath":
        return self

    def peek(self) -> Row:
        return self.row


@pytest.mark.parametrize(
    ("phase", "redis_is_down", "state"),
    [
        ("redis", False, "up"),
        ("redis", True, "down"),
        ("drain", True, "down"),
        ("db", True, "up"),
        ("closing", False, "down"),
    ],
)
def test_a_fast_path_tells_who_grants(
    backend: type[Backend],
    admin_client: Client,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    redis_is_down: bool,
    state: str,
) -> None:
    if redis_is_down:
        monkeypatch.setattr(Backend, "messages", [Error("No Redis.", id="distlocks.E019")])
    row = Row(7, phase, "Redis has failed twice.", 5, 30, 30, to_us(1_790_000_000), pinned=True)
    monkeypatch.setattr(FastPath, "row", row, raising=False)
    with kept_in("default", fast={"BACKEND": f"{__name__}.FastPath"}):
        response = admin_client.get(PAGE)
    assert rows(response)["fast"].state == state
    page = text(response)
    assert str(PHASES[phase]) in page.lower().replace("redis", "Redis")
    assert "pinned by an operator" in page
    assert "since 2026-09-21 09:13:20. Redis has failed twice." in page


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "\u2013"),
        (0.0, "0 ms"),
        (0.00123, "1.23 ms"),
        (0.25, "250 ms"),
        (0.9999, "1 s"),
        (12.34, "12.3 s"),
        (61, "1 min 1 s"),
        (7260, "2 h 1 min"),
        (10 * 86400, "10 days"),
    ],
)
def test_lengths_of_time_are_short(value: float | None, written: str) -> None:
    assert wording.seconds(value) == written


def test_numbers_are_written_as_the_reader_does() -> None:
    assert wording.count(1234567) == "1,234,567"
    with translation.override("de"):
        assert wording.count(1234567) == "1.234.567"
        assert wording.seconds(1.25) == "1,25 s"
