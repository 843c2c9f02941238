"""The tables. No foreign keys; every query of ours names its database."""

from .fields import KeyField, StoreClock
from .history import (
    EVENT_KINDS,
    HOLD_COLUMNS,
    WAIT_COLUMNS,
    LockEvent,
    LockRollup,
    LockWaiter,
)
from .locks import MODES, AdvisoryLock, Lock, LockHolder, LockQuerySet
from .rights import PHASES, LockAuthority, LockGuard

__all__ = [
    "EVENT_KINDS",
    "HOLD_COLUMNS",
    "MODES",
    "PHASES",
    "WAIT_COLUMNS",
    "AdvisoryLock",
    "KeyField",
    "Lock",
    "LockAuthority",
    "LockEvent",
    "LockGuard",
    "LockHolder",
    "LockQuerySet",
    "LockRollup",
    "LockWaiter",
    "StoreClock",
]
