"""What the board shows: live locks for what runs and cools down, records for what has run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from distlocks import locks
from project.jobs.holders import KEY_PREFIX, TURNS_KEY, JobHolder
from project.jobs.models import NOT_ENDED, JobRun

LAST_RUNS = 50
COUNT_SECONDS = 300
# Not written by the job, whose process was gone before it could: see `_outcome`.
BROKEN_OFF = "broken_off"


def snapshot() -> dict[str, Any]:
    """The whole board at one moment, ready for JSON."""
    # The moment comes first, then the locks, then the records: see `_outcome`.
    now = timezone.now()
    holders = [JobHolder.of(holder) for holder in locks["default"].holders(KEY_PREFIX)]
    turns = [JobHolder.of(holder) for holder in locks["turns"].holders(TURNS_KEY)]
    live = {holder.run for holder in holders if not holder.cooling_down}
    runs = list(JobRun.objects.all()[:LAST_RUNS])
    waiting = live - JobRun.objects.begun(live)
    counted = JobRun.objects.since(now - timedelta(seconds=COUNT_SECONDS))
    return {
        "server": settings.SERVER_NAME,
        "now": now,
        "lease_seconds": settings.JOB_LEASE_SECONDS,
        "limit": settings.JOB_LIMIT,
        "running": [
            _held(holder) for holder in holders if holder.run in live and holder.run not in waiting
        ],
        # Each waits until any of those that have a turn now is done.
        "waiting": [
            {**_held(holder), "waits_for": [turn.job for turn in turns]}
            for holder in holders
            if holder.run in live and holder.run in waiting
        ],
        "cooling": [_held(holder) for holder in holders if holder.cooling_down],
        "runs": [_ran(run, _outcome(run, live, now)) for run in runs],
        "counts": {
            "seconds": COUNT_SECONDS,
            "outcomes": Counter(_outcome(run, live, now) for run in counted),
        },
    }


def _outcome(run: JobRun, live: Collection[str], now: datetime) -> str:
    """How the run ended, or that it runs, or that it broke off.

    A record that says that the run has not ended is true if its run has a live lock. One that
    started after we began to look is true as well: its lock may not have been among those we read.
    """
    if run.outcome not in NOT_ENDED or str(run.id) in live or run.started_at >= now:
        return run.outcome
    return BROKEN_OFF


def _held(holder: JobHolder) -> dict[str, Any]:
    return {
        "job": holder.job,
        "run": holder.run,
        "seconds": holder.seconds,
        "interval": holder.interval,
        **holder.as_json(),
    }


def _ran(run: JobRun, outcome: str) -> dict[str, Any]:
    return {
        "run": run.id,
        "job": run.job,
        "server": run.server,
        "pid": run.pid,
        "fencing_token": run.fencing_token,
        "started_at": run.started_at,
        "finished_at": run.finished_at,
        "outcome": outcome,
    }
