"""What a client is told when a lock cannot be had, and what it is not."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpRequest
from django.test import AsyncClient, Client, RequestFactory, override_settings

from distlocks import BackendUnavailable, Holder, Lease, LockTimeout, db_lock, locks
from distlocks.claims import EPOCH, PERMIT, SHARED
from distlocks.history.holds import MAX_PATTERNS, REMEMBERED, holds
from distlocks.history.journal import journal
from distlocks.http import answer
from distlocks.identity import host, pid
from distlocks.testing import FakeClock
from tests.integration.http import site

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
# What is nobody's business.
INTERNAL = ("customer", "Bond", "nightly", host(), str(pid()), "internal", "MainThread")


def silent(body: bytes) -> bool:
    return not [word for word in INTERNAL if word in body.decode()]


def test_a_program_gets_json(client: Client, rival: Lease) -> None:
    response = client.get("/held")
    assert response.status_code == 409
    assert response.json() == {
        "error": "locked",
        "detail": "What this needs is being worked on elsewhere. Please try again in 20 seconds.",
        "retry_after": 20,
    }
    assert response.headers["Retry-After"] == "20"
    assert response.headers["Cache-Control"] == "no-store"
    assert "Accept" in response.headers["Vary"]
    rival.release()
    assert client.get("/held").content == b"had"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (BROWSER, "text/html"),
        ("*/*", "application/json"),
        ("application/json, text/plain, */*", "application/json"),
        ("application/json;q=0.5, text/html", "text/html"),
        ("image/png", "application/json"),
        ("", "application/json"),
        ("nonsense", "application/json"),
    ],
)
def test_what_a_client_likes_better_is_what_it_gets(
    client: Client, rival: Lease, accept: str, kind: str
) -> None:
    response = client.get("/held", headers={"accept": accept})
    assert response.headers["Content-Type"].split(";")[0] == kind
    assert silent(response.content)


def test_a_browser_gets_a_page_that_any_policy_lets_through(client: Client, rival: Lease) -> None:
    page = client.get("/held", headers={"accept": BROWSER}).content.decode()
    assert page.startswith("<!doctype html>")
    assert '<html lang="en-us" dir="ltr">' in page
    assert '<meta name="color-scheme" content="light dark">' in page
    assert page.count("<h1>") == page.count("<main>") == page.count("<title>") == 1
    assert "Please try again in 20 seconds." in page
    assert not re.search(r"<(script|style|link|img|iframe)|style=|\son\w+=|https?:", page)


async def test_asynchronous_views_are_answered_for_too(
    async_client: AsyncClient, rival: Lease
) -> None:
    response = await async_client.get("/aheld")
    assert (response.status_code, response.headers["Retry-After"]) == (409, "20")
    page = await async_client.get("/aheld", headers={"accept": BROWSER})
    assert b"<h1>In use at the moment</h1>" in page.content


def test_a_store_that_does_not_answer(client: Client) -> None:
    response = client.get("/down")
    assert response.status_code == 503
    assert response.json()["error"] == "locks_unavailable"
    assert response.headers["Retry-After"] == "5"
    assert silent(response.content)
    page = client.get("/down", headers={"accept": BROWSER})
    assert b"<h1>Temporarily unavailable</h1>" in page.content


def test_why_it_does_not_is_in_the_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    client.get("/down")
    (record,) = [one for one in caplog.records if one.name == "distlocks"]
    told = {name: value for name, value in vars(record).items() if name.startswith("distlocks_")}
    assert told == {
        "distlocks_event": "unavailable",
        "distlocks_backend": "",
        "distlocks_keys": [site.KEY],
        "distlocks_path": "/down",
        "distlocks_error": "db7.internal:5432 refuses connections",
    }


def test_it_is_left_to_others_if_so_wished(client: Client) -> None:
    setting = override_settings(DISTLOCKS_HTTP={"UNAVAILABLE": False})
    with setting, pytest.raises(BackendUnavailable):
        client.get("/down")


def test_other_errors_are_left_to_others(client: Client) -> None:
    client.raise_request_exception = False
    assert client.get("/lost").status_code == 500


def test_who_is_cooling_down_is_told_so(client: Client, lock_clock: FakeClock) -> None:
    db_lock(site.KEY, min_hold=12).acquire().release()
    lock_clock.advance(2.5)
    body = client.get("/held").json()
    assert (body["error"], body["retry_after"]) == ("cooling_down", 10)


def holder(remaining: float, mode: str = "exclusive", owner_id: str = "x") -> Holder:
    return Holder(
        key=site.KEY,
        owner_id=owner_id,
        fencing_token=1,
        since=EPOCH,
        remaining=remaining,
        mode=mode,
    )


@pytest.mark.parametrize(
    ("holders", "seconds"),
    [
        ((), 1),
        ((holder(0.2),), 1),
        ((holder(-3),), 1),
        ((holder(2.01),), 3),
        ((holder(3), holder(9)), 9),
        ((holder(3, SHARED), holder(9, SHARED)), 9),
        # One of them is enough.
        ((holder(3, PERMIT), holder(9, PERMIT)), 3),
        ((holder(1e9),), 60),
        ((holder(float("inf")),), 60),
    ],
)
def test_when_to_try_again(rf: RequestFactory, holders: tuple[Holder, ...], seconds: int) -> None:
    response = answer(rf.get("/"), LockTimeout("held", holders=holders))
    assert response is not None
    assert response.headers["Retry-After"] == str(seconds)


def held_for(seconds: float, key: str = "customer:8", times: int = 1) -> None:
    for _ in range(times):
        journal.put((locks["default"], (key,), None, seconds, True))
    journal.look()


def answered(rf: RequestFactory, held: float, **more: Any) -> int:
    """Retry-After beside somebody who has had the key for so long, and has it for another 20 s."""
    since = datetime.now(UTC) - timedelta(seconds=held)
    one = replace(holder(20), since=since, **more)
    response = answer(rf.get("/"), LockTimeout("held", holders=(one,)))
    assert response is not None
    return int(response.headers["Retry-After"])


def test_others_of_its_kind_tell_when_it_will_be_free(rf: RequestFactory) -> None:
    # From the first answer on it is looked at how long keys are held.
    held_for(3, times=9)
    assert answered(rf, held=0) == 20
    held_for(3, times=4)
    assert answered(rf, held=0) == 20
    held_for(3)
    assert answered(rf, held=0.5) == 3
    assert answered(rf, held=2.8) == 1
    # None has taken so long.
    assert answered(rf, held=10) == 20
    assert answered(rf, held=0.5, key="other:7") == 20
    assert answered(rf, held=0.5, owner_id="") == 20
    # What is forgotten, because the latest count.
    held_for(15, times=REMEMBERED)
    assert answered(rf, held=0.5) == 15
    held_for(300, times=REMEMBERED)
    assert answered(rf, held=0.5) == 20


def test_kinds_that_are_remembered_are_bounded() -> None:
    holds.start()
    for number in range(MAX_PATTERNS + 20):
        held_for(3, key="x" * number + "y", times=5 if number < 200 else 1)
    assert len(holds._seen) == MAX_PATTERNS
    assert holds.rest("y", 0) is None


def test_one_second_is_one_second(rf: RequestFactory) -> None:
    response = answer(rf.get("/"), LockTimeout("held"))
    assert response is not None
    assert b"Please try again in 1 second." in response.content


@pytest.mark.parametrize(
    ("setting", "status", "seconds"),
    [
        ({"STATUS": 423}, 423, 20),
        ({"RETRY_AFTER": 2}, 409, 2),
        ({"MAX_RETRY_AFTER": 15}, 409, 15),
        ({}, 409, 20),
    ],
)
def test_the_setting(
    client: Client, rival: Lease, setting: dict[str, Any], status: int, seconds: int
) -> None:
    with override_settings(DISTLOCKS_HTTP=setting):
        response = client.get("/held")
    assert (response.status_code, response.json()["retry_after"]) == (status, seconds)


def asked(rf: RequestFactory, user: Any, accept: str = "*/*") -> HttpRequest:
    request = rf.get("/", headers={"accept": accept})
    request.user = user
    return request


@pytest.mark.parametrize("accept", ["*/*", BROWSER])
def test_staff_is_told_who_has_the_key(rf: RequestFactory, rival: Lease, accept: str) -> None:
    with pytest.raises(LockTimeout) as caught:
        db_lock(site.KEY, timeout=0).acquire()
    for user in (
        User(is_staff=True),
        User(is_superuser=True),
        User(is_staff=True, is_active=False),
    ):
        response = answer(asked(rf, user, accept), caught.value)
        assert response is not None
        assert silent(response.content) is not (user.is_staff and user.is_active)


def test_what_staff_is_told(rf: RequestFactory, rival: Lease) -> None:
    import json

    with pytest.raises(LockTimeout) as caught:
        db_lock(site.KEY, timeout=0).acquire()
    response = answer(asked(rf, User(is_staff=True)), caught.value)
    assert response is not None
    body = json.loads(response.content)
    assert body["keys"] == [site.KEY]
    assert body["reason"] == str(caught.value)
    (shown,) = body["holders"]
    assert shown.pop("since")
    assert shown == {
        "key": site.KEY,
        "mode": "exclusive",
        "cooling_down": False,
        "label": "nightly import",
        "host": host(),
        "pid": pid(),
        "thread": "MainThread",
        "remaining": 20.0,
        "metadata": {"customer": "Bond"},
    }
    endless = answer(
        asked(rf, User(is_staff=True)), LockTimeout(keys=("a",), holders=(holder(float("inf")),))
    )
    assert endless is not None
    assert json.loads(endless.content)["holders"][0]["remaining"] is None


@pytest.mark.django_db
def test_the_user_counts_once_somebody_has_asked_for_it(client: Client, rival: Lease) -> None:
    client.force_login(User.objects.create_user("boss", is_staff=True))
    assert "holders" not in client.get("/held").json()
    assert "holders" in client.get("/staff").json()


@pytest.mark.django_db(transaction=True)
async def test_so_it_does_on_an_event_loop(async_client: AsyncClient, rival: Lease) -> None:
    await async_client.aforce_login(await User.objects.acreate_user("boss", is_staff=True))
    assert "holders" not in (await async_client.get("/aheld")).json()
    assert "holders" in (await async_client.get("/astaff")).json()


def test_with_debug_everybody_is_told(client: Client, rival: Lease) -> None:
    with override_settings(DEBUG=True):
        assert client.get("/held").json()["keys"] == [site.KEY]


def _templates(**found: str) -> list[dict[str, Any]]:
    return [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "OPTIONS": {"loaders": [("django.template.loaders.locmem.Loader", found)]},
        }
    ]


def test_a_project_has_a_page_of_its_own(client: Client, rival: Lease) -> None:
    own = {"distlocks/409.html": "{{ refusal.status }} {{ refusal.error }} {{ request.path }}"}
    with override_settings(TEMPLATES=_templates(**own)):
        page = client.get("/held", headers={"accept": BROWSER})
        assert page.content == b"409 locked "
        # What has no page of its own has that one.
        assert client.get("/down", headers={"accept": BROWSER}).content.startswith(b"503 ")
    own["distlocks/503.html"] = "down"
    with override_settings(TEMPLATES=_templates(**own)):
        assert client.get("/down", headers={"accept": BROWSER}).content == b"down"


def test_without_a_template_there_is_still_an_answer(client: Client, rival: Lease) -> None:
    with override_settings(TEMPLATES=_templates()):
        response = client.get("/held", headers={"accept": BROWSER})
    assert (response.status_code, response.json()["error"]) == (409, "locked")


def test_what_is_shown_is_escaped(rf: RequestFactory) -> None:
    error = LockTimeout(keys=("<script>alert(1)</script>",), holders=(holder(3),))
    response = answer(asked(rf, User(is_staff=True), BROWSER), error)
    assert response is not None
    assert b"<script" not in response.content
    assert b"&lt;script" in response.content
