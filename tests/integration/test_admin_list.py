"""The admin's list of live locks: what is in it, in which order, and who may look."""

import html
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urljoin

import pytest
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.http import HttpResponse
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from distlocks import db_lock
from distlocks.admin.parts import database_of_locks
from distlocks.keys import SEPARATOR
from distlocks.models import Lock, LockHolder, LockWaiter
from tests.factories import SECOND, LockFactory, now_us

pytestmark = pytest.mark.django_db(databases=["default", "postgres"])

LIST = "/admin/distlocks/lock/"
FORCE = f"{LIST}force-release/"


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
    return [entry.name for entry in response.context["found"].entries]


# What is listed


def test_live_locks_only(using: str, admin_client: Client) -> None:
    LockFactory(using=using, key="held")
    LockFactory(using=using, key="cooling", cooling=True)
    LockFactory(using=using, key="expired", expired=True)
    LockFactory(using=using, key="free", free=True)
    response = admin_client.get(LIST)
    assert keys(response) == ["cooling", "held"]
    page = text(response)
    assert re.search(r"cooling\s+(?:default)?\s+cooling down", page)
    assert re.search(r"held\s+(?:default)?\s+held\s+web-1\s+pid\s+\d+\s+·\s+MainThread", page)


def test_a_lock_in_use_is_there_and_then_gone(using: str, admin_client: Client) -> None:
    metadata = {"user": "olga", "request_id": "r-9", "run": 7}
    with db_lock("order:42", label="nightly", metadata=metadata):
        page = text(admin_client.get(LIST))
        for shown in ("order:42", "nightly", "olga", "r-9"):
            assert shown in page
    assert keys(admin_client.get(LIST)) == []


def test_a_key_that_several_have_names_them(using: str, admin_client: Client) -> None:
    with ExitStack() as held:
        for number in range(5):
            held.enter_context(db_lock("report", shared=True, label=f"reader {number}"))
        held.enter_context(db_lock("export", limit=3))
        held.enter_context(db_lock(("customer:7", "order:42")))
        page = text(admin_client.get(LIST))
        assert re.search(
            r"report\s+(?:default)?\s+shared . 5\s.*reader 0\s.*reader 2\s+and 2 more", page, re.S
        )
        assert re.search(r"export\s+(?:default)?\s+permit\s", page)
        assert re.search(r"customer:7\s+(?:default)?\s+held further down", page)
        assert re.search(r"customer:7 → order:42\s+(?:default)?\s+held\s", page)
    assert keys(admin_client.get(LIST)) == []


def test_they_are_in_the_order_of_their_keys(using: str, admin_client: Client) -> None:
    for key in ("b", "a", "B", "ä", "10", "9"):
        LockFactory(using=using, key=key)
    assert keys(admin_client.get(LIST)) == ["10", "9", "B", "a", "b", "ä"]


def test_an_empty_list_is_a_page_too(using: str, admin_client: Client) -> None:
    assert keys(admin_client.get(LIST)) == []


def test_there_are_pages_of_fifty(using: str, admin_client: Client) -> None:
    locks = [LockFactory.build(key=f"{number:03d}") for number in range(120)]
    Lock.objects.using(using).bulk_create(locks)
    names = [f"{number:03d}" for number in range(120)]
    assert keys(admin_client.get(LIST)) == names[:50]
    assert keys(admin_client.get(LIST, {"p": 3})) == names[100:]
    page = admin_client.get(LIST, {"p": 2, "q": "0"}).content.decode()
    assert '<a href="?q=0&amp;p=1"' in page
    assert "120 locks" in text(admin_client.get(LIST))
    # Nonsense is passed over.
    for nonsense in ("0", "-1", "x", "99999999999999999999", "9" * 5000):
        assert admin_client.get(LIST, {"p": nonsense}).status_code == 200


