"""The list of live locks, in a browser: it keeps itself up to date, and can be used by all."""

import re
from collections.abc import Callable

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import override_settings
from playwright.sync_api import Locator, Page, expect

from distlocks.live import snapshots
from distlocks.models import Lock
from tests.browser.conftest import Faults, Hold
from tests.browser.scene import DOWN, many_kinds
from tests.factories import SECOND, LockFactory, now_us

LIST = "/admin/distlocks/lock/"
Staff = Callable[..., User]
LogIn = Callable[[User], User]
Looks = Callable[[str], None]
pytestmark = pytest.mark.usefixtures("two_stores")


@pytest.fixture
def viewer(staff: Staff, log_in: LogIn) -> User:
    return log_in(staff("view_lock"))


@pytest.fixture
def updates(page: Page) -> list[str]:
    """The updates that the page has asked for. Time passes as the test says: page.clock."""
    page.clock.install()
    asked: list[str] = []
    page.on("request", lambda one: "_results=1" in one.url and asked.append(one.url))
    return asked


def link(page: Page, key: str) -> Locator:
    return page.get_by_role("link", name=key, exact=True)


def test_all_states_are_readable(page: Page, staff: Staff, log_in: LogIn, looks: Looks) -> None:
    log_in(staff("view_lock", "force_release_lock"))
    many_kinds()
    page.goto(LIST)
    expect(page.get_by_role("link", name="customer:7 → order:42")).to_be_visible()
    looks("live")


def test_there_is_help_where_there_is_nothing(page: Page, viewer: User, looks: Looks) -> None:
    page.goto(LIST)
    expect(page.get_by_text("No lock is held now.")).to_be_visible()
    looks("live-empty")
    page.get_by_label("Find locks").fill("nothing")
    page.keyboard.press("Enter")
    expect(page.get_by_text("No lock that is held now matches.")).to_be_visible()
    page.get_by_role("link", name="Clear all filters").last.click()
    expect(page.get_by_text("No lock is held now.")).to_be_visible()


def test_a_store_that_is_down_is_told_of(page: Page, viewer: User, looks: Looks) -> None:
    LockFactory(key="order:42")
    with override_settings(DISTLOCKS=settings.DISTLOCKS | {"down": DOWN}):
        page.goto(LIST)
        expect(link(page, "order:42")).to_be_visible()
        expect(page.get_by_text("does not answer", exact=True)).to_be_visible()
        expect(page.get_by_text("it grants none until it answers")).to_be_visible()
        looks("live-down")


# Updates


def test_a_lock_appears_and_goes(
    page: Page, viewer: User, updates: list[str], hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "FRESH", 0.0)
    page.goto(LIST)
    expect(page.get_by_text("No lock is held now.")).to_be_visible()
    lease = hold("order:42", backend="memory", label="nightly")
    hold("stock:7")
    page.clock.run_for(3_000)
    expect(link(page, "order:42")).to_be_visible()
    expect(link(page, "stock:7")).to_be_visible()
    lease.release()
    page.clock.run_for(3_000)
    expect(link(page, "order:42")).to_have_count(0)
    expect(link(page, "stock:7")).to_be_visible()


def test_durations_count_between_updates(page: Page, viewer: User, updates: list[str]) -> None:
    LockFactory(key="order:42", age=3595, expires_at=now_us() + 600 * SECOND)
    page.goto(LIST)
    row = page.get_by_role("row", name="order:42")
    age, left = row.locator("[data-age]"), row.locator("[data-left]")
    page.get_by_role("button", name="Pause updates").click()
    expect(left).to_have_text(re.compile("9 min .* s"))
    page.clock.run_for(60_000)
    expect(age).to_have_text(re.compile("1 h [01] min"))
    expect(left).to_have_text(re.compile("8 min .* s"))
    page.clock.run_for(600_000)
    expect(left).to_have_text("0 s")


def test_what_the_reader_does_outlives_an_update(
    page: Page, staff: Staff, log_in: LogIn, updates: list[str], width: Callable[[str], None]
) -> None:
    log_in(staff("view_lock", "force_release_lock"))
    for number in range(40):
        LockFactory(key=f"order:{number:02d}", age=100 + number)
    page.goto(f"{LIST}?o=-age")
    chosen = page.get_by_role("checkbox", name="Select order:20")
    chosen.check()
    focused = link(page, "order:19")
    focused.focus()
    focused.scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    assert before > 0
    # Behind and between those that are there, one of which goes.
    LockFactory(key="new", age=10)
    LockFactory(key="newer", age=105)
    Lock.objects.filter(key="order:21").update(expires_at=0)
    page.clock.run_for(3_000)
    expect(link(page, "newer")).to_have_count(1)
    expect(link(page, "order:21")).to_have_count(0)
    expect(chosen).to_be_checked()
    expect(focused).to_be_focused()
    expect(page.get_by_text("1 of 41 selected")).to_be_visible()
    assert abs(page.evaluate("scrollY") - before) < 100


def test_updates_can_be_paused(page: Page, viewer: User, updates: list[str]) -> None:
    page.goto(LIST)
    page.get_by_role("button", name="Pause updates").click()
    resume = page.get_by_role("button", name="Resume updates")
    expect(resume).to_have_attribute("aria-pressed", "true")
    LockFactory(key="order:42")
    page.clock.run_for(60_000)
    assert not updates
    # Also on the next page.
    page.reload()
    page.clock.run_for(60_000)
    assert not updates
    LockFactory(key="order:43")
    resume.click()
    expect(link(page, "order:43")).to_be_visible()


