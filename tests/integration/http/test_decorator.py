"""Views that say themselves how they are answered for."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.checks import Error
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings

from distlocks import BackendUnavailable, Lease, LockTimeout
from distlocks.http import answers_lock_errors
from distlocks.http_settings import check_http
from tests.integration.http import site


@pytest.fixture(autouse=True)
def _without_the_middleware(_site: None) -> Any:
    with override_settings(MIDDLEWARE=[]):
        yield


@pytest.mark.parametrize("path", ["/locked", "/class"])
def test_a_view(client: Client, rival: Lease, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 423
    assert response.headers["Retry-After"] == ("7" if path == "/locked" else "20")
    rival.release()
    assert client.get(path).content == b"had"


@pytest.mark.parametrize("path", ["/alocked", "/aclass", "/locked", "/class"])
async def test_a_view_on_an_event_loop(async_client: AsyncClient, rival: Lease, path: str) -> None:
    response = await async_client.get(path, headers={"accept": "text/html"})
    assert response.status_code == 423
    assert b"<h1>" in response.content
    await rival.arelease()
    assert (await async_client.get(path)).content == b"had"


def raising(error: Exception) -> Callable[..., HttpResponse]:
    def view(request: HttpRequest) -> HttpResponse:
        raise error

    return view


def test_what_is_not_given_is_as_in_the_setting(rf: RequestFactory) -> None:
    view = answers_lock_errors(retry_after=timedelta(minutes=1))(raising(LockTimeout()))
    with override_settings(DISTLOCKS_HTTP={"STATUS": 423, "MAX_RETRY_AFTER": 30}):
        response = view(rf.get("/"))
    assert (response.status_code, response.headers["Retry-After"]) == (423, "30")


def test_seconds_may_be_made_from_the_error(rf: RequestFactory) -> None:
    view = answers_lock_errors(retry_after=lambda error: len(error.keys) + 0.5)(
        raising(LockTimeout(keys=("a", "b")))
    )
    assert view(rf.get("/")).headers["Retry-After"] == "3"


def test_a_store_that_does_not_answer(rf: RequestFactory) -> None:
    error = BackendUnavailable()
    assert answers_lock_errors(raising(error))(rf.get("/")).status_code == 503
    with pytest.raises(BackendUnavailable):
        answers_lock_errors(unavailable=False)(raising(error))(rf.get("/"))


def test_a_view_keeps_its_name_and_marks() -> None:
    assert site.locked.__name__ == "held"
    assert site.alocked.__name__ == "aheld"


@pytest.mark.django_db
def test_nothing_written_before_the_lock_is_kept(rf: RequestFactory, rival: Lease) -> None:
    """As under ATOMIC_REQUESTS: without the decorator, the error would have rolled it back."""
    with transaction.atomic():
        response = site.writes_first(rf.get("/"))
    assert response.status_code == 409
    assert not User.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_so_it_is_under_atomic_requests(
    client: Client, rival: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    assert client.get("/writes-first").status_code == 409
    assert not User.objects.exists()


@pytest.mark.django_db
def test_a_test_cases_transaction_goes_on(client: Client, rival: Lease) -> None:
    assert client.get("/writes-first").status_code == 409
    assert User.objects.count() == 1


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"status": 404}, ValueError, "status=404"),
        ({"retry_after": 0}, ValueError, "retry_after is 0 s"),
        ({"retry_after": "soon"}, TypeError, "retry_after must be a number"),
        ({"unavailable": "no"}, TypeError, "unavailable must be True or False"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        answers_lock_errors(**arguments)


def test_what_is_no_view() -> None:
    with pytest.raises(TypeError, match="method_decorator"):
        answers_lock_errors(lambda: raising(LockTimeout())(HttpRequest()))()


@pytest.mark.parametrize(
    ("setting", "number"),
    [
        ([], "E061"),
        ({"STATE": 409}, "E061"),
        ({"STATUS": 200}, "E062"),
        ({"STATUS": "409"}, "E062"),
        ({"RETRY_AFTER": 0}, "E063"),
        ({"RETRY_AFTER": "1"}, "E063"),
        ({"MAX_RETRY_AFTER": None}, "E063"),
        ({"MAX_RETRY_AFTER": 1e6}, "E063"),
        ({"UNAVAILABLE": 1}, "E064"),
    ],
)
def test_wrong_settings(setting: Any, number: str, rf: RequestFactory) -> None:
    with override_settings(DISTLOCKS_HTTP=setting):
        (found,) = check_http()
        with pytest.raises(ImproperlyConfigured):
            answers_lock_errors(raising(LockTimeout()))(rf.get("/"))
    assert isinstance(found, Error)
    assert found.id == f"distlocks.{number}"
    assert "DISTLOCKS_HTTP" in found.msg
    assert found.hint


@pytest.mark.parametrize(
    "setting", [{}, {"STATUS": 423, "RETRY_AFTER": None, "MAX_RETRY_AFTER": timedelta(minutes=5)}]
)
def test_good_settings(setting: dict[str, Any]) -> None:
    with override_settings(DISTLOCKS_HTTP=setting):
        assert check_http() == []
