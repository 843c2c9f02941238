"""The admin: who has which lock now, to be looked at by those who may, and not to be touched."""

import html
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.conf import settings
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.http import HttpResponse
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from distlocks import db_lock
from distlocks.admin.parts import database_of_locks
from distlocks.models import Lock, LockAuthority
from tests.factories import LockFactory, now_us

pytestmark = pytest.mark.django_db(databases=["default", "postgres"])

LIST = "/admin/distlocks/lock/"
AUTHORITIES = "/admin/distlocks/lockauthority/"


@pytest.fixture(params=["default", "postgres"])
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """The database of the default alias' locks, empty. Users are in another one, or the same."""
    entry = settings.DISTLOCKS["default"] | {"OPTIONS": {"using": request.param}}
    with override_settings(DISTLOCKS={"other": settings.DISTLOCKS["memory"], "default": entry}):
        Lock.objects.using(request.param).delete()
        yield request.param


def text(response: HttpResponse) -> str:
    """What a reader of the page reads."""
    return html.unescape(re.sub(r"<[^>]*>", " ", response.content.decode()))


def keys(response: Any) -> list[str]:
    """The keys that are listed."""
    assert response.status_code == 200
    return [lock.key for lock in response.context["cl"].result_list]


# What is listed


def test_live_locks_only(using: str, admin_client: Client) -> None:
    LockFactory(using=using, key="held")
    LockFactory(using=using, key="cooling", cooling=True)
    LockFactory(using=using, key="expired", expired=True)
    LockFactory(using=using, key="free", free=True)
    response = admin_client.get(LIST)
    assert keys(response) == ["cooling", "held"]
    page = text(response)
    assert "expired" not in page.lower()
    assert re.search(r"cooling\s+cooling down", page)
    assert re.search(r"held\s+held\s+web-1, pid \d+, MainThread", page)


def test_a_lock_in_use_is_there_and_then_gone(using: str, admin_client: Client) -> None:
    with db_lock("order:42", label="nightly", metadata={"run": 7}) as lease:
        page = text(admin_client.get(LIST))
        assert "order:42" in page
        assert "nightly" in page
        assert str(lease.fencing_token) in page
        detail = text(admin_client.get(f"{LIST}order_3A42/change/"))
        assert lease.owner_id in detail
        assert '{"run": 7}' in detail
    assert keys(admin_client.get(LIST)) == []


def test_a_key_that_several_have_names_them(using: str, admin_client: Client) -> None:
    with ExitStack() as held:
        for number in range(5):
            held.enter_context(db_lock("report", shared=True, label=f"reader {number}"))
        held.enter_context(db_lock(("customer:7", "order:42")))
        page = text(admin_client.get(LIST))
        assert re.search(
            r"report\s+shared\s+\S+, pid \d+, MainThread \(reader 0\); .*; and 2 more", page
        )
        assert re.search(r"customer:7\s+held further down", page)
        assert re.search(r"customer:7 → order:42\s+held\s", page)
        assert "1970" not in page
    assert keys(admin_client.get(LIST)) == []


def test_they_are_in_the_order_of_their_keys(using: str, admin_client: Client) -> None:
    for key in ("b", "a", "B", "ä", "10", "9"):
        LockFactory(using=using, key=key)
    assert keys(admin_client.get(LIST)) == ["10", "9", "B", "a", "b", "ä"]


def test_an_empty_list_is_a_page_too(using: str, admin_client: Client) -> None:
    assert keys(admin_client.get(LIST)) == []


def test_there_are_pages_of_a_hundred(using: str, admin_client: Client) -> None:
    locks = [LockFactory.build(key=f"{number:03d}") for number in range(120)]
    Lock.objects.using(using).bulk_create(locks)
    assert keys(admin_client.get(LIST)) == [f"{number:03d}" for number in range(100)]
    assert keys(admin_client.get(f"{LIST}?p=2")) == [f"{number:03d}" for number in range(100, 120)]


