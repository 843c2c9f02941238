"""Chromium, in which the admin's pages are tested."""

from typing import ClassVar

from tests.servers.base import Program


class Chromium(Program):
    """The distribution's: the browser that Playwright brings is another download."""

    name = "Chromium"
    executable = "chromium"
    places: ClassVar[tuple[str, ...]] = ("/Applications/Chromium.app/Contents/MacOS",)
    apt_package = "chromium"
