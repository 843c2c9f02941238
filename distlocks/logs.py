"""What goes wrong, in the log: one record for each event, with its facts as attributes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from .claims import Holder
from .facts import shown
from .keys import Key

logger = logging.getLogger("distlocks")

# Before the name of each attribute of a record, so that none is another's.
PREFIX = "distlocks_"
# Of an event about more keys than this, the first are named.
MAX_KEYS = 20


def event(
    level: int,
    kind: str,
    backend: str,
    keys: Iterable[Key],
    message: str,
    *args: object,
    exc_info: BaseException | None = None,
    **fields: Any,
) -> None:
    """Log `message` % `args`, with `distlocks_event`, `distlocks_backend`, `distlocks_keys` and
    `distlocks_` and its name for each field that is not None.

    `backend` is an alias, '' if it is about none. Keys are named as operators read them.
    """
    if not logger.isEnabledFor(level):
        return
    named = list(map(shown, keys))[:MAX_KEYS]
    about: dict[str, Any] = {"event": kind, "backend": backend, "keys": named, **fields}
    # A filter of the project's that raises must fail neither a lock nor the thread that renews.
    with suppress(Exception):
        logger.log(
            level,
            message,
            *args,
            exc_info=exc_info,
            extra={PREFIX + name: value for name, value in about.items() if value is not None},
            # Whoever calls this has seen it.
            stacklevel=2,
        )


def of(holder: Holder) -> dict[str, Any]:
    """The fields of an event that is about a holder's lease."""
    return {
        "owner_id": holder.owner_id,
        "fencing_token": holder.fencing_token,
        "label": holder.label,
        "host": holder.host,
        "pid": holder.pid,
        "thread": holder.thread,
    }
