"""The admin's page of one lock: holders, queue, predictions, history, circles."""

import html
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.http import HttpResponse
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from distlocks import db_lock
from distlocks.models import Lock, LockEvent, LockRollup, LockWaiter
from tests.browser.scene import DOWN, shared, waits_for
from tests.factories import SECOND, LockFactory, now_us

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def stores() -> Iterator[None]:
    aliases = {
        "default": settings.DISTLOCKS["default"],
        "memory": settings.DISTLOCKS["memory"],
        "down": DOWN,
    }
    with override_settings(DISTLOCKS=aliases):
        Lock.objects.all().delete()
        yield


def text(response: HttpResponse) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", response.content.decode())))


def one(client: Client, key: str, alias: str = "default", **query: str) -> Any:
    return client.get(reverse("admin:distlocks_lock_one", args=[alias, key]), query)


def test_the_holder_with_all_that_is_known(admin_client: Client) -> None:
    metadata = {"user": "olga", "items": 3, "nested": {"a": [1]}}
    lock = LockFactory(key="order:42", label="nightly", metadata=metadata)
    page = text(one(admin_client, "order:42"))
    for shown in ("olga", "items 3", "{'a': [1]}", lock.owner_id, str(lock.fencing_token)):
        assert shown in page
    assert "An efficiency lock" in page


@override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo")
def test_moments_are_local_without_time_zones_too(admin_client: Client) -> None:
    lock = LockFactory(key="order:42")
    since = datetime.fromtimestamp(lock.acquired_at / SECOND, ZoneInfo("Asia/Tokyo"))
    page = text(one(admin_client, "order:42"))
    assert f"Since {since:%Y-%m-%d %H:%M:%S}," in page
    force = reverse("admin:distlocks_lock_force_release")
    page = text(admin_client.post(force, {"lock": "default/order:42"}))
    assert f"since {since:%Y-%m-%d %H:%M:%S}," in page


@override_settings(USE_THOUSAND_SEPARATOR=True)
def test_numbers_that_count_nothing_have_no_separators(admin_client: Client) -> None:
    lock = LockFactory(key="order:42", pid=4711, metadata={"run": 7654321})
    page = text(one(admin_client, "order:42"))
    for number in ("pid 4711", "run 7654321", str(lock.fencing_token)):
        assert number in page


@pytest.mark.parametrize("alias", ["default", "memory"])
def test_a_key_that_several_have(admin_client: Client, alias: str) -> None:
    leases = [
        db_lock("report", shared=True, backend=alias, label=f"reader {n}").acquire()
        for n in range(4)
    ]
    page = text(one(admin_client, "report", alias))
    for number in range(4):
        assert f"reader {number}" in page
    for lease in leases:
        lease.release()
    assert "Nobody has this lock now." in text(one(admin_client, "report", alias))


def test_of_very_many_some_are_shown(admin_client: Client) -> None:
    shared("report", "shared", 150)
    assert "More have it: these are the first 100." in text(one(admin_client, "report"))


def test_a_key_cooling_down(admin_client: Client) -> None:
    LockFactory(key="a", cooling=True)
    page = text(one(admin_client, "a"))
    assert "cooling down" in page
    assert "until the minimum hold has passed" in page


@pytest.mark.parametrize("alias", ["default", "memory"])
def test_keys_above_and_below_lead_to_each_other(admin_client: Client, alias: str) -> None:
    with db_lock(("a", "b", "c"), backend=alias):
        page = one(admin_client, "a", alias).content.decode()
        assert f'href="/admin/distlocks/lock/of/{alias}/a/b/c/"' in page
        page = one(admin_client, "a\x1fb\x1fc", alias).content.decode()
        assert f'href="/admin/distlocks/lock/of/{alias}/a/b/"' in page


def test_a_neighbour_is_not_the_key(admin_client: Client) -> None:
    LockFactory(key="order:42x")
    LockFactory(key="order:4")
    assert "Nobody has this lock now." in text(one(admin_client, "order:42"))


