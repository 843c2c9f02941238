"""The record that each job writes about itself."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection
from datetime import datetime
from typing import ClassVar

from django.conf import settings
from django.db import models
from django.utils import timezone


class Outcome(models.TextChoices):
    """How a run ended, or that it has not. A run whose process was killed stays on `WAITING` or
    `RUNNING`: nobody was left to write more; the board tells it from a live one by its lock."""

    WAITING = "waiting", "waiting for its turn"
    RUNNING = "running", "running"
    DONE = "done", "done"
    FAILED = "failed", "failed"
    LOST = "lost", "lease lost"


NOT_ENDED = (Outcome.WAITING, Outcome.RUNNING)


class JobRunQuerySet(models.QuerySet["JobRun"]):
    """What is done with runs."""

    def start(self, run_id: uuid.UUID, job: str, fencing_token: int) -> JobRun:
        """Write that a run waits for its turn, in this process, from now on."""
        return self.create(
            id=run_id,
            job=job,
            server=settings.SERVER_NAME,
            pid=os.getpid(),
            fencing_token=fencing_token,
            started_at=timezone.now(),
        )

    def begun(self, run_ids: Collection[str]) -> set[str]:
        """Which of these runs have begun to work."""
        ids = [run_id for run_id in run_ids if run_id]
        begun = self.filter(id__in=ids).exclude(outcome=Outcome.WAITING)
        return {str(run_id) for run_id in begun.values_list("id", flat=True)}

    def since(self, moment: datetime) -> JobRunQuerySet:
        """Runs that started at this moment or later."""
        return self.filter(started_at__gte=moment)


class JobRun(models.Model):
    """One run of a job: its start is committed before the work, its end after it.

    `started_at` is when it began to wait for its turn, and once that has come, when the work began.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    job = models.CharField(max_length=64)
    server = models.CharField(max_length=64)
    pid = models.PositiveIntegerField()
    fencing_token = models.BigIntegerField()
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=8, choices=Outcome.choices, default=Outcome.WAITING)

    objects: ClassVar[models.Manager[JobRun]] = JobRunQuerySet.as_manager()

    class Meta:
        ordering: ClassVar = ["-started_at"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["job", "fencing_token"], name="jobs_jobrun_job_token"),
            models.CheckConstraint(
                condition=models.Q(outcome__in=NOT_ENDED, finished_at__isnull=True)
                | ~models.Q(outcome__in=NOT_ENDED) & models.Q(finished_at__isnull=False),
                name="jobs_jobrun_finished_iff_ended",
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["-started_at"], name="jobs_jobrun_started")]

    def __str__(self) -> str:
        return f"{self.job} on {self.server}, token {self.fencing_token}"

    def begin(self) -> None:
        """Write that its turn has come, and the work begins, now."""
        self.outcome, self.started_at = Outcome.RUNNING, timezone.now()
        self.save(update_fields=["outcome", "started_at"])

    def finish(self, outcome: Outcome) -> None:
        """Write how the run ended, now."""
        self.outcome, self.finished_at = outcome, timezone.now()
        self.save(update_fields=["outcome", "finished_at"])
