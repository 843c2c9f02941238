"""How a lock is named in URLs and forms: "alias/key", a tree key by its parts: "default/a/b"."""

from __future__ import annotations

import re

from django.http import HttpRequest
from django.urls import NoReverseMatch, register_converter, reverse

from ..keys import SEPARATOR

# What stays as it is. "_" does not: it begins what does not.
_PLAIN = re.compile(r"[^A-Za-z0-9:@~+.\-\x80-\U0010ffff]")
_ESCAPED = re.compile(r"_([0-9A-F]{2})")


def _quote(text: str) -> str:
    if text in (".", ".."):
        # Browsers would leave the folder.
        return text.replace(".", "_2E")
    return _PLAIN.sub(lambda found: f"_{ord(found[0]):02X}", text)


def _unquote(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


class Alias:
    """The alias of a backend, in a URL."""

    regex = "[^/]+"

    def to_python(self, value: str) -> str:
        return _unquote(value)

    def to_url(self, value: str) -> str:
        return _quote(value)


class KeyName:
    """The name of a key, in a URL: a folder for each part of a tree key."""

    regex = ".+"

    def to_python(self, value: str) -> str:
        return SEPARATOR.join(map(_unquote, value.split("/")))

    def to_url(self, value: str) -> str:
        return "/".join(map(_quote, value.split(SEPARATOR)))


register_converter(Alias, "distlocks_alias")
register_converter(KeyName, "distlocks_key")


def url_of(request: HttpRequest, page: str, *args: str) -> str:
    """Where the page of this name is in the admin site that was asked: there may be several. Empty
    where that one has no such page."""
    match = request.resolver_match
    site = match.namespace if match else None
    try:
        return reverse(f"admin:distlocks_{page}", args=args, current_app=site)
    except NoReverseMatch:
        return ""


def address(alias: str, name: str) -> str:
    """A lock in one word."""
    return f"{Alias().to_url(alias)}/{KeyName().to_url(name)}"


def from_address(text: str) -> tuple[str, str]:
    """The alias and the name; ValueError if it is no address."""
    alias, slash, name = text.partition("/")
    if not (alias and slash and name):
        raise ValueError(f"{text!r} is no address of a lock")
    return Alias().to_python(alias), KeyName().to_python(name)
