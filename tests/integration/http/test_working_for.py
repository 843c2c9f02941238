"""What a lock tells of the code that asked for it."""

import asyncio
import contextvars
import json
import threading
import timeit
import uuid
from collections.abc import Mapping
from datetime import date
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.utils.functional import SimpleLazyObject

from distlocks import LockTimeout, db_lock
from distlocks.context import asked_by, merged, working_for
from distlocks.middleware import WorkingForMiddleware, request_id_of
from distlocks.options import checked_metadata
from tests.integration.http import site


def told(**options: Any) -> dict[str, Any]:
    with db_lock("told", **options):
        return site.metadata_of("told")


def test_a_lock_tells_what_its_block_works_for() -> None:
    assert told() == {}
    with working_for(task="import", batch=7):
        assert told() == {"task": "import", "batch": 7}
        with working_for(batch=8, rows=[1, 2]):
            assert told() == {"task": "import", "batch": 8, "rows": [1, 2]}
            assert told(metadata={"task": "mine"}) == {"task": "mine", "batch": 8, "rows": [1, 2]}
        assert told() == {"task": "import", "batch": 7}
    assert told() == {}


def test_also_when_the_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), working_for(task="import"):
        _ = 1 / 0
    assert told() == {}


def test_it_is_the_asker_who_tells_not_who_wrote_the_lock_down() -> None:
    lock = db_lock("told")
    with working_for(task="import"):
        lease = lock.acquire()
    assert site.metadata_of("told") == {"task": "import"}
    lease.release()
    lock.acquire()
    assert site.metadata_of("told") == {}


def test_rivals_see_it() -> None:
    with working_for(task="import"), db_lock("told"), pytest.raises(LockTimeout) as caught:
        db_lock("told", timeout=0).acquire()
    assert caught.value.holders[0].metadata == {"task": "import"}


@pytest.mark.parametrize(
    "about", [{"at": date(2026, 1, 1)}, {"of": float("nan")}, {"task": "a\x00b"}, {"a\ud800": 1}]
)
def test_what_no_store_can_keep_is_refused_at_once(about: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="metadata"):
        working_for(**about)


def test_an_object_is_good_for_one_block_at_a_time() -> None:
    work = working_for(task="import")
    with work, pytest.raises(RuntimeError, match="make one for each"):
        work.__enter__()
    assert told() == {}
    with work:
        assert told() == {"task": "import"}


def test_threads() -> None:
    found: list[dict[str, Any]] = []

    def tell() -> None:
        found.append(told())

    with working_for(task="import"):
        context = contextvars.copy_context()
        for run in (
            lambda: found.append(told()),
            lambda: context.run(lambda: found.append(told())),
        ):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    assert found == [{}, {"task": "import"}]


async def test_tasks() -> None:
    async def atold() -> dict[str, Any]:
        async with db_lock("told"):
            return site.metadata_of("told")

    with working_for(task="import"):
        task = asyncio.create_task(atold())
        assert await sync_to_async(told)() == {"task": "import"}
    assert await task == {"task": "import"}
    assert await atold() == {}


def test_async_to_sync() -> None:
    async def atold() -> dict[str, Any]:
        async with db_lock("told"):
            return site.metadata_of("told")

    with working_for(task="import"):
        assert async_to_sync(atold)() == {"task": "import"}


def test_it_is_asked_once_for_each_acquire() -> None:
    asked: list[int] = []

    def about() -> Mapping[str, Any]:
        asked.append(1)
        return {"task": "import"}

    with asked_by(about), db_lock("told"):
        assert db_lock("told", timeout=0).try_acquire() is None
        assert len(asked) == 2


