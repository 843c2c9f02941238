"""The page of one lock, in a browser."""

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import override_settings
from django.urls import reverse
from django.utils import timezone
from playwright.sync_api import Page, expect

from distlocks.live import snapshots
from distlocks.models import LockEvent, LockRollup
from tests.browser.conftest import Faults, Hold
from tests.browser.scene import DOWN, waits_for
from tests.factories import SECOND, LockFactory, now_us

Staff = Callable[..., User]
LogIn = Callable[[User], User]
Looks = Callable[[str], None]
pytestmark = pytest.mark.usefixtures("two_stores")


def url(key: str, alias: str = "default") -> str:
    return reverse("admin:distlocks_lock_one", args=[alias, key])


def held_for(seconds_bucket: str, count: int, pattern: str) -> None:
    """So many holds that were counted lately."""
    LockRollup.objects.create(
        backend="default",
        began=now_us() // SECOND // 3600 * 3600,
        span=3600,
        pattern=pattern,
        **{seconds_bucket: count},
    )


def story() -> None:
    """A lock that two wait for, one of them in a circle, and that has a history."""
    metadata = {"user": "olga", "request_id": "7f3a90c2", "path": "/orders/42/", "items": 3}
    held = LockFactory(key="order:42", label="checkout", metadata=metadata, age=12)
    stock = LockFactory(key="stock:7", label="restock", host="worker-2", age=10)
    held_for("hold_13", 10, "order:*")
    waits_for(
        "order:42",
        "restock",
        label="restock",
        blockers=[held.owner_id],
        holds=[{"owner_id": stock.owner_id, "backend": "default", "keys": ["stock:7"]}],
        holding=1,
    )
    waits_for("order:42", "patient", deadline=None, since=now_us() - 2 * SECOND)
    waits_for(
        "stock:7",
        "checkout",
        host="web-1",
        label="checkout",
        blockers=[stock.owner_id],
        holds=[{"owner_id": held.owner_id, "backend": "default", "keys": ["order:42"]}],
        holding=1,
    )
    kinds = [("timed_out", "worker-3"), ("lost", "web-1"), ("forced", "web-2")]
    for hours, (kind, host) in enumerate(kinds, 1):
        LockEvent.objects.create(
            at=timezone.now() - timedelta(hours=hours),
            kind=kind,
            backend="default",
            key="order:42",
            pattern="order:*",
            host=host,
            pid=77,
            thread="MainThread",
            waited=10.0 if kind == "timed_out" else None,
            held=31.4 if kind == "lost" else None,
            reason="the process hung" if kind == "forced" else "",
            other={"label": "olga"} if kind == "forced" else {},
        )


def test_it_tells_all_that_is_known(page: Page, staff: Staff, log_in: LogIn, looks: Looks) -> None:
    log_in(staff("view_lock", "view_lockevent", "force_release_lock"))
    story()
    page.goto(url("order:42"))
    expect(page.get_by_role("heading", name="order:42")).to_be_visible()
    expect(page.get_by_text("7f3a90c2").first).to_be_visible()
    places = page.get_by_role("region", name="Waiting").get_by_role("row")
    expect(places).to_have_count(3)
    expect(places.nth(1)).to_contain_text("restock")
    # Half of all take less than 20 s; of those that take 12 s, half do less than 21 s.
    expect(places.nth(1)).to_contain_text(re.compile(r"in about \d+ s"))
    expect(places.nth(2)).to_contain_text("never")
    expect(page.get_by_role("heading", name="Waiting for each other")).to_be_visible()
    expect(page.get_by_text("force-released")).to_be_visible()
    expect(page.get_by_text("An efficiency lock")).to_be_visible()
    looks("one")


def test_a_free_key_is_a_page_too(page: Page, staff: Staff, log_in: LogIn, looks: Looks) -> None:
    log_in(staff("view_lock", "view_lockevent"))
    page.goto(url("nobody"))
    expect(page.get_by_text("Nobody has this lock now.")).to_be_visible()
    expect(page.get_by_text("Nothing out of the ordinary happened to it.")).to_be_visible()
    expect(page.get_by_role("button", name="Force-release…")).to_have_count(0)
    looks("one-free")


def test_a_backend_that_is_not_there(
    page: Page, staff: Staff, log_in: LogIn, faults: Faults
) -> None:
    log_in(staff("view_lock"))
    faults.expect("404")
    page.goto(url("order:42", "nowhere"))
    expect(page.get_by_text("There is no lock backend “nowhere”.")).to_be_visible()
    page.get_by_role("link", name="memory").click()
    expect(page.get_by_text("Nobody has this lock now.")).to_be_visible()


def test_a_backend_that_is_down(page: Page, staff: Staff, log_in: LogIn, looks: Looks) -> None:
    log_in(staff("view_lock"))
    with override_settings(DISTLOCKS=settings.DISTLOCKS | {"down": DOWN}):
        page.goto(url("order:42", "down"))
        expect(page.get_by_text("The backend down does not answer")).to_be_visible()
        looks("one-down")


def test_it_follows_what_happens(
    page: Page, staff: Staff, log_in: LogIn, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(staff("view_lock"))
    monkeypatch.setattr(snapshots, "FRESH", 0.0)
    page.clock.install()
    key = ("customer:ä/1", "order 4_2")
    page.goto(url("\x1f".join(key), "memory"))
    expect(page.get_by_role("heading", name="customer:ä/1 → order 4_2")).to_be_visible()
    expect(page.get_by_text("Nobody has this lock now.")).to_be_visible()
    hold(key, label="nightly", backend="memory")
    page.clock.run_for(3_000)
    expect(page.get_by_text("nightly")).to_be_visible()
    # The root keeps out who wants all of it, and leads here.
    page.get_by_role("link", name="customer:ä/1", exact=True).click()
    expect(page.get_by_text("held further down")).to_be_visible()
    page.get_by_role("link", name="customer:ä/1 → order 4_2").click()
    expect(page.get_by_text("nightly")).to_be_visible()
