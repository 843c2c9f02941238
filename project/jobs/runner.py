"""Runs a job, at most once at a time and beside few others, over all server processes.

Its record is written in guarded transactions: a run that has lost its lease without noticing cannot
write that it began, or that it is done, over the head of the one that came after it. Each attempt
and how it ended is one structured log line.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
import uuid
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import DatabaseError

from distlocks import BackendUnavailable, LeaseLost, LockTimeout, StaleToken, db_lock
from project.jobs.holders import KEY_PREFIX, TURNS_KEY, Contention, JobHolder, metadata
from project.jobs.models import JobRun, Outcome
from project.jobs.orders import JobOrder

if TYPE_CHECKING:
    from distlocks import Lease

logger = logging.getLogger(__name__)

# How soon the work notices that its lease is lost.
CHECK_SECONDS = 0.1


class JobContended(Exception):
    """The job runs elsewhere, or ran too recently."""

    def __init__(self, contention: Contention) -> None:
        super().__init__(contention.state)
        self.contention = contention


class NoTurn(Exception):
    """As many other jobs as may run at once have run for too long."""

    def __init__(self, others: list[JobHolder]) -> None:
        super().__init__(", ".join(other.job for other in others))
        self.others = others


class JobFailed(Exception):
    """The work, or the writing of its record, raised an exception: the cause of this one."""


def run_job(order: JobOrder) -> JobRun:
    """Run the job here and now, or raise JobContended, NoTurn, BackendUnavailable, LeaseLost,
    StaleToken or JobFailed."""
    tried = time.monotonic()
    run_id = uuid.uuid4()
    at = "job"
    run: JobRun | None = None
    lock = db_lock(
        KEY_PREFIX + order.job,
        ttl=settings.JOB_LEASE_SECONDS,
        timeout=0,
        min_hold=order.interval,
        label=f"job {order.job}",
        metadata=metadata(order, run_id),
    )
    turn = db_lock(
        TURNS_KEY,
        limit=settings.JOB_LIMIT,
        ttl=settings.JOB_LEASE_SECONDS,
        timeout=settings.JOB_TURN_SECONDS,
        label=f"job {order.job}",
        metadata=metadata(order, run_id),
        backend="turns",
    )
    _log("job.attempt", order, seconds=order.seconds, interval=order.interval)
    try:
        with lock as lease:
            at = "record"
            with lease.atomic():
                waiting = JobRun.objects.start(run_id, order.job, lease.fencing_token)
            at, run = "turn", waiting
            with turn:
                at = "record"
                with lease.atomic():
                    run.begin()
                work(lease, order.seconds)
                with lease.atomic():
                    run.finish(Outcome.DONE)
    except LockTimeout as error:
        if at == "turn":
            _fail(order, run, "no_turn", error, Outcome.FAILED)
            raise NoTurn([JobHolder.of(holder) for holder in error.holders]) from error
        if at == "record":
            _fail(order, run, "database_busy", error, Outcome.FAILED)
            raise JobFailed(f"Its record could not be written: {error}") from error
        contention = Contention.of(error.holders)
        _log(
            "job.contention",
            order,
            waited=time.monotonic() - tried,
            state=contention.state,
            held_by=contention.holder.as_json() if contention.holder else None,
            retry_after=contention.retry_after,
        )
        raise JobContended(contention) from error
    except (LeaseLost, StaleToken) as error:
        reason = "lease_lost" if isinstance(error, LeaseLost) else "stale_token"
        _fail(order, run, reason, error, Outcome.LOST)
        raise
    except BackendUnavailable as error:
        _fail(order, run, "store_unavailable", error, Outcome.FAILED)
        raise
    except Exception as error:
        _fail(order, run, "error", error, Outcome.FAILED)
        raise JobFailed(f"{type(error).__name__}: {error}") from error
    assert run is not None
    _log("job.done", order, token=run.fencing_token, waited=lease.waited)
    return run


def work(lease: Lease, seconds: float) -> None:
    """The job itself: it takes this long, and stops when it is no longer alone."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        lease.check()
        time.sleep(min(left, CHECK_SECONDS))
    lease.check()


def _fail(
    order: JobOrder, run: JobRun | None, reason: str, error: Exception, outcome: Outcome
) -> None:
    token = None
    if run is not None:
        token = run.fencing_token
        try:
            # Without the guard, which would refuse it: no other run writes this one's row.
            run.finish(outcome)
        except DatabaseError:
            # The first error is the one to report; the record then stays on "running", and the
            # board calls it broken off.
            logger.exception("job.record_failed", extra={"job": order.job})
    _log(
        "job.failed",
        order,
        level=logging.ERROR,
        token=token,
        reason=reason,
        error=f"{type(error).__name__}: {error}",
        traceback=traceback.format_exc() if reason == "error" else None,
    )


def _log(
    event: str,
    order: JobOrder,
    *,
    level: int = logging.INFO,
    token: int | None = None,
    waited: float | None = None,
    **more: Any,
) -> None:
    extra = {
        "job": order.job,
        "server": settings.SERVER_NAME,
        "pid": os.getpid(),
        "token": token,
        "waited_ms": None if waited is None else round(waited * 1000, 1),
        **more,
    }
    logger.log(level, event, extra=extra)
