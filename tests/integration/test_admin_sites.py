"""The admin's pages in a second site: its links stay there."""

import re
from typing import Any

import pytest
from django.conf import settings
from django.contrib import admin
from django.contrib.admin import AdminSite
from django.test import Client, override_settings
from django.urls import path

from distlocks import facts
from distlocks.admin.dashboard import LockRollupAdmin
from distlocks.admin.history import LockEventAdmin
from distlocks.admin.locks import LockAdmin
from distlocks.models import Lock, LockEvent, LockRollup
from tests.factories import LockFactory
from tests.happenings import event

pytestmark = pytest.mark.django_db

ops = AdminSite(name="ops")
ops.register(Lock, LockAdmin)
ops.register(LockEvent, LockEventAdmin)
ops.register(LockRollup, LockRollupAdmin)
# One that has only the history.
audit = AdminSite(name="audit")
audit.register(LockEvent, LockEventAdmin)

urlpatterns = [
    path("admin/", admin.site.urls),
    path("ops/", ops.urls),
    path("audit/", audit.urls),
]


@pytest.fixture
def client(admin_client: Client) -> Any:
    with override_settings(
        ROOT_URLCONF=__name__, DISTLOCKS={"default": settings.DISTLOCKS["default"]}
    ):
        LockFactory(key="a")
        event(facts.LOST, key="a", ago=60, backend="default")
        yield admin_client


@pytest.mark.parametrize("page", ["lock/", "lock/of/default/a/", "lockrollup/", "lockevent/"])
def test_links_stay_in_their_site(client: Client, page: str) -> None:
    answer = client.get(f"/ops/distlocks/{page}")
    links = re.findall(r'(?:href|action)="(/[^"]*)"', answer.content.decode())
    ours = [link for link in links if "/distlocks/" in link and not link.startswith("/static/")]
    assert ours
    assert all(link.startswith("/ops/") for link in ours)


@pytest.mark.parametrize(
    ("page", "there"),
    [
        ("lock/force-release/", "lock/"),
        ("lock/default/a/change/", "lock/of/default/a/"),
        ("lock/nowhere/a/change/", "lock/"),
    ],
)
def test_so_do_redirects(client: Client, page: str, there: str) -> None:
    assert client.get(f"/ops/distlocks/{page}").headers["Location"] == f"/ops/distlocks/{there}"


def test_what_a_site_has_not_is_no_link(client: Client) -> None:
    answer = client.get("/audit/distlocks/lockevent/")
    assert answer.status_code == 200
    assert [row["lock"] for row in answer.context["rows"]] == [""]
