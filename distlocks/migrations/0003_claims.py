from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

import distlocks.models


class Migration(migrations.Migration):
    dependencies: ClassVar[list[tuple[str, str]]] = [("distlocks", "0002_guard")]

    operations: ClassVar[list[Any]] = [
        migrations.AddField(
            model_name="lock",
            name="mode",
            field=models.CharField(
                choices=[
                    ("exclusive", "exclusive"),
                    ("shared", "shared"),
                    ("permit", "permit"),
                    ("intention", "held further down"),
                ],
                db_default="exclusive",
                default="exclusive",
                max_length=10,
                verbose_name="mode",
            ),
        ),
        migrations.AddField(
            model_name="lock",
            name="reserved_by",
            field=models.CharField(
                blank=True, db_default="", default="", max_length=64, verbose_name="reserved by"
            ),
        ),
        migrations.AddField(
            model_name="lock",
            name="reserved_until",
            field=models.BigIntegerField(
                db_default=0, default=0, verbose_name="reserved until (µs)"
            ),
        ),
        migrations.CreateModel(
            name="LockHolder",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("owner_id", models.CharField(blank=True, max_length=64, verbose_name="owner id")),
                ("fencing_token", models.BigIntegerField(verbose_name="fencing token")),
                ("acquired_at", models.BigIntegerField(verbose_name="acquired at (µs)")),
                ("expires_at", models.BigIntegerField(default=0, verbose_name="expires at (µs)")),
                ("host", models.CharField(blank=True, max_length=100, verbose_name="host")),
                ("pid", models.BigIntegerField(default=0, verbose_name="process id")),
                (
                    "thread",
                    models.CharField(blank=True, max_length=100, verbose_name="thread or task"),
                ),
                ("label", models.CharField(blank=True, max_length=200, verbose_name="label")),
                ("metadata", models.JSONField(blank=True, default=dict, verbose_name="metadata")),
                ("key", distlocks.models.KeyField(max_length=250, verbose_name="key")),
                (
                    "mode",
                    models.CharField(
                        choices=[
                            ("exclusive", "exclusive"),
                            ("shared", "shared"),
                            ("permit", "permit"),
                            ("intention", "held further down"),
                        ],
                        max_length=10,
                        verbose_name="mode",
                    ),
                ),
                ("released_at", models.BigIntegerField(default=0, verbose_name="released at (µs)")),
            ],
            options={
                "verbose_name": "lock holder",
                "verbose_name_plural": "lock holders",
                "ordering": ["key", "fencing_token"],
                "indexes": [
                    models.Index(
                        fields=["key", "expires_at"], name="distlocks_lockholder_key_until"
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("key", "owner_id"), name="distlocks_lockholder_key_owner"
                    )
                ],
            },
        ),
    ]