def test_a_hidden_tab_asks_for_nothing(page: Page, viewer: User, updates: list[str]) -> None:
    page.goto(LIST)

    def hide(hidden: bool) -> None:
        page.evaluate(
            "hidden => { Object.defineProperty(document, 'hidden', "
            "{value: hidden, configurable: true}); "
            "document.dispatchEvent(new Event('visibilitychange')); }",
            hidden,
        )

    hide(True)
    LockFactory(key="order:42")
    page.clock.run_for(60_000)
    assert not updates
    hide(False)
    expect(link(page, "order:42")).to_be_visible()


def test_errors_make_updates_rarer(
    page: Page, viewer: User, updates: list[str], faults: Faults
) -> None:
    page.goto(LIST)
    faults.expect("500|ERR_FAILED")
    page.route("**/*_results=1*", lambda route: route.fulfill(status=500, body="broken"))
    status = page.get_by_role("status")
    for seconds, following in ((3, 6), (6, 12), (12, 24)):
        page.clock.run_for(seconds * 1_000)
        expect(status).to_have_text(f"Cannot be updated now. Tried again in {following} s.")
    assert len(updates) == 3
    page.unroute("**/*_results=1*")
    LockFactory(key="order:42")
    page.clock.run_for(24_000)
    expect(link(page, "order:42")).to_be_visible()
    expect(status).to_be_empty()


def test_who_is_logged_out_is_told(page: Page, viewer: User, updates: list[str]) -> None:
    page.goto(LIST)
    page.context.clear_cookies()
    page.clock.run_for(3_000)
    expect(page.get_by_role("status")).to_contain_text("reload the page to log in again")
    page.clock.run_for(600_000)
    assert len([url for url in updates if "/login/" not in url]) == 1


# Finding

NAME_OF_FOCUSED = (
    "(one => one.ariaLabel || one.textContent.trim() || one.value)(document.activeElement)"
)


def test_they_are_found_filtered_and_sorted(page: Page, viewer: User) -> None:
    many_kinds()
    page.goto(LIST)
    page.get_by_label("Find locks").fill("order")
    page.get_by_role("button", name="Search").click()
    rows = page.locator("#result_list tbody tr")
    expect(rows).to_have_count(2)
    page.get_by_role("link", name="Somebody waits").click()
    expect(rows).to_have_count(1)
    expect(page.get_by_label("Find locks")).to_have_value("order")
    page.get_by_role("link", name="Clear all filters").click()
    page.get_by_role("columnheader").get_by_role("link", name="For").click()
    expect(rows).to_have_count(9)
    expect(rows.first).to_contain_text("nightly-report")
    header = page.get_by_role("columnheader", name="For")
    expect(header).to_have_attribute("aria-sort", "descending")
    header.get_by_role("link").click()
    expect(rows.first).to_contain_text("file:")
    page.get_by_role("link", name="cooling down").click()
    expect(rows).to_have_count(1)


def test_all_can_be_done_with_the_keyboard(page: Page, staff: Staff, log_in: LogIn) -> None:
    log_in(staff("view_lock", "force_release_lock"))
    LockFactory(key="order:42")
    LockFactory(key="order:43")
    page.goto(LIST)
    page.get_by_label("Find locks").focus()
    page.keyboard.type("order:42")
    page.keyboard.press("Enter")
    expect(page.locator("#result_list tbody tr")).to_have_count(1)
    page.get_by_label("Find locks").focus()
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(NAME_OF_FOCUSED))
        if reached[-1] == "Select order:42":
            break
    assert reached[-1] == "Select order:42", reached
    assert "Pause updates" in reached
    page.keyboard.press("Space")
    page.get_by_role("button", name="Force-release selected…").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Reason:")).to_be_visible()


# Who may


def test_without_the_permission_there_is_nothing(
    page: Page, staff: Staff, log_in: LogIn, faults: Faults
) -> None:
    LockFactory(key="secret")
    page.goto(LIST)
    expect(page.get_by_label("Username:")).to_be_visible()
    log_in(staff("view_user"))
    faults.expect("403")
    for path in (LIST, f"{LIST}of/default/secret/"):
        response = page.goto(path)
        assert response is not None
        assert response.status == 403
        assert "secret" not in page.content()


def test_who_may_only_look_can_select_nothing(page: Page, viewer: User) -> None:
    LockFactory(key="order:42")
    page.goto(LIST)
    expect(link(page, "order:42")).to_be_visible()
    expect(page.get_by_role("checkbox")).to_have_count(0)
    expect(page.get_by_role("button", name=re.compile("Force-release"))).to_have_count(0)


def test_the_theme_may_be_chosen(page: Page, viewer: User, theme: Callable[..., None]) -> None:
    LockFactory(key="order:42")
    page.goto(LIST)
    strip = page.locator(".dl-stores li").first
    expect(strip).to_have_css("background-color", "rgb(248, 248, 248)")
    theme("dark", chosen=True)
    expect(strip).to_have_css("background-color", "rgb(33, 33, 33)")
    theme("light", chosen=True)
    expect(strip).to_have_css("background-color", "rgb(248, 248, 248)")
