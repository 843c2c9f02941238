"""The admin: which store grants the locks of a fast path, to be looked at only."""

import html
import re
from collections.abc import Iterator

import pytest
from django.conf import settings
from django.contrib.admin.utils import quote
from django.http import HttpResponse
from django.test import Client, override_settings

from distlocks.models import LockAuthority
from tests.factories import now_us

pytestmark = pytest.mark.django_db

AUTHORITIES = "/admin/distlocks/lockauthority/"


def text(response: HttpResponse) -> str:
    """What a reader of the page reads."""
    return html.unescape(re.sub(r"<[^>]*>", " ", response.content.decode()))


@pytest.fixture
def authority() -> Iterator[LockAuthority]:
    """Of a fast path that the database has taken over."""
    redis = {
        "BACKEND": "distlocks.backends.redis.RedisBackend",
        # Nobody is asked there: the page reads the row.
        "OPTIONS": {"url": "redis://127.0.0.1:1/0"},
    }
    fast = {
        "BACKEND": "distlocks.backends.fastpath.FastPathBackend",
        "OPTIONS": {"redis": "redis", "database": "default"},
    }
    database = settings.DISTLOCKS["default"]
    with override_settings(DISTLOCKS={"default": database, "redis": redis, "fast": fast}):
        yield _row()


def _row() -> LockAuthority:
    return LockAuthority.objects.create(
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


def test_an_alias_that_cannot_be_built_is_passed_over(
    authority: LockAuthority, admin_client: Client
) -> None:
    wrong = {"BACKEND": "no.Where"}
    with override_settings(DISTLOCKS={"wrong": wrong, **settings.DISTLOCKS}):
        assert "distlocks.fast" in text(admin_client.get(AUTHORITIES))
    with override_settings(DISTLOCKS={"wrong": wrong}):
        assert admin_client.get(AUTHORITIES).status_code == 200


def test_who_grants_is_not_changed_there(authority: LockAuthority, admin_client: Client) -> None:
    page = f"{AUTHORITIES}{quote(authority.pk)}/"
    assert admin_client.get(f"{AUTHORITIES}add/").status_code == 403
    assert admin_client.post(f"{page}change/", {"phase": "redis"}).status_code == 403
    assert admin_client.post(f"{page}delete/", {"post": "yes"}).status_code == 403
    authority.refresh_from_db()
    assert authority.phase == "db"
