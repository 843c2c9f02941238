"""The app's name and label."""

from __future__ import annotations

from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "project.jobs"
    label = "jobs"
    verbose_name = "Job runner"