def test_the_number_of_queries_does_not_grow_with_the_locks(
    using: str, admin_client: Client
) -> None:
    def queries() -> int:
        with (
            CaptureQueriesContext(connections["default"]) as default,
            CaptureQueriesContext(connections["postgres"]) as postgres,
        ):
            assert admin_client.get(LIST).status_code == 200
        return len(default) + len(postgres)

    LockFactory(using=using)
    queries()
    few = queries()
    for _ in range(30):
        LockFactory(using=using, label="nightly", metadata={"a": 1})
    assert queries() == few


@pytest.mark.parametrize("column", [1, 2, 3, 4, 5, 6, 7])
def test_every_column_can_be_sorted_by(using: str, admin_client: Client, column: int) -> None:
    for number in range(3):
        LockFactory(using=using, key=f"{number}", label=f"{number}", age=number)
    for order in (f"{column}", f"-{column}"):
        assert sorted(keys(admin_client.get(LIST, {"o": order}))) == ["0", "1", "2"]


# Search


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("order", ["order:1", "order:2"]),
        ("order:1", ["order:1"]),
        ("NIGHTLY", ["stock"]),
        ("db-7", ["order:2"]),
        ("owner-of-stock", ["stock"]),
        ("worker-3", ["order:1"]),
        ("order worker-3", ["order:1"]),
        ("nothing", []),
        ("%", ["100%"]),
        ("_", []),
        ("expired", []),
    ],
)
def test_locks_are_found_by_what_describes_them(
    using: str, admin_client: Client, words: str, found: list[str]
) -> None:
    LockFactory(using=using, key="order:1", thread="worker-3")
    LockFactory(using=using, key="order:2", host="db-7")
    LockFactory(using=using, key="stock", label="nightly import", owner_id="owner-of-stock")
    LockFactory(using=using, key="100%")
    LockFactory(using=using, key="expired", expired=True)
    assert keys(admin_client.get(LIST, {"q": words})) == found


def test_a_lock_is_opened_by_its_key_only(using: str, admin_client: Client) -> None:
    lock = LockFactory(using=using, key="order:1", owner_id="somebody")
    assert admin_client.get(f"{LIST}{quote(lock.key)}/change/").status_code == 200
    # The same answer for what never was and what is no longer taken: back to the start.
    LockFactory(using=using, key="gone", free=True)
    for key in ("somebody", "gone", "never"):
        assert admin_client.get(f"{LIST}{quote(key)}/change/").status_code == 302


WEIRD = [
    "a/b/c",
    "/",
    "//",
    "..",
    "it's",
    'say "hello"',
    "100%",
    "%41",
    "_41",
    "_",
    "__",
    "a?b=c&d",
    "#fragment",
    "<script>alert(1)</script>",
    "{{ braces }}",
    "back\\slash",
    "semi;colon",
    "plus+plus",
    "a@b:80",
    " leading and trailing ",
    "two  spaces",
    "Straße",
    "e\u0301",
    "鍵 🔒",
    "no\u00a0break",
    "right \u202eto left",
    "add",
    "history",
    "delete",
    "None",
    "null",
    "x" * 200,
    "🔒" * 200,
]


def test_weird_keys_are_listed_and_open_their_page(using: str, admin_client: Client) -> None:
    Lock.objects.using(using).bulk_create(LockFactory.build(key=key) for key in WEIRD)
    response = admin_client.get(LIST)
    assert sorted(keys(response)) == sorted(WEIRD)
    page = response.content.decode()
    assert "<script>alert(1)" not in page
    links = re.findall(r'<th class="field-path"><a href="([^"]+)">(.*?)</a></th>', page)
    assert len(links) == len(WEIRD)
    opened = []
    for link, shown in links:
        detail = admin_client.get(html.unescape(link))
        assert detail.status_code == 200, link
        opened.append(detail.context["original"].key)
        # From Django 6.1 on, lists show values without the spaces around them.
        assert html.unescape(shown).strip() == opened[-1].strip()
    assert sorted(opened) == sorted(WEIRD)