def test_what_cannot_be_told_keeps_no_lock_from_being_had(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with working_for(task="import"), asked_by(lambda: {"at": object()}):
        assert told() == told() == {"task": "import"}
    (record,) = caplog.records
    assert record.__dict__["distlocks_event"] == "context_failed"
    assert record.exc_info


def test_it_costs_next_to_nothing() -> None:
    """Loosely bounded: other work goes on beside this. Ordinarily it is 0.05 and 0.1 µs."""
    nothing: dict[str, Any] = {}

    def fastest() -> float:
        return min(timeit.repeat(lambda: merged(nothing), number=1000, repeat=20)) / 1000

    assert fastest() < 1e-6
    with working_for(task="import"):
        assert fastest() < 2e-6


# Requests


def test_a_request(client: Client) -> None:
    assert client.get("/told?token=secret").json() == {"method": "GET", "path": "/told"}
    assert client.get("/told?mine").json() == {"method": "GET", "path": "mine"}
    assert told() == {}


@pytest.mark.parametrize("path", ["/atold", "/told-in-a-thread", "/told"])
async def test_a_request_on_an_event_loop(async_client: AsyncClient, path: str) -> None:
    response = await async_client.get(f"{path}?token=secret", headers={"x-request-id": "r-1"})
    assert response.json() == {"method": "GET", "path": path, "request_id": "r-1"}


def test_a_request_within_other_work(client: Client) -> None:
    with working_for(task="import"):
        assert client.get("/told").json() == {"task": "import", "method": "GET", "path": "/told"}


@pytest.mark.django_db
def test_the_user_is_told_only_once_it_is_known(
    client: Client, django_assert_num_queries: Any
) -> None:
    user = User.objects.create_user("jane")
    client.force_login(user)
    with django_assert_num_queries(0):
        assert client.get("/told").json() == {"method": "GET", "path": "/told"}
    assert client.get("/told?load").json() == {
        "method": "GET",
        "path": "/told",
        "user": user.pk,
        "username": "jane",
    }


@pytest.mark.django_db(transaction=True)
async def test_so_it_is_on_an_event_loop(async_client: AsyncClient) -> None:
    user = await User.objects.acreate_user("jane")
    await async_client.aforce_login(user)
    assert "user" not in (await async_client.get("/atold")).json()
    assert (await async_client.get("/atold?load")).json()["user"] == user.pk


def about(request: HttpRequest) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def view(request: HttpRequest) -> HttpResponse:
        found.append(told())
        return HttpResponse()

    WorkingForMiddleware(view)(request)
    return found[0]


def test_nobody_in_particular(rf: RequestFactory) -> None:
    request = rf.get("/")
    assert about(request) == {"method": "GET", "path": "/"}
    request.user = AnonymousUser()
    assert about(request) == {"method": "GET", "path": "/"}
    request.user = SimpleLazyObject(lambda: pytest.fail("It was forced."))
    assert about(request) == {"method": "GET", "path": "/"}


def test_a_key_that_is_no_number_is_told_as_text(rf: RequestFactory) -> None:
    request = rf.get("/")
    key = uuid.uuid4()
    request.user = User(username="jane\n\ud800" + "x" * 200)
    request.user.pk = key
    found = about(request)
    assert found["user"] == str(key)
    assert found["username"].startswith("jane\\n\\ud800x")
    assert len(found["username"]) == 150


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/a%00b%0a", "/a\\x00b\\n"),
        ("/caf%C3%A9", "/café"),
        ("/" + "x" * 300, "/" + "x" * 199),
        ("/" + "%00" * 199, ("/" + "\\x00" * 199)[:200]),
        ("/%E2%80%AE", "/\\u202e"),
    ],
)
def test_a_path_as_every_store_can_keep_it(rf: RequestFactory, path: str, shown: str) -> None:
    found = about(rf.get(path))
    assert found["path"] == shown
    assert checked_metadata(found) == json.loads(json.dumps(found)) == found


TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("headers", "request_id"),
    [
        ({}, ""),
        ({"X-Request-ID": "7f3a-b.c_d:1/2+3=@"}, "7f3a-b.c_d:1/2+3=@"),
        ({"X-Request-ID": "x" * 128}, "x" * 128),
        ({"X-Request-ID": "x" * 129}, ""),
        ({"X-Request-ID": ""}, ""),
        ({"X-Request-ID": "a b"}, ""),
        ({"X-Request-ID": "<script>"}, ""),
        ({"X-Request-ID": "a\n"}, ""),
        ({"X-Request-ID": "é"}, ""),
        ({"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, TRACE),
        ({"X-Request-ID": "a b", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, TRACE),
        ({"traceparent": f"ff-{TRACE}-b7ad6b7169203331-01"}, ""),
        ({"traceparent": f"00-{'0' * 32}-b7ad6b7169203331-01"}, ""),
        ({"traceparent": f"00-{TRACE}-{'0' * 16}-01"}, ""),
        ({"traceparent": f"00-{TRACE.upper()}-b7ad6b7169203331-01"}, ""),
    ],
)
def test_the_request_id(rf: RequestFactory, headers: dict[str, str], request_id: str) -> None:
    assert request_id_of(rf.get("/", headers=headers)) == request_id


def test_a_project_tells_what_it_likes(rf: RequestFactory) -> None:
    class Ours(WorkingForMiddleware):
        def about(self, request: HttpRequest) -> dict[str, Any]:
            return {"tenant": request.headers["X-Tenant"]}

    found: list[dict[str, Any]] = []

    def view(request: HttpRequest) -> HttpResponse:
        found.append(told())
        return HttpResponse()

    Ours(view)(rf.get("/", headers={"X-Tenant": "acme"}))
    assert found == [{"tenant": "acme"}]
