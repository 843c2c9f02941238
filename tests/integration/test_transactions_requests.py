"""A view under ATOMIC_REQUESTS: the lock that it takes lasts until its response's commit."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import path

from distlocks import LockTimeout, db_lock
from tests.integration.test_transactions_end import Lane, is_free
from tests.testapp.models import Account

pytestmark = pytest.mark.usefixtures("databases", "atomic_requests")

LANES = [
    Lane("postgres", "postgres"),
    Lane("portable_postgres", "postgres"),
    Lane("sqlite", "default"),
    Lane("sqlite", "postgres"),
]

# What the views tell the test, and what they wait for.
told: dict[str, Any] = {}
working = threading.Event()
go_on = threading.Event()


def debit(request: HttpRequest, backend: str, database: str, name: str) -> HttpResponse:
    """Takes the lock, reads, writes; then goes on for a while, as views do."""
    with db_lock(name, backend=backend):
        account = Account.objects.using(database).get(name=name)
        account.balance -= 1
        account.save()
    told["held after the block"] = not is_free(name, Lane(backend, database))
    if request.GET.get("wait"):
        working.set()
        assert go_on.wait(20)
    if request.GET.get("fail"):
        raise ValueError("the view failed")
    if request.GET.get("undo"):
        transaction.set_rollback(True, using=database)
    return HttpResponse("done")


def debit_or_refuse(request: HttpRequest, backend: str, database: str, name: str) -> HttpResponse:
    """Answers at once if somebody else is at it, with the transaction as good as new."""
    accounts = Account.objects.using(database)
    try:
        with db_lock(name, timeout=0, backend=backend):
            accounts.filter(name=name).update(balance=100)
    except LockTimeout:
        accounts.create(name=f"{name} refused")
        return HttpResponse("busy", status=409)
    return HttpResponse("done")


@transaction.non_atomic_requests(using="default")
@transaction.non_atomic_requests(using="postgres")
def without(request: HttpRequest, backend: str, database: str, name: str) -> HttpResponse:
    with db_lock(name, backend=backend):
        pass
    told["held after the block"] = not is_free(name, Lane(backend, database))
    return HttpResponse("done")


urlpatterns = [
    path("debit/<backend>/<database>/<name>", debit),
    path("refuse/<backend>/<database>/<name>", debit_or_refuse),
    path("without/<backend>/<database>/<name>", without),
]


@pytest.fixture(params=LANES, ids="-".join)
def lane(request: pytest.FixtureRequest) -> Lane:
    lane: Lane = request.param
    return lane


@pytest.fixture
def atomic_requests(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(connections.databases[lane.database], "ATOMIC_REQUESTS", True)
    told.clear()
    working.clear()
    go_on.clear()
    with override_settings(ROOT_URLCONF=__name__):
        yield


@pytest.fixture
def name(lane: Lane) -> str:
    """The account's name, and the key."""
    account = Account.objects.using(lane.database).create(
        name=f"account-{Account.objects.using(lane.database).count()}-{threading.get_native_id()}"
    )
    return account.name


def get(view: str, lane: Lane, name: str, query: str = "") -> HttpResponse:
    """The response to a request that a thread of its own serves, as in a real server."""

    def serve() -> HttpResponse:
        try:
            client = Client(raise_request_exception=False)
            return client.get(f"/{view}/{lane.backend}/{lane.database}/{name}{query}")  # type: ignore[return-value]
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(serve).result(30)


def balance(lane: Lane, name: str) -> int:
    return Account.objects.using(lane.database).get(name=name).balance


def test_a_response_commits_and_frees(lane: Lane, name: str) -> None:
    assert get("debit", lane, name).status_code == 200
    assert told == {"held after the block": True}
    assert balance(lane, name) == -1
    assert is_free(name, lane)


@pytest.mark.parametrize(("query", "status"), [("?fail=1", 500), ("?undo=1", 200)])
def test_an_error_or_a_rollback_undoes_and_frees(
    lane: Lane, name: str, query: str, status: int
) -> None:
    assert get("debit", lane, name, query).status_code == status
    assert told == {"held after the block": True}
    assert balance(lane, name) == 0
    assert is_free(name, lane)


def test_two_requests_at_once_lose_no_update(lane: Lane, name: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(get, "debit", lane, name, "?wait=1")
        assert working.wait(20)
        second = pool.submit(get, "debit", lane, name)
        # It cannot have read before the first one's commit.
        assert not is_free(name, lane)
        go_on.set()
        assert first.result(30).status_code == second.result(30).status_code == 200
    assert balance(lane, name) == -2


def test_a_request_that_does_not_get_the_lock_can_still_write(lane: Lane, name: str) -> None:
    with db_lock(name, backend=lane.backend):
        assert get("refuse", lane, name).status_code == 409
    assert Account.objects.using(lane.database).filter(name=f"{name} refused").exists()
    assert balance(lane, name) == 0
    assert get("refuse", lane, name).status_code == 200
    assert balance(lane, name) == 100


def test_a_view_without_a_transaction_frees_at_the_blocks_end(lane: Lane, name: str) -> None:
    assert get("without", lane, name).status_code == 200
    assert told == {"held after the block": False}
