"""Secrets that are made once and kept in a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def kept(path: Path, make: Callable[[], str]) -> str:
    """What the file holds; made on the first call, readable by its owner only.

    Two processes that start together get the same secret: it is written beside the file and
    linked into place whole, so that nobody can read half of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        descriptor, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(make() + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.unlink(draft)
    return path.read_text(encoding="utf-8").strip()
