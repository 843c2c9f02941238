"""What is wrong or unwise about a fast path: its stores, and who grants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from django.core.checks import CheckMessage, Error, Warning
from django.db import DEFAULT_DB_ALIAS

from ...claims import from_us
from ...conf import aliases
from ...exceptions import BackendUnavailable
from ..aliases import WrongAlias, params_of
from ..database import DatabaseBackend
from ..phases import REDIS, SAID

if TYPE_CHECKING:
    from .backend import FastPathBackend


def check_settings(backend: FastPathBackend) -> list[CheckMessage]:
    """Whether others use the same keys in the same table, and would not be excluded by Redis."""
    halves = []
    for entry in aliases().values():
        options = entry.get("OPTIONS", {}) if isinstance(entry, Mapping) else {}
        halves += [options.get("redis"), options.get("database")]
    messages: list[CheckMessage] = []
    for alias in locks_of_table(backend):
        if alias not in halves:
            messages.append(
                Warning(
                    f"The lock backend {alias!r} has keys of {backend.alias!r} in the same table: "
                    f"they exclude each other only while the database grants.",
                    hint="Give one of them a KEY_PREFIX of its own, or use only one.",
                    id="distlocks.W014",
                )
            )
    return messages


def locks_of_table(backend: FastPathBackend) -> Iterator[str]:
    """Aliases of other backends on the same database whose keys may begin as ours do."""
    for alias in aliases():
        if alias == backend.alias:
            continue
        try:
            params = params_of(alias, DatabaseBackend)
        except WrongAlias:
            continue
        one, other = params.key_prefix, backend.prefix
        same = params.options.get("using", DEFAULT_DB_ALIAS) == backend.database.using
        if same and (one.startswith(other) or other.startswith(one)):
            yield alias


def check_servers(backend: FastPathBackend) -> list[CheckMessage]:
    """What its stores say of themselves, and the authority."""
    return [
        *backend.redis.check_store(),
        *backend.database.check_store(),
        *_authority(backend),
    ]


def _authority(backend: FastPathBackend) -> list[CheckMessage]:
    try:
        row = backend.authority.peek()
    except BackendUnavailable as error:
        return [
            Error(
                f"The lock backend {backend.alias!r} cannot read which store grants: {error}",
                hint="It grants nothing without: see to its database.",
                id="distlocks.E023",
            )
        ]
    if row is None or row.phase == REDIS:
        return []
    return [
        Warning(
            f"Redis does not grant the locks of {backend.alias!r}: {SAID[row.phase]}, since "
            f"{from_us(row.since_us):%Y-%m-%d %H:%M:%S} UTC (epoch {row.epoch}). {row.why}",
            hint="It returns to Redis by itself, unless it is pinned: see 'manage.py "
            "lock_authority'.",
            id="distlocks.W013",
        )
    ]
