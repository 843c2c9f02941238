"""The browser of the tests: it reaches the site, and tells what goes wrong there."""

from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Page, expect

from tests.browser.conftest import Faults, Hold

Staff = Callable[..., User]
LogIn = Callable[[User], User]


def test_the_admin_is_there_with_its_styles(
    page: Page, staff: Staff, log_in: LogIn, looks: Callable[[str], None]
) -> None:
    log_in(staff("view_lock"))
    page.goto("/admin/")
    expect(page.get_by_role("link", name="Locks", exact=True)).to_be_visible()
    expect(page.locator("#header")).to_have_css("background-color", "rgb(65, 118, 144)")
    looks("index")


def test_without_a_login_there_is_the_form(page: Page) -> None:
    page.goto("/admin/distlocks/lock/")
    expect(page.get_by_label("Username:")).to_be_visible()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("document.body.insertAdjacentHTML('beforeend', '<p style=\"color:red\">x')", "inline"),
        ("setTimeout(() => { throw new Error('broken script') })", "broken script"),
        ("fetch('/nowhere/').then(() => undefined)", "404"),
    ],
)
def test_what_goes_wrong_in_a_page_is_told(
    page: Page, faults: Faults, script: str, told: str
) -> None:
    page.goto("/admin/login/")
    faults.check()
    page.evaluate(script)
    while not faults.found:
        # Lets the browser tell.
        page.evaluate("true")
    with pytest.raises(AssertionError, match=told):
        faults.check()
    faults.expect(told)


def test_a_lock_is_held_beside_the_page(hold: Hold) -> None:
    lease = hold("order:42", label="nightly")
    assert not lease.lost
