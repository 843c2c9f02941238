"""The history in a browser: searched, paged, opened and saved."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Locator, Page, expect

from distlocks import facts
from distlocks.keys import SEPARATOR
from tests.happenings import event

Staff = Callable[..., User]
LogIn = Callable[[User], User]
PAGE = "/admin/distlocks/lockevent/"


@pytest.fixture
def happened(transactional_db: None) -> None:
    """One of everything."""
    other = {
        **{"host": "web-2", "pid": 99, "thread": "worker-1", "label": "nightly"},
        **{"owner_id": "owner-2", "metadata": {"request": "af32"}},
    }
    for number, kind in enumerate(facts.KINDS):
        event(
            kind,
            ago=30 + number * 70,
            key="" if kind == facts.AUTHORITY else f"order:{number}",
            label="checkout" if number % 2 else "",
            other=other if kind in (facts.TIMED_OUT, facts.CONTENDED, facts.TAKEN_OVER) else {},
            waited=10.0 if kind == facts.TIMED_OUT else None,
            held=0.31 if kind in (facts.LOST, facts.EXPIRED) else None,
            fencing_token=1_790_000_000_000_000 + number,
            metadata={"run": number, "path": "/orders/7"},
            reason="redis does not answer: Error 111 connecting to 127.0.0.1:6379. Refused."
            if kind == facts.ERROR
            else "",
        )
    event(facts.ACQUIRED, ago=2000, key=f"customer:7{SEPARATOR}order:42", waited=0.0123)
    event(facts.LOST, ago=2100, key="x" * 180 + ":1")


def test_it_looks_right(
    page: Page, staff: Staff, log_in: LogIn, happened: None, looks: Callable[[str], None]
) -> None:
    log_in(staff("view_lockevent", "view_lockrollup"))
    page.goto(PAGE)
    expect(page.locator(".dl-events tbody")).to_have_count(13)
    page.locator("summary").nth(2).click()
    looks("history")


@pytest.fixture
def opened(page: Page, staff: Staff, log_in: LogIn, transactional_db: None) -> Page:
    for number in range(120):
        event(facts.CONTENDED, ago=60 + number, key=f"order:{number}")
    event(facts.LOST, ago=400, key="stock:1", reason="=HYPERLINK(1)", metadata={"run": 7})
    log_in(staff("view_lockevent"))
    page.goto(PAGE)
    return page


def rows(page: Page) -> Locator:
    return page.locator(".dl-events tbody")


def test_one_turns_pages_without_a_mouse(opened: Page) -> None:
    expect(rows(opened)).to_have_count(50)
    expect(rows(opened).first).to_contain_text("order:0")
    for first, count in (("order:50", 50), ("order:100", 21)):
        opened.get_by_role("link", name="Older").press("Enter")
        expect(rows(opened).first).to_contain_text(first)
        expect(rows(opened)).to_have_count(count)
    expect(opened.get_by_role("link", name="Older")).to_have_count(0)
    opened.get_by_role("link", name="Newer").press("Enter")
    expect(rows(opened).first).to_contain_text("order:50")
    opened.get_by_role("link", name="Newest").press("Enter")
    expect(rows(opened).first).to_contain_text("order:0")


def test_what_is_looked_for_is_found_and_can_be_opened(opened: Page) -> None:
    opened.get_by_label("Key", exact=True).fill("stock:*")
    opened.get_by_label("Key", exact=True).press("Enter")
    expect(rows(opened)).to_have_count(1)
    opened.get_by_label("What").select_option("contended")
    opened.get_by_role("button", name="Show").click()
    expect(opened.get_by_text("No event of this time matches the filters.")).to_be_visible()
    opened.get_by_role("link", name="Clear filters").first.click()
    expect(rows(opened)).to_have_count(50)
    opened.get_by_label("What").select_option("lost")
    opened.get_by_role("button", name="Show").click()
    summary = rows(opened).locator("summary")
    expect(opened.get_by_text("owner-1")).to_be_hidden()
    summary.press("Enter")
    expect(opened.get_by_text("owner-1")).to_be_visible()
    expect(opened.get_by_role("definition").filter(has_text="7").last).to_be_visible()


def test_what_is_looked_for_is_saved(opened: Page, tmp_path: Path) -> None:
    opened.goto(f"{PAGE}?kind=lost")
    found = {}
    for extension in ("CSV", "JSON"):
        with opened.expect_download() as download:
            opened.get_by_role("link", name=extension).click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        found[path.suffix] = path
    with found[".csv"].open(encoding="utf-8-sig", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["key"], row["kind"], row["reason"]) == ("stock:1", "lost", "'=HYPERLINK(1)")
    saved = json.loads(found[".json"].read_text())
    assert saved["complete"]
    assert [one["metadata"] for one in saved["events"]] == [{"run": 7}]
