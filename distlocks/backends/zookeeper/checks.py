"""What is wrong or unwise about the servers of a ZooKeeper backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from django.core.checks import CheckMessage, Error, Warning

from ...exceptions import BackendUnavailable

if TYPE_CHECKING:
    from .backend import ZooKeeperBackend


def check_servers(backend: ZooKeeperBackend) -> list[CheckMessage]:
    """What the servers say when asked."""
    try:
        lasts, mode = backend.talk(lambda talk: (talk.session.timeout, talk.session.server_mode()))
    except BackendUnavailable as error:
        return [Error(str(error), id="distlocks.E041")]
    return [*_session(backend, lasts), *_alone(backend, mode)]


def _session(backend: ZooKeeperBackend, lasts: float) -> Iterator[CheckMessage]:
    longest = backend.params.max_ttl
    if lasts < longest:
        yield Error(
            f"The ZooKeeper servers of the lock backend {backend.alias!r} let a session last "
            f"{lasts:g} s without a sign of life, and its MAX_TTL is {longest:g} s: longer leases "
            f"than sessions are refused.",
            hint=f"Raise maxSessionTimeout on the servers, or lower MAX_TTL to {lasts:g}.",
            id="distlocks.E042",
        )


def _alone(backend: ZooKeeperBackend, mode: str) -> Iterator[CheckMessage]:
    if mode == "standalone":
        yield Warning(
            f"The lock backend {backend.alias!r} has a single ZooKeeper server: no lock can be had "
            f"while it is down.",
            hint="An ensemble of three goes on without one of them.",
            id="distlocks.W040",
        )
