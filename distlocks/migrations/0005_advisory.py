from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

import distlocks.models


def leave_room_in_pages(apps: Any, schema_editor: Any) -> None:
    """On PostgreSQL, which alone uses the table: see the same in 0001_initial."""
    if schema_editor.connection.vendor == "postgresql":
        table = schema_editor.quote_name(apps.get_model("distlocks", "AdvisoryLock")._meta.db_table)
        schema_editor.execute(f"ALTER TABLE {table} SET (fillfactor = 70)")


class Migration(migrations.Migration):
    dependencies: ClassVar[list[tuple[str, str]]] = [("distlocks", "0004_authority")]

    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="AdvisoryLock",
            fields=[
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
                (
                    "name",
                    distlocks.models.KeyField(
                        max_length=315, primary_key=True, serialize=False, verbose_name="name"
                    ),
                ),
                (
                    "cools_until",
                    models.BigIntegerField(default=0, verbose_name="cools down until (µs)"),
                ),
                (
                    "shared_until",
                    models.BigIntegerField(
                        default=0, verbose_name="cools down after sharers until (µs)"
                    ),
                ),
                ("lock_id", models.BigIntegerField(verbose_name="number of the lock")),
                ("session", models.IntegerField(default=0, verbose_name="session")),
                (
                    "incarnation",
                    models.BigIntegerField(default=0, verbose_name="server started at (µs)"),
                ),
            ],
            options={
                "verbose_name": "advisory lock",
                "verbose_name_plural": "advisory locks",
                "ordering": ["name"],
            },
        ),
        migrations.RunPython(leave_room_in_pages, migrations.RunPython.noop, elidable=False),
    ]
