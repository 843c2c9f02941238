"""Force-release in the admin: who may, what is asked, what is written, and what can go wrong."""

import html
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import DatabaseError, InterfaceError, OperationalError
from django.http import HttpResponse
from django.test import Client, override_settings

from distlocks import BackendUnavailable, NotSupported, db_lock, fences
from distlocks.admin import force
from distlocks.handler import locks
from distlocks.history.journal import journal
from distlocks.models import Lock, LockEvent
from tests.factories import LockFactory, now_us

pytestmark = pytest.mark.django_db

FORCE = "/admin/distlocks/lock/force-release/"
MEMORY = {"BACKEND": "distlocks.backends.memory.MemoryBackend"}
DOWN = {
    "BACKEND": "distlocks.backends.redis.RedisBackend",
    "OPTIONS": {"url": "redis://127.0.0.1:1/0"},
}


@pytest.fixture(autouse=True)
def stores() -> Iterator[None]:
    aliases = {"default": settings.DISTLOCKS["default"], "memory": MEMORY}
    with override_settings(DISTLOCKS=aliases):
        Lock.objects.all().delete()
        yield


def text(response: HttpResponse) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", response.content.decode())))


def staff(*permissions: str) -> Client:
    user = User.objects.create_user("somebody", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def answer(response: Any, **fields: Any) -> dict[str, Any]:
    """What the confirmation page sends."""
    targets = response.context["targets"]
    return {
        "lock": [target.address for target in targets],
        "seen": [target.seen for target in targets],
        "post": "yes",
        "reason": "it hangs",
        **fields,
    }


def free(client: Client, *addresses: str, **fields: Any) -> Any:
    """Ask, and confirm."""
    asked = client.post(FORCE, {"lock": addresses})
    assert asked.status_code == 200
    return client.post(FORCE, answer(asked, **fields), follow=True)


@pytest.mark.parametrize(
    "permissions", [("view_lock", "change_lock", "delete_lock"), ("force_release_lock",)]
)
def test_without_the_permissions_nothing_is_freed(permissions: tuple[str, ...]) -> None:
    LockFactory(key="order:42")
    client = staff(*permissions)
    for data in ({"lock": "default/order:42"}, {"lock": "default/order:42", "post": "yes"}):
        assert client.post(FORCE, data).status_code == 403
    assert Lock.objects.held().exists()


def test_the_permission_is_asked_for_again() -> None:
    LockFactory(key="order:42")
    client = staff("view_lock", "force_release_lock")
    asked = client.post(FORCE, {"lock": "default/order:42"})
    User.objects.get(username="somebody").user_permissions.clear()
    assert client.post(FORCE, answer(asked)).status_code == 403
    assert Lock.objects.held().exists()


def test_it_is_freed_and_written_down(admin_client: Client, admin_user: User) -> None:
    lock = LockFactory(key="order:42", label="import")
    response = free(admin_client, "default/order:42")
    assert "Freed 1 lock: order:42." in text(response)
    assert not Lock.objects.taken().exists()
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_repr) == (admin_user, "order:42")
    assert "it hangs" in entry.change_message
    assert "import" in entry.change_message
    journal.flush()
    event = LockEvent.objects.get(kind="forced", owner_id=lock.owner_id)
    assert (event.reason, event.other["label"]) == ("it hangs", "admin")


def test_from_every_backend(admin_client: Client) -> None:
    LockFactory(key="a")
    lease = db_lock("b", backend="memory").acquire()
    response = free(admin_client, "default/a", "memory/b")
    assert "Freed 2 locks: a, b." in text(response)
    assert not lease.release()


def test_a_tree_key_goes_by_its_parts(admin_client: Client) -> None:
    lease = db_lock(("customer:7", "order:42"), backend="memory").acquire()
    free(admin_client, "memory/customer:7")
    assert not lease.release()


