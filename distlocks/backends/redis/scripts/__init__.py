"""The Lua scripts, each as one text with the digest that Redis knows it by."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

# What each is made of: what nearly every call needs comes before what few do.
_PARTS = {
    "acquire": ("common", "acquire", "claims", "acquire_rest"),
    "release": ("release", "common", "release_handoff", "claims", "release_rest"),
    "extend": ("common", "extend"),
    "force": ("common", "claims", "force"),
    "find": ("common", "claims", "find"),
    "sweep": ("common", "claims", "sweep"),
    "quarantine": ("common", "quarantine"),
    "mark": ("common", "mark"),
    "open": ("common", "open"),
    "turns_join": ("common", "turns_join"),
    "turns_call": ("common", "turns_call"),
    "redlock_take": ("common", "redlock", "redlock_take"),
    "redlock_raise": ("common", "redlock", "redlock_raise"),
    "redlock_extend": ("common", "redlock", "redlock_extend"),
    "redlock_release": ("common", "redlock", "redlock_release"),
    "redlock_force": ("common", "redlock", "redlock_force"),
    "redlock_quarantine": ("common", "redlock", "redlock_quarantine"),
    "redlock_sweep": ("common", "redlock", "redlock_sweep"),
}


class Script(NamedTuple):
    """A script: its name, its text, and its SHA-1 in hexadecimal."""

    name: str
    text: bytes
    sha: bytes


@cache
def script(name: str) -> Script:
    """The script of this name."""
    folder = files(__name__)
    text = "".join(folder.joinpath(f"{part}.lua").read_text("utf-8") for part in _PARTS[name])
    encoded = text.encode()
    return Script(name, encoded, hashlib.sha1(encoded, usedforsecurity=False).hexdigest().encode())
