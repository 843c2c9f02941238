"""What may be asked of the servers: each makes something that sends one request, and waits not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Given kazoo's client, it sends the request and returns what the answer will be in.
Send = Callable[[Any], Any]
Watcher = Callable[[Any], None]


def exists(path: str) -> Send:
    """The node's stat, or None."""
    return lambda client: client.exists_async(path)


def get(path: str, watcher: Watcher | None = None) -> Send:
    """The node's data and stat. The watcher is called when the node changes or goes; there is none
    on a node that is not there: it would stay for as long as the session."""
    return lambda client: client.get_async(path, watcher)


def children(path: str) -> Send:
    """The names of the node's children."""
    return lambda client: client.get_children_async(path)


def children_and_stat(path: str, watcher: Watcher | None = None) -> Send:
    """The names of the node's children, and its stat. The watcher is called when they change."""
    return lambda client: client.get_children_async(path, watcher, include_data=True)


def create(path: str, data: bytes = b"") -> Send:
    """Make the node."""
    return lambda client: client.create_async(path, data)


def create_mark(path: str) -> Send:
    """Make a node that goes with the session; its path and its stat."""
    return lambda client: client.create_async(path, b"", ephemeral=True, include_data=True)


def create_place(path: str, data: bytes) -> Send:
    """Make a node that goes with the session, a number appended to its name."""
    return lambda client: client.create_async(path, data, ephemeral=True, sequence=True)


def ensure(path: str) -> Send:
    """Make the node and those above it, where they are missing."""
    return lambda client: client.ensure_path_async(path)


def write(path: str, data: bytes = b"") -> Send:
    """Write the node; its stat."""
    return lambda client: client.set_async(path, data)


def delete(path: str) -> Send:
    """Remove the node."""
    return lambda client: client.delete_async(path)


def catch_up(path: str) -> Send:
    """Have the server learn what the leader knew when it was asked."""
    return lambda client: client.sync_async(path)
