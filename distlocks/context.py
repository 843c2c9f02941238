"""What the running code works for: told with each lock that it asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from typing import Any

from . import logs
from .options import checked_metadata

_current: ContextVar[working_for | None] = ContextVar("distlocks_working_for", default=None)


def merged(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """What db_lock() was given, and beneath it what is known of the running code."""
    told = _current.get()
    if told is None:
        return metadata
    known = told.metadata()
    return {**known, **metadata} if metadata else known


class working_for:
    """Add to the metadata of each lock that the block asks for.

        with working_for(task="nightly import", batch=7):
            ...

    Values are what JSON can express. Inner blocks add to outer ones and win over them, and
    `metadata` given to db_lock() wins over all. It is known to what runs in the same context:
    functions called, tasks started, sync_to_async() and async_to_sync(); a thread begins with
    nothing unless it is run in contextvars.copy_context(). An object is good for one block at a
    time.

    Raises TypeError or ValueError for values that no store can keep.
    """

    __slots__ = ("_about", "_beneath", "_token")

    def __init__(self, **about: Any) -> None:
        self._about = checked_metadata(about)
        self._beneath: working_for | None = None
        self._token: Token[working_for | None] | None = None

    def __enter__(self) -> None:
        if self._token is not None:
            raise RuntimeError("This working_for() is in use: make one for each block.")
        self._beneath = _current.get()
        self._token = _current.set(self)

    def __exit__(self, *exc_info: object) -> None:
        token, self._token = self._token, None
        if token is not None:
            _current.reset(token)

    def metadata(self) -> Mapping[str, Any]:
        """What is told with a lock that is asked for now."""
        beneath = self._beneath
        return self._about if beneath is None else {**beneath.metadata(), **self._about}


class asked_by(working_for):
    """Add what `about` returns whenever the block asks for a lock; see working_for().

    It must not block. What it raises is logged, and keeps no lock from being had.
    """

    __slots__ = ("_ask", "_seen")

    def __init__(self, about: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__()
        self._ask: Callable[[], Mapping[str, Any]] | None = about
        # What it was last: nearly always it is the same, and has been checked.
        self._seen: Mapping[str, Any] | None = None

    def metadata(self) -> Mapping[str, Any]:
        """See working_for.metadata()."""
        if self._ask is not None:
            try:
                about = self._ask()
                if about != self._seen:
                    self._about, self._seen = checked_metadata(about), about
            except Exception as error:
                self._ask = None
                logs.event(
                    logging.ERROR,
                    "context_failed",
                    "",
                    (),
                    "What the running code works for could not be told with its locks",
                    exc_info=error,
                )
        return super().metadata()
