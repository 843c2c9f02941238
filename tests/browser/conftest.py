"""A browser beside a site of the test's own settings: `page`, and what tests do with it.

The site's threads are this process's, so a test's settings, backends and locks are the site's too.
A test fails when its pages have written an error to the console, raised one, or met the
content-security policy; what it has provoked on purpose, it says by `faults.expect()`.
"""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import Client, modify_settings, override_settings
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright
from pytest_django.live_server_helper import LiveServer

from distlocks import Lease, db_lock
from tests.servers import finding
from tests.servers.chromium import Chromium

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
# Where screenshots go; none are made without it.
SHOTS_VARIABLE = "DISTLOCKS_SCREENSHOTS"
# A page of ours is there at once, or something is wrong.
PATIENCE_MS = 10_000


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """The browser, for as long as tests of this folder run one after the other.

    Not longer: Playwright keeps an event loop running, beside which no other can.
    """
    program = finding.find([Chromium])[Chromium]
    with pytest.MonkeyPatch.context() as patch, sync_playwright() as playwright:
        # That loop is not one that tests would keep waiting.
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def site(django_db_setup: None) -> Iterator[str]:
    """The address of the site, which has the strict policy."""
    with modify_settings(ALLOWED_HOSTS={"append": "localhost"}):
        server = LiveServer("localhost")
        yield server.url
        server.stop()


class Faults:
    """What has gone wrong in the test's pages."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._expected: list[str] = []

    def expect(self, pattern: str) -> None:
        """Let pass what matches, which must come."""
        self._expected.append(pattern)

    def watch(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.found.append(f"{page.url}: {error}"))

    def _console(self, message: ConsoleMessage) -> None:
        url = message.location.get("url", "")
        # Sites have their icon elsewhere, this one has none.
        if message.type in ("error", "warning") and not url.endswith("/favicon.ico"):
            self.found.append(f"{url}: {message.text}")

    def check(self) -> None:
        for pattern in self._expected:
            assert any(re.search(pattern, fault) for fault in self.found), (pattern, self.found)
        unexpected = [
            fault
            for fault in self.found
            if not any(re.search(pattern, fault) for pattern in self._expected)
        ]
        assert not unexpected, "\n".join(unexpected)


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def page(chromium: Browser, site: str, transactional_db: None, faults: Faults) -> Iterator[Page]:
    """An empty tab, wide, of nobody who is logged in. Paths are the site's."""
    context = chromium.new_context(base_url=site, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    width, height = SIZES["wide"]
    page.set_viewport_size({"width": width, "height": height})
    faults.watch(page)
    yield page
    context.close()
    faults.check()


@pytest.fixture
def staff(transactional_db: None) -> Callable[..., User]:
    """Makes a user who may enter the admin and has the permissions of these names."""

    def make(*permissions: str, name: str = "olga") -> User:
        user = User.objects.create_user(name, is_staff=True)
        found = Permission.objects.filter(codename__in=permissions)
        assert len(found) == len(permissions), permissions
        user.user_permissions.set(found)
        return user

    return make


@pytest.fixture
def log_in(page: Page, site: str) -> Callable[[User], User]:
    """Logs a user in, without the form."""

    def log_in(user: User) -> User:
        client = Client()
        client.force_login(user)
        name = settings.SESSION_COOKIE_NAME
        page.context.add_cookies([{"name": name, "value": client.cookies[name].value, "url": site}])
        return user

    return log_in


@pytest.fixture
def theme(page: Page) -> Callable[..., None]:
    """Lets the page be light or dark: as the system is, or, if `chosen`, by the admin's button."""

    def theme(name: Literal["light", "dark"], *, chosen: bool = False) -> None:
        if chosen:
            page.emulate_media(color_scheme="light" if name == "dark" else "dark")
            page.add_init_script(f"localStorage.setItem('theme', '{name}')")
            page.evaluate(f"document.documentElement.dataset.theme = '{name}'")
        else:
            page.emulate_media(color_scheme=name)
        # Colours fade over; whoever looks next is to see the new ones.
        page.evaluate("document.getAnimations().forEach(one => one.finish())")

    return theme


@pytest.fixture
def width(page: Page) -> Callable[[str], None]:
    """Makes the window "wide" or "narrow"."""

    def width(name: Literal["wide", "narrow"]) -> None:
        columns, lines = SIZES[name]
        page.set_viewport_size({"width": columns, "height": lines})

    return width


@pytest.fixture
def axe(faults: Faults) -> Callable[[Page], None]:
    """Asserts that nothing in the page seriously keeps people with disabilities out."""

    def axe(page: Page) -> None:
        before = list(faults.found)
        options = {"resultTypes": ["violations"], "preload": False}
        results: Any = Axe().run(page, options=options)
        # It meets the policy itself, with what it tries on the page.
        faults.found[:] = before
        serious = [
            f"{one['id']} ({one['impact']}): {one['help']}\n    {node['html'][:300]}\n"
            f"    {node['failureSummary']}"
            for one in results.response["violations"]
            for node in one["nodes"]
            if one["impact"] in ("serious", "critical")
        ]
        assert not serious, "\n".join(serious)

    return axe


@pytest.fixture
def shot(page: Page) -> Callable[[str], None]:
    """Keeps a picture of the whole page, if somebody has asked for them."""

    def shot(name: str) -> None:
        if folder := os.environ.get(SHOTS_VARIABLE):
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)

    return shot


@pytest.fixture
def looks(
    page: Page,
    theme: Callable[..., None],
    width: Callable[[str], None],
    axe: Callable[[Page], None],
    shot: Callable[[str], None],
) -> Callable[[str], None]:
    """Asserts that the page is readable and does not overflow, light and dark, wide and narrow, and
    keeps a picture of each."""

    def looks(name: str) -> None:
        for size, checked in (("narrow", "dark"), ("wide", "light")):
            width(size)
            for colours in ("dark", "light"):
                # What is the matter with a colour is so in both sizes.
                if colours == checked or SHOTS_VARIABLE in os.environ:
                    theme(colours)
                    shot(f"{name}-{size}-{colours}")
                if colours == checked:
                    axe(page)
            beyond = page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert beyond <= 0, f"{name}, {size}: the page is {beyond} pixels too wide"

    return looks


class Hold(Protocol):
    def __call__(self, *keys: Any, **options: Any) -> Lease: ...


@pytest.fixture
def two_stores() -> Iterator[None]:
    """A database and the memory of this process, which is also the site's."""
    aliases = {"default": settings.DISTLOCKS["default"], "memory": settings.DISTLOCKS["memory"]}
    with override_settings(DISTLOCKS=aliases):
        yield


@pytest.fixture
def hold(transactional_db: None) -> Iterator[Hold]:
    """Takes locks in another thread, where they stay held until the test ends: `hold("order:42",
    label="nightly")`."""
    with ThreadPoolExecutor(1, "holder") as thread, ExitStack() as held:

        def hold(*keys: Any, **options: Any) -> Lease:
            lease = thread.submit(db_lock(*keys, **options).acquire).result(20)
            held.callback(lambda: thread.submit(lease.release).result(20))
            return lease

        yield hold
        held.close()
        thread.submit(connections.close_all).result(20)