@pytest.mark.parametrize("reason", ["", "   ", "x" * 401])
def test_a_reason_is_asked_for(admin_client: Client, reason: str) -> None:
    LockFactory(key="order:42")
    response = free(admin_client, "default/order:42", reason=reason)
    assert response.context["form"].errors
    assert Lock.objects.held().exists()


@pytest.mark.parametrize(
    "nonsense", [[], ["order:42"], ["nowhere/order:42"], ["default/"], ["/x"], ["\0"]]
)
def test_what_is_no_lock_is_passed_over(admin_client: Client, nonsense: list[str]) -> None:
    response = admin_client.post(FORCE, {"lock": nonsense, "post": "yes"}, follow=True)
    assert "nothing has been freed" in text(response)


def test_a_key_that_no_store_can_have_is_told(admin_client: Client) -> None:
    response = admin_client.post(FORCE, {"lock": [f"default/{'x' * 201}"]})
    assert response.status_code == 200


def test_only_a_post_frees(admin_client: Client) -> None:
    assert admin_client.get(FORCE, {"lock": "default/a", "post": "yes"}).status_code == 302


def test_what_is_free_by_then_is_told(admin_client: Client) -> None:
    LockFactory(key="a")
    LockFactory(key="b")
    asked = admin_client.post(FORCE, {"lock": ["default/a", "default/b"]})
    Lock.objects.filter(key="a").update(owner_id="", expires_at=0)
    page = text(admin_client.post(FORCE, answer(asked), follow=True))
    assert "Free already: a." in page
    assert "Freed 1 lock: b." in page
    assert LogEntry.objects.count() == 1


def test_what_changed_hands_is_asked_for_again(admin_client: Client) -> None:
    LockFactory(key="a")
    LockFactory(key="b")
    asked = admin_client.post(FORCE, {"lock": ["default/a", "default/b"]})
    Lock.objects.filter(key="a").update(owner_id="next", fencing_token=now_us())
    again = admin_client.post(FORCE, answer(asked))
    assert "has changed hands" in text(again)
    assert Lock.objects.held().count() == 2
    assert [target.changed for target in again.context["targets"]] == [True, False]
    admin_client.post(FORCE, answer(again))
    assert not Lock.objects.held().exists()


def test_an_extended_lease_is_the_same(admin_client: Client) -> None:
    LockFactory(key="a")
    asked = admin_client.post(FORCE, {"lock": "default/a"})
    Lock.objects.update(expires_at=now_us() + 60_000_000)
    admin_client.post(FORCE, answer(asked))
    assert not Lock.objects.held().exists()


def test_one_more_reader_is_no_other_holder(admin_client: Client) -> None:
    first = db_lock("report", shared=True, backend="memory").acquire()
    asked = admin_client.post(FORCE, {"lock": "memory/report"})
    second = db_lock("report", shared=True, backend="memory").acquire()
    admin_client.post(FORCE, answer(asked))
    assert not second.release()
    assert not first.release()


