"""The fast path with one rule broken on purpose: called in a worker before it has used it."""

from typing import Any

from distlocks.backends.fastpath import FastPathBackend
from distlocks.backends.fastpath.authority import Authority
from distlocks.backends.fastpath.changes import Mode, Terms
from distlocks.backends.redis.backend import NotOpen
from distlocks.claims import Denial, Grant, Request
from distlocks.exceptions import BackendUnavailable
from tests.integration.nemesis.controls import alter

OPEN_FOR_US = r"epoch == ARGV\[1\] and known == vouching"


def falls_back_at_each_error() -> None:
    """Try Redis, else the database."""

    def try_acquire(self: FastPathBackend, request: Request) -> Grant | Denial:
        while self.authority.awaited().phase != "redis":
            pass
        try:
            return self.redis.try_acquire(request)
        except (BackendUnavailable, NotOpen):
            answer = self.database.try_acquire(request)
            return self._of_database(answer)

    def does_nothing(self: FastPathBackend, *_: Any) -> None:
        """Nobody changes the authority."""

    FastPathBackend.try_acquire = try_acquire  # type: ignore[method-assign]
    FastPathBackend._failed = does_nothing  # type: ignore[method-assign]


def trusts_any_epoch() -> None:
    """Whoever was opened once grants for ever."""
    alter("common.lua", OPEN_FOR_US, "known == vouching")


def trusts_any_incarnation() -> None:
    """What the server remembers is believed."""
    alter("common.lua", OPEN_FOR_US, "epoch == ARGV[1]")


def waits_for_nobody() -> None:
    """The database takes over at once."""
    Terms.drained_after = lambda self, row: 0.05  # type: ignore[method-assign]


def never_reads_again() -> None:
    """What was read once is trusted for ever."""
    known = Authority.known

    def remembered(self: Authority) -> Mode | None:
        mode = self._mode
        return mode if mode is not None and mode.phase == "redis" else known(self)

    Authority.known = remembered  # type: ignore[method-assign]
