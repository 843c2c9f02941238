from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies: ClassVar[list[tuple[str, str]]] = [("jobs", "0001_initial")]

    operations: ClassVar[list[Any]] = [
        migrations.RemoveConstraint(
            model_name="jobrun",
            name="jobs_jobrun_finished_iff_ended",
        ),
        migrations.AlterField(
            model_name="jobrun",
            name="outcome",
            field=models.CharField(
                choices=[
                    ("waiting", "waiting for its turn"),
                    ("running", "running"),
                    ("done", "done"),
                    ("failed", "failed"),
                    ("lost", "lease lost"),
                ],
                default="waiting",
                max_length=8,
            ),
        ),
        migrations.AddConstraint(
            model_name="jobrun",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(
                        ("finished_at__isnull", True), ("outcome__in", ("waiting", "running"))
                    ),
                    models.Q(
                        models.Q(("outcome__in", ("waiting", "running")), _negated=True),
                        ("finished_at__isnull", False),
                    ),
                    _connector="OR",
                ),
                name="jobs_jobrun_finished_iff_ended",
            ),
        ),
    ]