@override_settings()
def test_a_store_that_is_down_is_no_error(admin_client: Client) -> None:
    settings.DISTLOCKS = settings.DISTLOCKS | {"down": DOWN}
    LockFactory(key="a")
    asked = admin_client.post(FORCE, {"lock": ["default/a", "down/b"]})
    assert "does not answer" in text(asked)
    response = admin_client.post(FORCE, answer(asked), follow=True)
    page = text(response)
    assert "Freed 1 lock: a." in page
    # The rest is asked for again, with what was typed.
    assert [target.name for target in response.context["targets"]] == ["b"]
    assert "it hangs" in page


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BackendUnavailable("The store is away."), "It may have been freed nevertheless"),
        (DatabaseError("guards are locked"), "guards are locked"),
        (InterfaceError("connection already closed"), "connection already closed"),
        (NotSupported("not inside a transaction"), "not inside a transaction"),
    ],
)
def test_errors_of_some_do_not_keep_others(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    for key in ("a", "b", "c"):
        LockFactory(key=key)
    real: Callable[..., Any] = force.force_release

    def fails_for_b(key: str, **options: Any) -> Any:
        if key == "b":
            raise error
        return real(key, **options)

    monkeypatch.setattr(force, "force_release", fails_for_b)
    page = text(free(admin_client, "default/a", "default/b", "default/c"))
    assert words in page
    if isinstance(error, BackendUnavailable):
        # Who asks a store that is away again waits as long again.
        assert "Freed 1 lock: a." in page
        entry = LogEntry.objects.get(object_repr="b")
        assert "not certain" in entry.change_message
    else:
        assert "Freed 2 locks: a, c." in page
        assert not LogEntry.objects.filter(object_repr="b").exists()


def test_a_guard_that_fails_after_the_release_is_told(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key changed hands in between, and its last holder's transaction stays open."""
    LockFactory(key="a")
    asked = admin_client.post(FORCE, {"lock": "default/a"})
    real: Callable[..., Any] = fences.raise_fence

    def raise_fence(connection: Any, key: str, token: int, **options: Any) -> Any:
        if not Lock.objects.held().exists():
            raise OperationalError("canceling statement due to lock timeout")
        Lock.objects.update(label="the next one", fencing_token=now_us())
        return real(connection, key, token, **options)

    monkeypatch.setattr(fences, "raise_fence", raise_fence)
    page = text(admin_client.post(FORCE, answer(asked), follow=True))
    assert "Freed 1 lock: a." in page
    assert "has been freed, but its last holder is not refused everywhere: canceling" in page
    assert "the next one" in LogEntry.objects.get().change_message
    assert not Lock.objects.held().exists()


def test_a_store_that_is_down_is_looked_at_once(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def away(name: str, **options: Any) -> Any:
        asked.append(name)
        raise BackendUnavailable("The store is away.")

    monkeypatch.setattr(locks["memory"], "holders_of", away)
    LockFactory(key="x")
    addresses = ["memory/a", "memory/b", "default/x", "memory/c"]
    response = admin_client.post(FORCE, {"lock": addresses})
    assert asked == ["a"]
    assert [bool(one.error) for one in response.context["targets"]] == [True, True, False, True]


def test_who_slips_in_between_is_named(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    LockFactory(key="a")
    real: Callable[..., Any] = force.force_release

    def another(key: str, **options: Any) -> Any:
        Lock.objects.filter(key=key).update(label="the next one", fencing_token=now_us())
        return real(key, **options)

    monkeypatch.setattr(force, "force_release", another)
    page = text(free(admin_client, "default/a"))
    assert "changed hands in the same moment" in page
    assert "the next one" in page


def test_the_log_that_fails_keeps_nobody(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    LockFactory(key="a")

    def fail(**fields: Any) -> None:
        raise DatabaseError("the disk is full")

    monkeypatch.setattr(LogEntry.objects, "create", fail)
    page = text(free(admin_client, "default/a"))
    assert "could not be written to the admin's log" in page
    assert not Lock.objects.held().exists()


def test_it_takes_no_longer_than_a_server_waits(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    LockFactory(key="a")
    monkeypatch.setattr(force, "PATIENCE", -1.0)
    assert "Not tried: the others took too long" in text(free(admin_client, "default/a"))
    assert Lock.objects.held().exists()


@pytest.mark.django_db(transaction=True)
def test_under_atomic_requests(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import connections

    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    LockFactory(key="a")
    assert "Freed 1 lock: a." in text(free(admin_client, "default/a"))
    assert not Lock.objects.held().exists()


def test_a_backend_with_wrong_settings_is_told(admin_client: Client) -> None:
    with override_settings(DISTLOCKS=settings.DISTLOCKS | {"wrong": {"BACKEND": "no.Where"}}):
        response = admin_client.post(FORCE, {"lock": "wrong/a"})
        assert "cannot be imported" in text(response)
        assert "cannot be imported" in text(admin_client.post(FORCE, answer(response)))
        page = text(admin_client.get("/admin/distlocks/lock/of/wrong/a/"))
        assert "cannot be imported" in page
