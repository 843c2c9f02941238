"""What is wrong or unwise about a fast path: its stores, and who grants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.checks import CheckMessage, Error, Warning

from ...claims import from_us
from ...exceptions import BackendUnavailable
from .authority import SAID
from .row import REDIS

if TYPE_CHECKING:
    from .backend import FastPathBackend


def check_servers(backend: FastPathBackend) -> list[CheckMessage]:
    """What its stores say of themselves, and the authority."""
    return [
        *backend.redis.check_store(),
        *backend.database.check_store(),
        *_authority(backend),
    ]


def _authority(backend: FastPathBackend) -> list[CheckMessage]:
    try:
        row = backend.authority.look().row
    except BackendUnavailable as error:
        return [
            Error(
                f"The lock backend {backend.alias!r} cannot read which store grants: {error}",
                hint="It grants nothing without: see to its database.",
                id="distlocks.E023",
            )
        ]
    if row.phase == REDIS:
        return []
    ailment = backend.authority.ailment
    return [
        Warning(
            f"Redis does not grant the locks of {backend.alias!r}: {SAID[row.phase]}, since "
            f"{from_us(row.since_us):%Y-%m-%d %H:%M:%S} UTC (epoch {row.epoch}). {row.why}"
            f"{f' Now: {ailment}' if ailment else ''}",
            hint="It returns to Redis by itself, unless it is pinned: see 'manage.py "
            "lock_authority'.",
            id="distlocks.W013",
        )
    ]
