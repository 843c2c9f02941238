"""The dashboard in a browser: drawn in every theme, refreshed by itself, used without a mouse."""

import time
from collections.abc import Callable, Iterator

import pytest
from django.contrib.auth.models import User
from django.test import override_settings
from playwright.sync_api import Locator, Page, Route, expect

from distlocks import facts
from distlocks.history.rollups import MINUTE
from tests.browser.conftest import Faults
from tests.happenings import counted, event

Staff = Callable[..., User]
LogIn = Callable[[User], User]
PAGE = "/admin/distlocks/lockrollup/"


BACKENDS: dict[str, dict[str, object]] = {
    "default": {"BACKEND": "distlocks.backends.database.DatabaseBackend"},
    "jobs": {"BACKEND": "distlocks.backends.memory.MemoryBackend"},
}
UNREACHABLE = {
    "BACKEND": "distlocks.backends.redis.RedisBackend",
    "OPTIONS": {"url": "redis://127.0.0.1:1/0"},
}


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    """Two that answer at once."""
    with override_settings(DISTLOCKS=BACKENDS):
        yield


@pytest.fixture
def busy_hour(transactional_db: None) -> None:
    """What is counted of a site in an hour, with a quiet time and a bad one."""
    now = time.time()
    for ago in range(0, 50 * MINUTE, MINUTE):
        if 20 * MINUTE <= ago < 24 * MINUTE:
            continue
        load = 40 + ago // 100 % 7 * 5
        is_bad = 10 * MINUTE <= ago < 14 * MINUTE
        counted(
            at=now - ago,
            acquired=load,
            contended=load // (2 if is_bad else 9),
            timed_out=5 if is_bad else 0,
            lost=1 if ago == 11 * MINUTE else 0,
            waits=(0.002,) * load + (0.4,) * (load // 8) + (4.0,) * (9 if is_bad else 1),
            holds=(0.05,) * load + (1.5,) * (load // 6),
        )
        counted(
            at=now - ago,
            pattern="invoice:*",
            acquired=load // 3,
            contended=load // 20,
            waits=(0.001,) * (load // 3),
            holds=(0.02,) * (load // 3),
        )


def drawn(page: Page) -> None:
    """Waits until the charts are there."""
    expect(page.locator("[data-chart] canvas")).to_have_count(4)


def test_it_looks_right(
    page: Page, staff: Staff, log_in: LogIn, busy_hour: None, looks: Callable[[str], None]
) -> None:
    counted(at=time.time() - 300, errors=3, dropped=1234, expired=2, forced=1)
    log_in(staff("view_lockrollup", "view_lockevent"))
    with override_settings(DISTLOCKS={**BACKENDS, "redis": UNREACHABLE}):
        page.goto(PAGE)
    drawn(page)
    expect(page.get_by_role("row", name="redis")).to_contain_text("Connection refused")
    looks("dashboard")


def test_with_nothing_in_it_it_says_what_to_do(
    page: Page,
    staff: Staff,
    log_in: LogIn,
    axe: Callable[[Page], None],
    shot: Callable[[str], None],
) -> None:
    log_in(staff("view_lockrollup"))
    page.goto(PAGE)
    expect(page.get_by_text("Nothing has been counted yet.")).to_be_visible()
    expect(page.locator("[data-chart] canvas")).to_have_count(0)
    axe(page)
    shot("dashboard-empty")


@pytest.fixture
def opened(page: Page, staff: Staff, log_in: LogIn, transactional_db: None) -> list[str]:
    """The page, with the browser's clock in the test's hands; what it has asked for since."""
    page.clock.install()
    counted(at=time.time() - 120, acquired=7, waits=(0.01,), holds=(0.2,))
    log_in(staff("view_lockrollup", "view_lockevent", "view_lock"))
    page.goto(PAGE)
    drawn(page)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    return asked


def acquired(page: Page) -> Locator:
    return page.locator("[data-counter=acquired] .dl-number")


def minutes_pass(page: Page) -> None:
    page.clock.run_for(3600 * 1000)


def test_it_refreshes_itself_and_leaves_alone_what_is_used(page: Page, opened: list[str]) -> None:
    details = page.locator("#dl-rates-details")
    details.locator("summary").click()
    expect(details.get_by_role("cell", name="7", exact=True)).to_be_visible()
    page.locator("#dl-patterns-table a").first.focus()
    counted(at=time.time() - 300, acquired=1000)
    page.clock.run_for(9_000)
    assert opened == []
    page.clock.run_for(2_000)
    expect(acquired(page)).to_have_text("1,007")
    # In a minute of its own.
    expect(details.get_by_role("cell", name="1,000", exact=True)).to_be_visible()
    # Somebody is about to follow a link there.
    expect(page.locator("#dl-patterns-table a").first).to_be_focused()
    expect(page.locator("#dl-patterns-table")).not_to_contain_text("1,007")
    drawn(page)


def test_tables_that_are_scrolled_are_refreshed_too(page: Page, opened: list[str]) -> None:
    region = page.get_by_role("region", name="Keys most often found taken")
    region.focus()
    counted(at=time.time() - 120, acquired=1000)
    page.clock.run_for(11_000)
    expect(page.locator("#dl-patterns-table")).to_contain_text("1,007")
    expect(region).to_be_focused()


def test_an_answer_that_comes_while_it_is_paused_is_not_shown(
    page: Page, opened: list[str]
) -> None:
    held: list[Route] = []
    page.route(f"**{PAGE}", lambda route: held.append(route))
    counted(at=time.time() - 120, acquired=1)
    with page.expect_request(f"**{PAGE}"):
        page.clock.run_for(11_000)
    with page.expect_event("requestfailed"):
        page.get_by_role("button", name="Pause updates").click()
    page.unroute(f"**{PAGE}")
    expect(acquired(page)).to_have_text("7")
    expect(page.get_by_role("status")).to_have_text("")
    page.get_by_role("button", name="Resume updates").click()
    expect(acquired(page)).to_have_text("8")


def test_it_can_be_paused(page: Page, opened: list[str]) -> None:
    page.get_by_role("button", name="Pause updates").focus()
    page.keyboard.press("Enter")
    go_on = page.get_by_role("button", name="Resume updates")
    expect(go_on).to_have_attribute("aria-pressed", "true")
    counted(at=time.time() - 120, acquired=1)
    minutes_pass(page)
    assert opened == []
    # And stays so where one goes from here.
    page.reload()
    expect(go_on).to_be_visible()
    page.goto("/admin/distlocks/lock/")
    expect(go_on).to_be_visible()
    page.goto(PAGE)
    counted(at=time.time() - 120, acquired=1)
    go_on.click()
    expect(acquired(page)).to_have_text("9")


HIDDEN = """hidden => {
  Object.defineProperty(document, "hidden", {get: () => hidden, configurable: true});
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_while_nobody_looks_it_asks_for_nothing(page: Page, opened: list[str]) -> None:
    page.evaluate(HIDDEN, True)
    counted(at=time.time() - 120, acquired=1)
    minutes_pass(page)
    assert opened == []
    page.evaluate(HIDDEN, False)
    expect(acquired(page)).to_have_text("8")


def test_while_the_site_is_down_it_asks_less_and_less_often(
    page: Page, opened: list[str], faults: Faults
) -> None:
    faults.expect("ERR_FAILED")
    page.route("**/*", lambda route: route.abort())
    status = page.get_by_role("status")
    for seconds in (20, 40, 80, 160, 300, 300):
        # Or the words of the last time would be taken for those of this one.
        status.evaluate("one => { one.textContent = ''; }")
        page.clock.run_for(min(seconds / 2, 160) * 1000 if seconds < 300 else 300_000)
        expect(status).to_have_text(f"Cannot be updated now. Tried again in {seconds} s.")
    expect(acquired(page)).to_have_text("7")
    page.unroute("**/*")
    counted(at=time.time() - 120, acquired=1)
    # At once, or the answer would be given up in between: that is the same clock's.
    page.clock.fast_forward(300_000)
    expect(acquired(page)).to_have_text("8")
    expect(status).to_have_text("")


def test_who_is_logged_out_meanwhile_is_told(page: Page, opened: list[str]) -> None:
    page.context.clear_cookies()
    page.clock.run_for(11_000)
    expect(page.get_by_role("status")).to_contain_text("reload the page to log in again")
    asked = len(opened)
    minutes_pass(page)
    assert len(opened) == asked


def test_charts_take_the_colours_of_the_theme(
    page: Page, opened: list[str], theme: Callable[..., None]
) -> None:
    plot = page.locator("[data-chart=rates]")
    expect(plot).to_have_attribute("data-drawn", "#666")
    theme("dark")
    expect(plot).to_have_attribute("data-drawn", "#d0d0d0")
    theme("light", chosen=True)
    expect(plot).to_have_attribute("data-drawn", "#666")


def test_charts_are_as_wide_as_there_is_room(
    page: Page, opened: list[str], width: Callable[[str], None]
) -> None:
    plot = page.locator("[data-chart=rates] .uplot")
    wide = plot.bounding_box()
    width("narrow")
    page.wait_for_function(
        "() => document.querySelector('[data-chart=rates] canvas').clientWidth < 380"
    )
    assert wide is not None
    assert wide["width"] > 400


def test_links_keep_what_is_asked_for_and_numbers_lead_to_their_rows(
    page: Page, opened: list[str]
) -> None:
    counted(at=time.time() - 120, pattern="stock:*", contended=2)
    event(facts.CONTENDED, key="stock:7", ago=120)
    event(facts.CONTENDED, key="order:7", ago=120)
    event(facts.LOST, key="stock:8", ago=120)
    page.get_by_label("Backend", exact=True).select_option("default")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("link", name="6 hours").click()
    page.get_by_role("link", name="stock:*").click()
    expect(page.get_by_role("link", name="6 hours")).to_have_attribute("aria-current", "true")
    expect(page.get_by_label("Backend", exact=True)).to_have_value("default")
    expect(page.get_by_label("Keys like", exact=True)).to_have_value("stock:*")
    page.locator("#dl-numbers").get_by_role("link", name="2", exact=True).click()
    expect(page.locator(".dl-events tbody")).to_have_count(1)
    expect(page.locator(".dl-events")).to_contain_text("stock:7")
