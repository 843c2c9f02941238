"""Distributed locks for Django: released after the commit, renewed while held."""

from __future__ import annotations

from .claims import Holder
from .exceptions import (
    BackendUnavailable,
    DistlocksError,
    LeaseLost,
    LockTimeout,
    NotSupported,
    StaleToken,
)
from .force import force_release
from .handler import locks
from .lease import Lease
from .lock import db_lock

__version__ = "0.1.0.dev0"

__all__ = [
    "BackendUnavailable",
    "DistlocksError",
    "Holder",
    "Lease",
    "LeaseLost",
    "LockTimeout",
    "NotSupported",
    "StaleToken",
    "db_lock",
    "force_release",
    "locks",
]
