"""What the job runner puts into a lock's metadata, and what it makes of a lock's holder."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.utils import timezone

from project.jobs.orders import JobOrder

if TYPE_CHECKING:
    from distlocks import Holder

KEY_PREFIX = "job:"
# Of which each job that runs has a permit.
TURNS_KEY = "turns"


def metadata(order: JobOrder, run_id: uuid.UUID) -> dict[str, Any]:
    """What rivals and the board can know of a run from its lock alone."""
    return {
        "job": order.job,
        "server": settings.SERVER_NAME,
        "run": str(run_id),
        "seconds": order.seconds,
        "interval": order.interval,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHolder:
    """A job that runs or cools down, as its lock tells it."""

    job: str
    run: str
    server: str
    host: str
    pid: int
    since: datetime
    seconds: float
    interval: float
    remaining: float
    cooling_down: bool

    @classmethod
    def of(cls, holder: Holder) -> JobHolder:
        """Read from a holder; locks taken by others under our prefix have no metadata of ours."""
        ours = holder.metadata
        return cls(
            job=str(ours.get("job", "")) or str(holder.key).removeprefix(KEY_PREFIX),
            run=str(ours.get("run", "")),
            server=str(ours.get("server", "")),
            host=holder.host,
            pid=holder.pid,
            since=holder.since,
            seconds=float(ours.get("seconds", 0)),
            interval=float(ours.get("interval", 0)),
            remaining=max(holder.remaining, 0.0),
            cooling_down=holder.cooling_down,
        )

    def retry_after(self, now: datetime) -> int:
        """Whole seconds until another try makes sense.

        Not later than the lease's rest, after which a dead holder's lock is free; sooner when
        the work says that it will be done.
        """
        if self.cooling_down or not self.run:
            return max(math.ceil(self.remaining), 1)
        expected = max(self.seconds, self.interval) - (now - self.since).total_seconds()
        return max(math.ceil(min(self.remaining, expected)), 1)

    def as_json(self) -> dict[str, Any]:
        """For answers and log lines."""
        return {
            "server": self.server,
            "host": self.host,
            "pid": self.pid,
            "since": self.since.isoformat(),
            "remaining": round(self.remaining, 3),
        }


@dataclass(frozen=True, slots=True)
class Contention:
    """Why a job could not start now, and when to try again."""

    holder: JobHolder | None
    retry_after: int

    @classmethod
    def of(cls, holders: Sequence[Holder]) -> Contention:
        """From what a denial says. It names nobody if the store was too busy to tell."""
        if not holders:
            return cls(None, 1)
        holder = JobHolder.of(holders[0])
        return cls(holder, holder.retry_after(timezone.now()))

    @property
    def state(self) -> str:
        """Runs, cools down, or nobody could tell at once."""
        if self.holder is None:
            return "busy"
        return "cooling_down" if self.holder.cooling_down else "running"