@pytest.mark.parametrize("key", ["x" * 201, "a\x00b", "a\x1f\x1fb"])
def test_what_is_no_key_is_told(admin_client: Client, key: str) -> None:
    response = admin_client.get("/admin/distlocks/lock/of/default/" + key.replace("\x1f", "/"))
    response = one(admin_client, key)
    assert response.status_code == 404
    assert "lock key" in text(response)


def test_an_unknown_backend_leads_to_those_there_are(admin_client: Client) -> None:
    response = one(admin_client, "a/b", "no/where")
    assert response.status_code == 404
    assert 'href="/admin/distlocks/lock/of/memory/a_2Fb/"' in response.content.decode()


def test_a_backend_that_is_down(admin_client: Client) -> None:
    page = text(one(admin_client, "a", "down"))
    assert "The backend down does not answer" in page
    assert "Nothing out of the ordinary" in page


# Who waits


def held_for(column: str, count: int, pattern: str = "order:*") -> None:
    LockRollup.objects.create(
        backend="default",
        began=now_us() // SECOND // 3600 * 3600,
        span=3600,
        pattern=pattern,
        **{column: count},
    )


def turns(response: Any) -> list[float | None]:
    return [place.turn for place in response.context["queue"]]


def test_turns_are_predicted_from_typical_holds(admin_client: Client) -> None:
    # Between 10 and 30 seconds, so 20 is typical.
    held_for("hold_13", 100)
    LockFactory(key="order:42", age=0)
    for number in range(3):
        waits_for("order:42", f"{number}")
    assert turns(one(admin_client, "order:42")) == pytest.approx([20, 40, 60], abs=3)
    # Held for 20 seconds, half of those that got so far take 25.
    Lock.objects.update(acquired_at=now_us() - 20 * SECOND)
    assert turns(one(admin_client, "order:42")) == pytest.approx([5, 25, 45], abs=3)
    page = text(one(admin_client, "order:42"))
    assert "in about 2" in page
    assert "(gives up before)" in page


@pytest.mark.parametrize("case", ["no holds", "longer than any", "shared", "waits shared"])
def test_what_cannot_be_predicted_is_unknown(admin_client: Client, case: str) -> None:
    if case != "no holds":
        held_for("hold_13", 100)
    if case == "shared":
        shared("order:42", "shared", 2)
    else:
        LockFactory(key="order:42", age=40 if case == "longer than any" else 5)
    waits_for("order:42", "a", mode="shared" if case == "waits shared" else "exclusive")
    response = one(admin_client, "order:42")
    assert turns(response) == [None]
    assert "unknown" in text(response)


def test_of_too_many_patterns_the_others_are_asked(admin_client: Client) -> None:
    held_for("hold_13", 100, pattern="(others)")
    LockFactory(key="order:42", age=0)
    waits_for("order:42", "a")
    assert turns(one(admin_client, "order:42")) == pytest.approx([20], abs=3)