def test_weird_holders_are_shown_as_text(using: str, admin_client: Client) -> None:
    evil = "<img src=x onerror=alert(1)>"
    LockFactory(
        using=using, key="a", host=evil, thread=evil, label=evil, metadata={evil: [evil, None]}
    )
    for path in (LIST, f"{LIST}a/change/"):
        assert evil not in admin_client.get(path).content.decode()
    assert evil in text(admin_client.get(f"{LIST}a/change/"))


# Who may


def staff(*permissions: str) -> Client:
    user = User.objects.create_user("somebody", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def test_who_is_not_logged_in_is_asked_to(using: str, client: Client) -> None:
    LockFactory(using=using, key="secret")
    for path in (LIST, f"{LIST}secret/change/"):
        response = client.get(path)
        assert response.status_code == 302
        assert response["Location"].startswith("/admin/login/")


def test_staff_without_the_permission_see_nothing(using: str) -> None:
    LockFactory(using=using, key="secret")
    client = staff("view_user", "change_user", "add_lock")
    for path in (LIST, f"{LIST}secret/change/", f"{LIST}secret/history/", f"{LIST}?q=secret"):
        response = client.get(path)
        assert response.status_code == 403
        assert "secret" not in response.content.decode()
    index = client.get("/admin/").content.decode()
    assert LIST not in index


def test_staff_with_the_permission_may_look(using: str) -> None:
    LockFactory(using=using, key="order:1")
    client = staff("view_lock")
    assert keys(client.get(LIST)) == ["order:1"]
    assert client.get(f"{LIST}order_3A1/change/").status_code == 200
    assert LIST in client.get("/admin/").content.decode()


def test_nobody_may_change_anything(using: str, admin_client: Client) -> None:
    """A changed row would be a lock that two have; a deleted one would take its token along."""
    lock = LockFactory(using=using, key="order:1", owner_id="somebody")
    detail = f"{LIST}order_3A1"
    page = admin_client.get(f"{detail}/change/").content.decode()
    assert 'name="_save"' not in page
    assert "deletelink" not in page
    listing = admin_client.get(LIST).content.decode()
    assert f"{LIST}add/" not in listing
    assert 'name="action"' not in listing

    for client in (admin_client, staff("view_lock", "add_lock", "change_lock", "delete_lock")):
        assert client.get(f"{LIST}add/").status_code == 403
        assert client.post(f"{LIST}add/", {"key": "new"}).status_code == 403
        assert client.post(f"{detail}/change/", {"owner_id": ""}).status_code == 403
        assert client.get(f"{detail}/delete/").status_code == 403
        assert client.post(f"{detail}/delete/", {"post": "yes"}).status_code == 403
        action = {"action": "delete_selected", "_selected_action": ["order:1"], "post": "yes"}
        client.post(LIST, action)
    assert [*Lock.objects.using(using).values_list("key", "owner_id", "fencing_token")] == [
        ("order:1", "somebody", lock.fencing_token)
    ]


def test_users_who_are_no_staff_have_no_way_in(using: str) -> None:
    user = User.objects.create_user("customer")
    user.user_permissions.set(Permission.objects.filter(codename="view_lock"))
    client = Client()
    client.force_login(user)
    assert client.get(LIST).status_code == 302


# Which database


DATABASE = "distlocks.backends.database.DatabaseBackend"


@pytest.mark.parametrize(
    ("aliases", "expected"),
    [
        ({"default": {"OPTIONS": {"using": "postgres"}}}, "postgres"),
        ({"default": {}}, "default"),
        ({"default": "memory", "jobs": {"OPTIONS": {"using": "postgres"}}}, "postgres"),
        ({"jobs": {"OPTIONS": {"using": "postgres"}}, "default": {}}, "default"),
    ],
)
def test_the_locks_of_the_default_alias_come_first(aliases: dict[str, Any], expected: str) -> None:
    memory = {"BACKEND": "distlocks.backends.memory.MemoryBackend"}
    with override_settings(
        DISTLOCKS={
            alias: memory if entry == "memory" else {"BACKEND": DATABASE} | entry
            for alias, entry in aliases.items()
        }
    ):
        assert database_of_locks() == expected


def test_with_no_locks_in_any_database_the_list_is_empty(admin_client: Client) -> None:
    memory = {"BACKEND": "distlocks.backends.memory.MemoryBackend"}
    Lock.objects.all().delete()
    with override_settings(DISTLOCKS={"default": memory}):
        assert keys(admin_client.get(LIST)) == []


def test_the_pages_have_names(admin_client: Client) -> None:
    assert reverse("admin:distlocks_lock_changelist") == LIST
    assert "Distributed locks" in text(admin_client.get("/admin/"))


# The model


def test_the_queryset_knows_the_states(using: str) -> None:
    for state in ("held", "cooling", "expired", "free"):
        LockFactory(using=using, key=state, **{state: True})
    LockFactory(using=using, key="barely", expires_at=now_us() + 10_000_000)
    locks = Lock.objects.using(using)
    assert {lock.key for lock in locks.taken()} == {"held", "cooling", "barely"}
    assert {lock.key for lock in locks.held()} == {"held", "barely"}
    assert {lock.key for lock in locks.expired()} == {"expired"}
    assert locks.filter(key="held").taken().exists()
    assert locks.taken().filter(label="").held().count() == 2


def test_locks_come_in_the_order_of_their_keys(using: str) -> None:
    for key in ("b", "a", "C"):
        LockFactory(using=using, key=key)
    assert [lock.key for lock in Lock.objects.using(using).all()] == ["C", "a", "b"]


def test_a_lock_is_known_by_its_key_and_its_moments(using: str) -> None:
    held = LockFactory(using=using, key="order:42")
    assert str(held) == "order:42"
    assert round(held.acquired.timestamp() * 1_000_000) == held.acquired_at
    assert held.expires is not None
    assert round(held.expires.timestamp() * 1_000_000) == held.expires_at
    assert not held.cooling_down
    assert LockFactory(using=using, cooling=True).cooling_down
    assert LockFactory(using=using, free=True).expires is None


def test_keys_are_compared_exactly(using: str) -> None:
    alike = ["order", "Order", "order ", " order", "órder", "o\u0301rder"]
    for key in alike:
        LockFactory(using=using, key=key)
    locks = Lock.objects.using(using)
    for key in alike:
        assert locks.get(key=key).key == key
        assert locks.filter(key__in=[key]).count() == 1
    assert locks.count() == len(alike)


# Which store grants


@pytest.fixture
def authority(using: str) -> LockAuthority:
    """Of a fast path that the database has taken over."""
    settings.DISTLOCKS["redis"] = {
        "BACKEND": "distlocks.backends.redis.RedisBackend",
        # Nobody is asked there: the page reads the row.
        "OPTIONS": {"url": "redis://127.0.0.1:1/0"},
    }
    settings.DISTLOCKS["fast"] = {
        "BACKEND": "distlocks.backends.fastpath.FastPathBackend",
        "OPTIONS": {"redis": "redis", "database": "default"},
    }
    return LockAuthority.objects.using(using).create(
        name="distlocks.fast",
        epoch=4,
        phase="db",
        since=now_us(),
        why="Redis has failed 2 times in a row.",
        mode_lease=5_000_000,
        max_ttl=30_000_000,
        patience=60_000_000,
    )


def test_who_grants_since_when_and_why(authority: LockAuthority, admin_client: Client) -> None:
    page = text(admin_client.get(AUTHORITIES))
    for shown in ("distlocks.fast", "the database grants", "Redis has failed 2 times in a row."):
        assert shown in page
    page = text(admin_client.get(f"{AUTHORITIES}{quote(authority.pk)}/change/"))
    for shown in ("distlocks.fast", "60.0", "30.0", "5.0"):
        assert shown in page


def test_who_grants_is_not_changed_there(authority: LockAuthority, admin_client: Client) -> None:
    page = f"{AUTHORITIES}{quote(authority.pk)}/"
    assert admin_client.get(f"{AUTHORITIES}add/").status_code == 403
    assert admin_client.post(f"{page}change/", {"phase": "redis"}).status_code == 403
    assert admin_client.post(f"{page}delete/", {"post": "yes"}).status_code == 403
    authority.refresh_from_db()
    assert authority.phase == "db"
