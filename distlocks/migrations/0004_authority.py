from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

import distlocks.models


class Migration(migrations.Migration):
    dependencies: ClassVar[list[tuple[str, str]]] = [("distlocks", "0003_claims")]

    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="LockAuthority",
            fields=[
                (
                    "name",
                    distlocks.models.KeyField(
                        max_length=250, primary_key=True, serialize=False, verbose_name="name"
                    ),
                ),
                ("epoch", models.BigIntegerField(verbose_name="epoch")),
                (
                    "phase",
                    models.CharField(
                        choices=[
                            ("redis", "Redis grants"),
                            ("drain", "nobody grants until the leases from Redis have ended"),
                            ("db", "the database grants"),
                            (
                                "closing",
                                "nobody grants until the leases from the database have ended",
                            ),
                        ],
                        max_length=10,
                        verbose_name="authority",
                    ),
                ),
                ("since", models.BigIntegerField(verbose_name="since (µs)")),
                ("why", models.CharField(blank=True, max_length=500, verbose_name="why")),
                ("mode_lease", models.BigIntegerField(verbose_name="mode lease (µs)")),
                ("max_ttl", models.BigIntegerField(verbose_name="longest lease (µs)")),
                ("patience", models.BigIntegerField(verbose_name="patience (µs)")),
                (
                    "unhealthy_at",
                    models.BigIntegerField(
                        default=0, verbose_name="Redis last seen unhealthy at (µs)"
                    ),
                ),
                ("pinned", models.BooleanField(default=False, verbose_name="pinned")),
                ("ends_leases", models.BooleanField(default=False, verbose_name="ends leases")),
            ],
            options={
                "verbose_name": "lock authority",
                "verbose_name_plural": "lock authorities",
                "ordering": ["name"],
            },
        ),
    ]