def test_holds_of_long_ago_do_not_count(admin_client: Client) -> None:
    held_for("hold_13", 100)
    LockRollup.objects.update(began=now_us() // SECOND - 2 * 86400)
    LockFactory(key="order:42", age=0)
    waits_for("order:42", "a")
    assert turns(one(admin_client, "order:42")) == [None]


def test_who_is_not_heard_of_any_more_is_gone(admin_client: Client) -> None:
    waits_for("order:42", "a", valid_until=now_us() - 1)
    waits_for("order:42", "b", backend="memory")
    waits_for("order:43", "c")
    assert turns(one(admin_client, "order:42")) == []


# What happened


def event(**fields: Any) -> LockEvent:
    values: dict[str, Any] = {
        "at": timezone.now(),
        "kind": "timed_out",
        "backend": "default",
        "key": "order:42",
    }
    return LockEvent.objects.create(**(values | fields))


def test_the_last_week_is_told(admin_client: Client) -> None:
    event(reason="this week", at=timezone.now() - timedelta(days=6))
    event(reason="long ago", at=timezone.now() - timedelta(days=8))
    event(reason="other key", key="order:43")
    event(reason="other backend", backend="memory")
    page = text(one(admin_client, "order:42"))
    assert "this week" in page
    for other in ("long ago", "other key", "other backend"):
        assert other not in page
    for _ in range(60):
        event()
    assert len(one(admin_client, "order:42").context["past"].events) == 50


@pytest.mark.parametrize("key", ["old", "a → b", "job*"])
def test_all_of_its_history_is_a_click_away(admin_client: Client, key: str) -> None:
    for name in (key, f"{key}:2", f"job{key}", "a\x1fb"):
        at = timezone.now() - timedelta(days=3)
        LockEvent.objects.create(at=at, kind="lost", backend="default", key=name, pattern=name)
    page = html.unescape(one(admin_client, key).content.decode())
    (link,) = re.findall(r'href="([^"]*)">All of its history', page)
    rows = admin_client.get(link).context["rows"]
    assert [row["event"].key for row in rows] == [key]
    # From there, to its events again, and to those of its owner.
    assert [
        row["event"].key
        for row in admin_client.get(
            reverse("admin:distlocks_lockevent_changelist") + rows[0]["same_key"]
        ).context["rows"]
    ] == [key]


def test_events_are_shown_to_who_may_see_the_history(client: Client) -> None:
    event = {"kind": "lost", "backend": "default", "key": "a", "pattern": "a"}
    LockEvent.objects.create(at=timezone.now(), reason="because", **event)
    user = User.objects.create_user("somebody", is_staff=True)
    for permissions, expected in ((["view_lock"], False), (["view_lock", "view_lockevent"], True)):
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client.force_login(user)
        page = text(one(client, "a"))
        assert ("because" in page) == ("The last week" in page) == expected
        assert ("All of its history" in page) == expected


def test_without_a_history(admin_client: Client) -> None:
    entry = settings.DISTLOCKS["default"] | {"HISTORY_DAYS": 0}
    with override_settings(DISTLOCKS={"default": entry}):
        page = text(one(admin_client, "order:42"))
    assert "Not kept: HISTORY_DAYS of this backend is 0." in page
    assert "this backend has no queue" in page


def in_circle(count: int) -> None:
    for number in range(count):
        following = (number + 1) % count
        held = {"owner_id": f"holds-{number}", "backend": "default", "keys": [f"k{number}"]}
        waits_for(
            f"k{following}",
            f"waits-{number}",
            holds=[held],
            holding=1,
            blockers=[f"holds-{following}"],
        )


@pytest.mark.parametrize("count", [2, 3, 7])
def test_circles_are_drawn_for_their_members(admin_client: Client, count: int) -> None:
    in_circle(count)
    for number in range(count):
        response = one(admin_client, f"k{number}")
        (circle,) = response.context["circles"]
        assert len(circle) == count
        assert response.content.decode().count('class="dl-node"') == count
    assert one(admin_client, "elsewhere").context["circles"] == []


def test_numbers_are_not_written_as_a_language_has_them(admin_client: Client) -> None:
    in_circle(3)
    lock = LockFactory(key="k1")
    with override_settings(LANGUAGE_CODE="de", USE_THOUSAND_SEPARATOR=True):
        page = one(admin_client, "k1").content.decode()
    assert re.search(r'cx="160\.6" cy="135\.0"', page)
    assert f"<code>{lock.fencing_token}</code>" in page
    assert re.search(r'data-left="\d+\.\d"', page)


# What it costs


def test_the_number_of_queries_does_not_grow(admin_client: Client) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert one(admin_client, "order:42").status_code == 200
        return len(captured)

    LockFactory(key="order:42")
    waits_for("order:42", "a")
    event()
    queries()
    few = queries()
    Lock.objects.bulk_create(LockFactory.build(key=f"order:{n}") for n in range(1000, 2000))
    LockWaiter.objects.bulk_create(
        LockWaiter(
            owner_id=f"w{n}",
            backend="default",
            key="order:42",
            since=now_us(),
            valid_until=now_us() + 60 * SECOND,
        )
        for n in range(200)
    )
    for _ in range(30):
        event()
    assert queries() == few
    assert few <= 12


def test_a_part_of_the_page_is_had_for_updates(admin_client: Client) -> None:
    LockFactory(key="order:42")
    page = one(admin_client, "order:42", _results="1").content.decode()
    assert "web-1" in page
    assert "<html" not in page
