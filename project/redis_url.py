"""URLs of Redis servers."""

from __future__ import annotations

from urllib.parse import urlsplit


def address(url: str) -> str:
    """Host and port, for people: without the password. ValueError if it is no such URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError("it must begin with redis:// or rediss:// and name a host")
    return f"{parts.hostname}:{parts.port or 6379}"


def with_database(url: str, number: int) -> str:
    """The URL of that database of the server. ValueError if it is no such URL."""
    address(url)
    return urlsplit(url)._replace(path=f"/{number}").geturl()
