"""Runs in the admin: to read, not to write. Only the jobs themselves write their records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.http import HttpRequest
from django.utils.timezone import localtime

from project.jobs.models import JobRun

if TYPE_CHECKING:
    RunAdminBase = admin.ModelAdmin[JobRun]
else:
    RunAdminBase = admin.ModelAdmin


@admin.register(JobRun)
class JobRunAdmin(RunAdminBase):
    list_display = (
        "job",
        "outcome",
        "server",
        "pid",
        "fencing_token",
        "started",
        "finished",
    )
    list_filter = ("outcome", "server")
    search_fields = ("job",)
    date_hierarchy = "started_at"

    # Runs may be seconds apart, which Django's own format does not show.

    @admin.display(ordering="started_at")
    def started(self, run: JobRun) -> str:
        return f"{localtime(run.started_at):%Y-%m-%d %H:%M:%S}"

    @admin.display(ordering="finished_at", empty_value="-")
    def finished(self, run: JobRun) -> str | None:
        return f"{localtime(run.finished_at):%H:%M:%S}" if run.finished_at else None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: JobRun | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: JobRun | None = None) -> bool:
        return False