def test_of_very_many_the_first_thousand_are_paged_to(using: str, admin_client: Client) -> None:
    locks = [LockFactory.build(key=f"n{number:04d}") for number in range(1200)]
    Lock.objects.using(using).bulk_create(locks)
    response = admin_client.get(LIST, {"p": 20})
    assert keys(response) == [f"n{number:04d}" for number in range(950, 1000)]
    assert "More than 1000 locks" in text(response)
    assert keys(admin_client.get(LIST, {"p": 21})) == keys(response)
    assert keys(admin_client.get(LIST, {"q": "n1199"})) == ["n1199"]


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

    def fill(count: int) -> None:
        locks = [LockFactory.build(label="nightly", metadata={"a": 1}) for _ in range(count)]
        shared = LockFactory.build(key=f" {count}", mode="shared", owner_id="")
        Lock.objects.using(using).bulk_create([*locks, shared])
        LockHolder.objects.using(using).create(
            key=shared.key,
            mode="shared",
            owner_id="a",
            fencing_token=1,
            acquired_at=shared.acquired_at,
            expires_at=shared.expires_at,
        )

    fill(100)
    queries()
    few = queries()
    fill(1500)
    assert queries() == few
    assert few <= 12


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("key", ["a", "b", "c"]),
        ("-key", ["c", "b", "a"]),
        ("age", ["b", "c", "a"]),
        ("-age", ["a", "c", "b"]),
        ("left", ["c", "a", "b"]),
        ("-left", ["b", "a", "c"]),
        ("-waiters", ["c", "b", "a"]),
        ("waiters", ["a", "b", "c"]),
        ("nonsense", ["a", "b", "c"]),
    ],
)
def test_they_can_be_sorted(
    using: str, admin_client: Client, order: str, expected: list[str]
) -> None:
    for key, age, left, waiting in (("a", 30, 20, 0), ("b", 10, 30, 1), ("c", 20, 10, 2)):
        LockFactory(using=using, key=key, age=age, expires_at=now_us() + left * SECOND)
        for number in range(waiting):
            waits_for(key, f"{key}{number}")
    assert keys(admin_client.get(LIST, {"o": order})) == expected


def waits_for(key: str, owner_id: str, **fields: Any) -> LockWaiter:
    """Somebody who waits, as they tell."""
    told: dict[str, Any] = {
        "backend": "default",
        "since": now_us() - 5 * SECOND,
        "valid_until": now_us() + 10 * SECOND,
    }
    return LockWaiter.objects.create(key=key, owner_id=owner_id, **(told | fields))


# Filters


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"state": "exclusive"}, ["held", "old"]),
        ({"state": "cooling"}, ["cooling"]),
        ({"state": "shared"}, ["shared"]),
        ({"state": "nonsense"}, ["cooling", "held", "old", "shared"]),
        ({"waited": "1"}, ["held"]),
        ({"longer": "60"}, ["old"]),
        ({"longer": "61"}, ["cooling", "held", "old", "shared"]),
        ({"backend": "default"}, ["cooling", "held", "old", "shared"]),
        ({"backend": "other"}, []),
        ({"state": "exclusive", "waited": "1", "q": "held", "o": "-age"}, ["held"]),
        ({"waited": "1", "longer": "60"}, []),
    ],
)
def test_they_can_be_filtered(
    using: str, admin_client: Client, query: dict[str, str], expected: list[str]
) -> None:
    LockFactory(using=using, key="held")
    LockFactory(using=using, key="old", age=100)
    LockFactory(using=using, key="cooling", cooling=True)
    LockFactory(using=using, key="shared", mode="shared", owner_id="")
    waits_for("held", "a")
    waits_for("held", "b")
    waits_for("old", "gone", valid_until=now_us() - 1)
    waits_for("old", "elsewhere", backend="other")
    response = admin_client.get(LIST, query)
    assert keys(response) == expected
    counts = {one.name: one.waiters for one in response.context["found"].entries}
    assert counts.get("held", 2) == 2
    assert counts.get("old", 0) == 0


def test_with_no_history_nobody_knows_who_waits(using: str, admin_client: Client) -> None:
    LockFactory(using=using, key="held")
    entry = settings.DISTLOCKS["default"] | {"HISTORY_DAYS": 0}
    with override_settings(DISTLOCKS={"default": entry}):
        (row,) = admin_client.get(LIST).context["found"].entries
        assert row.waiters is None


