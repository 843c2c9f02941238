"""The scripts broken on purpose: called in a worker before it has used the backend."""

from typing import Any

from distlocks.backends.redis import scripts
from tests.integration.rig.controls import altered


def reserves_for_ever() -> None:
    """Who is reserved a key for has it until it comes, dead or alive."""
    alter("common.lua", r"local RESERVED = \d+", "local RESERVED = 3600000000")


def alter(name: str, pattern: str, replacement: str) -> None:
    """Have this file of the scripts read with the pattern replaced."""
    folder = scripts.files(scripts.__name__)

    class Part:
        def __init__(self, part: str) -> None:
            self.part = part

        def read_text(self, encoding: str) -> str:
            text = folder.joinpath(self.part).read_text(encoding)
            return altered(text, (pattern, replacement)) if self.part == name else text

    class Folder:
        def joinpath(self, part: str) -> Any:
            return Part(part)

    scripts.files = lambda package: Folder()  # type: ignore[assignment]
    scripts.script.cache_clear()
