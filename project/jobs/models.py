"""The record that each job writes about itself."""

from __future__ import annotations

import os
import uuid
from datetime import datetime
from typing import ClassVar

from django.conf import settings
from django.db import models
from django.utils import timezone


class Outcome(models.TextChoices):
    """How a run ended. A run whose process was killed stays on `RUNNING`: nobody was left to
    write more; the board tells it from a live one by its lock."""

    RUNNING = "running", "running"
    DONE = "done", "done"
    FAILED = "failed", "failed"
    LOST = "lost", "lease lost"


class JobRunQuerySet(models.QuerySet["JobRun"]):
    """What is done with runs."""

    def start(self, run_id: uuid.UUID, job: str, fencing_token: int) -> JobRun:
        """Write that a run starts, by this process, now."""
        return self.create(
            id=run_id,
            job=job,
            server=settings.SERVER_NAME,
            pid=os.getpid(),
            fencing_token=fencing_token,
            started_at=timezone.now(),
        )

    def since(self, moment: datetime) -> JobRunQuerySet:
        """Runs that started at this moment or later."""
        return self.filter(started_at__gte=moment)


class JobRun(models.Model):
    """One run of a job: its start is committed before the work, its end after it."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    job = models.CharField(max_length=64)
    server = models.CharField(max_length=64)
    pid = models.PositiveIntegerField()
    fencing_token = models.BigIntegerField()
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=8, choices=Outcome.choices, default=Outcome.RUNNING)

    objects: ClassVar[models.Manager[JobRun]] = JobRunQuerySet.as_manager()

    class Meta:
        ordering: ClassVar = ["-started_at"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["job", "fencing_token"], name="jobs_jobrun_job_token"),
            models.CheckConstraint(
                condition=models.Q(outcome=Outcome.RUNNING, finished_at__isnull=True)
                | ~models.Q(outcome=Outcome.RUNNING) & models.Q(finished_at__isnull=False),
                name="jobs_jobrun_finished_iff_ended",
            ),
        ]
        indexes: ClassVar = [models.Index(fields=["-started_at"], name="jobs_jobrun_started")]

    def __str__(self) -> str:
        return f"{self.job} on {self.server}, token {self.fencing_token}"

    def finish(self, outcome: Outcome) -> None:
        """Write how the run ended, now."""
        self.outcome, self.finished_at = outcome, timezone.now()
        self.save(update_fields=["outcome", "finished_at"])