def test_keys_of_another_alias_in_the_same_table_are_its_own(
    using: str, admin_client: Client
) -> None:
    entry = settings.DISTLOCKS["default"]
    aliases = {"default": entry, "app": entry | {"KEY_PREFIX": "app:"}, "again": entry}
    LockFactory(using=using, key="app:1")
    LockFactory(using=using, key="apple")
    with override_settings(DISTLOCKS=aliases):
        found = admin_client.get(LIST).context["found"]
        assert [(one.alias, one.name) for one in found.entries] == [
            ("app", "1"),
            ("default", "apple"),
        ]
        assert [store.also for store in found.stores] == [("again",), ()]
        assert keys(admin_client.get(LIST, {"backend": "default"})) == ["apple"]
        assert keys(admin_client.get(LIST, {"backend": "app"})) == ["1"]


# Other stores


def test_another_alias_keys_are_told_apart_by_case(using: str, admin_client: Client) -> None:
    own = settings.DISTLOCKS["default"]
    aliases = {"default": own}
    aliases |= {name: own | {"KEY_PREFIX": f"{name}:"} for name in ("app", "U")}
    with override_settings(DISTLOCKS=aliases):
        for key in ("APP:1", "app:2", "u:3", "U:4"):
            LockFactory(using=using, key=key)
        entries = admin_client.get(LIST).context["found"].entries
        assert sorted((entry.alias, entry.name) for entry in entries) == [
            ("U", "4"),
            ("app", "2"),
            ("default", "APP:1"),
            ("default", "u:3"),
        ]


def test_who_shares_a_key_is_named_on_every_page(using: str, admin_client: Client) -> None:
    """A page of several stores begins earlier in each of them than its number says."""
    with ExitStack() as held:
        for number in range(40):
            held.enter_context(db_lock(f"{number:03d}", shared=True, renew=False))
            held.enter_context(db_lock(f"{number:03d}", shared=True, backend="other", renew=False))
        entries = admin_client.get(LIST, {"p": 2}).context["found"].entries
        assert len(entries) == 30
        assert all(entry.count == len(entry.holders) == 1 for entry in entries)


def test_locks_of_all_stores_are_one_list(using: str, admin_client: Client) -> None:
    LockFactory(using=using, key="b", age=10)
    with db_lock("a", backend="other"), db_lock("c", backend="other", label="import"):
        assert keys(admin_client.get(LIST)) == ["a", "b", "c"]
        assert keys(admin_client.get(LIST, {"o": "-age"}))[0] == "b"
        assert keys(admin_client.get(LIST, {"o": "-key"})) == ["c", "b", "a"]
        assert keys(admin_client.get(LIST, {"q": "IMP"})) == ["c"]
        assert keys(admin_client.get(LIST, {"backend": "other"})) == ["a", "c"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            {
                "BACKEND": "distlocks.backends.redis.RedisBackend",
                "OPTIONS": {"url": "redis://127.0.0.1:1/0"},
            },
            "does not answer",
        ),
        ({"BACKEND": "nowhere.Backend"}, "cannot be used"),
    ],
)
def test_a_store_that_is_down_is_told_of_and_delays_nobody(
    using: str, admin_client: Client, entry: dict[str, Any], words: str
) -> None:
    LockFactory(using=using, key="here")
    with override_settings(DISTLOCKS={"default": settings.DISTLOCKS["default"], "down": entry}):
        began = time.monotonic()
        response = admin_client.get(LIST)
        assert time.monotonic() - began < 5
        assert keys(response) == ["here"]
        assert words in text(response)
        (state,) = [store for store in response.context["found"].stores if store.alias == "down"]
        assert state.error


def test_a_part_of_the_page_is_had_for_updates(using: str, admin_client: Client) -> None:
    LockFactory(using=using, key="here")
    response = admin_client.get(LIST, {"_results": "1"})
    assert keys(response) == ["here"]
    assert "<html" not in response.content.decode()
    assert "no-store" in response["Cache-Control"]


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
    SEPARATOR.join(("customer:7", "order:42")),
    SEPARATOR.join(("a/b", "..", "_", ".", "ä ö")),
]


