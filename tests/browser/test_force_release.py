"""Force-release, in a browser: from the click to the holder that learns of it."""

import threading
from collections.abc import Callable

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from playwright.sync_api import Page, expect

from distlocks import LeaseLost, db_lock
from distlocks.models import Lock
from tests.browser.scene import many_kinds
from tests.factories import LockFactory, now_us
from tests.servers.children import Spawner
from tests.waiting import eventually

LIST = "/admin/distlocks/lock/"
Staff = Callable[..., User]
LogIn = Callable[[User], User]
Looks = Callable[[str], None]
pytestmark = pytest.mark.usefixtures("two_stores")


@pytest.fixture
def operator(staff: Staff, log_in: LogIn) -> User:
    return log_in(staff("view_lock", "force_release_lock"))


def check(page: Page, key: str) -> None:
    page.get_by_role("checkbox", name=f"Select {key}", exact=True).check()


def test_what_will_happen_is_said_first(page: Page, operator: User, looks: Looks) -> None:
    many_kinds()
    page.goto(LIST)
    button = page.get_by_role("button", name="Force-release selected…")
    expect(button).to_be_disabled()
    for key in ("catalogue", "customer:7", "order:42"):
        check(page, key)
    expect(page.get_by_text("3 of 9 selected")).to_be_visible()
    button.click()
    expect(page.get_by_text("within a third of its ttl: at most 10 s")).to_be_visible()
    looks("force")
    page.get_by_role("button", name="Yes, force-release").click()
    expect(page.get_by_text("This field is required.")).to_be_visible()
    assert Lock.objects.get(key="order:42").owner_id
    page.get_by_role("link", name="No, take me back").click()
    expect(page.get_by_role("link", name="order:42", exact=True)).to_be_visible()


def test_from_the_click_to_the_holder_in_another_process(
    page: Page, operator: User, spawn: Spawner, key: str
) -> None:
    holder = spawn(
        """
        from distlocks import db_lock, LeaseLost
        from tests.waiting import eventually

        lease = db_lock(args[0], ttl=1, label="hanging import").acquire()
        print("held", flush=True)
        eventually(lambda: lease.lost)
        try:
            with lease.atomic():
                result = "wrote"
        except LeaseLost:
            result = "LeaseLost"
        """,
        key,
    )
    holder.expect("held")
    page.goto(f"{LIST}?q={key}")
    expect(page.get_by_text("hanging import")).to_be_visible()
    check(page, key)
    page.get_by_role("button", name="Force-release selected…").click()
    page.get_by_label("Reason:").fill("it hangs")
    page.get_by_role("button", name="Yes, force-release").click()
    expect(page.get_by_text(f"Freed 1 lock: {key}.")).to_be_visible()
    expect(page.get_by_text("Nobody has this lock now.")).to_be_visible()
    assert holder.result() == "LeaseLost"
    entry = LogEntry.objects.get()
    assert entry.user == operator
    assert "it hangs" in entry.change_message
    assert "hanging import" in entry.change_message
    # The log leads back to the lock.
    page.goto("/admin/")
    page.get_by_role("link", name=key).click()
    expect(page.get_by_role("heading", name=key)).to_be_visible()


def test_from_the_click_to_the_holder_in_another_thread(page: Page, operator: User) -> None:
    found: list[BaseException] = []
    freed, held = threading.Event(), threading.Event()

    def work() -> None:
        try:
            with db_lock("order:42", backend="memory", ttl=1) as lease:
                held.set()
                eventually(lambda: lease.lost)
                freed.set()
        except LeaseLost as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert held.wait(10)
    page.goto(f"{LIST}of/memory/order:42/")
    page.get_by_role("button", name="Force-release…").click()
    page.get_by_label("Reason:").fill("it hangs")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Freed 1 lock: order:42.")).to_be_visible()
    assert freed.wait(10)
    thread.join(10)
    assert [type(error) for error in found] == [LeaseLost]


def test_who_asked_is_asked_again_when_it_changed_hands(page: Page, operator: User) -> None:
    LockFactory(key="order:42", label="the first")
    LockFactory(key="order:43")
    page.goto(LIST)
    check(page, "order:42")
    check(page, "order:43")
    page.get_by_role("button", name="Force-release selected…").click()
    expect(page.get_by_text("the first")).to_be_visible()
    Lock.objects.filter(key="order:42").update(
        label="the second", owner_id="b", fencing_token=now_us()
    )
    page.get_by_label("Reason:").fill("it hangs")
    yes = page.get_by_role("button", name="Yes, force-release")
    yes.click()
    expect(page.get_by_text("nothing has been freed. See who has it now")).to_be_visible()
    expect(page.get_by_text("the second")).to_be_visible()
    assert Lock.objects.held().count() == 2
    # What was typed is still there.
    expect(page.get_by_label("Reason:")).to_have_value("it hangs")
    yes.click()
    expect(page.get_by_text("Freed 2 locks: order:42, order:43.")).to_be_visible()
    expect(page.get_by_text("No lock is held now.")).to_be_visible()
    assert LogEntry.objects.count() == 2