def test_weird_keys_are_listed_and_open_their_page(using: str, admin_client: Client) -> None:
    Lock.objects.using(using).bulk_create(LockFactory.build(key=key) for key in WEIRD)
    response = admin_client.get(LIST)
    assert sorted(keys(response)) == sorted(WEIRD)
    page = response.content.decode()
    assert "<script>alert(1)" not in page
    links = re.findall(r'<th scope="row" class="field-key"><a href="([^"]+)">(.*?)</a>', page)
    assert len(links) == len(WEIRD)
    opened = []
    for link, shown in links:
        # As a browser asks for it.
        path = urljoin("http://host/", html.unescape(link)).removeprefix("http://host")
        detail = admin_client.get(path)
        assert detail.status_code == 200, link
        opened.append(detail.context["name"])
        assert detail.context["holders"], link
        assert html.unescape(shown) == opened[-1].replace(SEPARATOR, " → ")
    assert sorted(opened) == sorted(WEIRD)


def test_weird_holders_are_shown_as_text(using: str, admin_client: Client) -> None:
    evil = "<img src=x onerror=alert(1)>"
    LockFactory(
        using=using, key="a", host=evil, thread=evil, label=evil, metadata={evil: [evil, None]}
    )
    for path in (LIST, f"{LIST}of/default/a/"):
        assert evil not in admin_client.get(path).content.decode()
        assert evil in text(admin_client.get(path))


# Who may


def staff(*permissions: str) -> Client:
    user = User.objects.create_user("somebody", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def test_who_is_not_logged_in_is_asked_to(using: str, client: Client) -> None:
    LockFactory(using=using, key="secret")
    for path in (LIST, f"{LIST}secret/change/", f"{LIST}of/default/secret/", FORCE):
        response = client.get(path)
        assert response.status_code == 302
        assert response["Location"].startswith("/admin/login/")


def test_staff_without_the_permission_see_nothing(using: str) -> None:
    LockFactory(using=using, key="secret")
    client = staff("view_user", "change_user", "add_lock")
    for path in (
        LIST,
        f"{LIST}secret/change/",
        f"{LIST}secret/history/",
        f"{LIST}?q=secret",
        f"{LIST}?_results=1",
        f"{LIST}of/default/secret/",
        FORCE,
    ):
        response = client.get(path)
        assert response.status_code == 403
        assert "secret" not in response.content.decode()
    index = client.get("/admin/").content.decode()
    assert LIST not in index


def test_staff_with_the_permission_may_look(using: str) -> None:
    LockFactory(using=using, key="order:1")
    client = staff("view_lock")
    assert keys(client.get(LIST)) == ["order:1"]
    assert client.get(f"{LIST}of/default/order:1/").status_code == 200
    assert 'name="lock"' not in client.get(LIST).content.decode()
    assert LIST in client.get("/admin/").content.decode()


def test_nobody_may_change_anything(using: str, admin_client: Client) -> None:
    """A changed row would be a lock that two have; a deleted one would take its token along."""
    lock = LockFactory(using=using, key="order:1", owner_id="somebody")
    detail = f"{LIST}order_3A1"

    for client in (admin_client, staff("view_lock", "add_lock", "change_lock", "delete_lock")):
        assert client.get(f"{LIST}add/").status_code == 403
        assert client.post(f"{LIST}add/", {"key": "new"}).status_code == 403
        assert client.post(f"{detail}/change/", {"owner_id": ""}).status_code == 302
        assert client.get(f"{detail}/delete/").status_code == 403
        assert client.post(f"{detail}/delete/", {"post": "yes"}).status_code == 403
        action = {"action": "delete_selected", "_selected_action": ["order:1"], "post": "yes"}
        assert client.post(LIST, action).status_code == 405
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
    one = reverse("admin:distlocks_lock_one", args=["default", f"a/b{SEPARATOR}c d"])
    assert one == f"{LIST}of/default/a_2Fb/c_20d/"
    assert "Distributed locks" in text(admin_client.get("/admin/"))
