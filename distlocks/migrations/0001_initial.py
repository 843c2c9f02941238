from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

import distlocks.models


def leave_room_in_pages(apps: Any, schema_editor: Any) -> None:
    """On PostgreSQL, let each page keep room for the next version of its rows.

    Locks are updated in place for ever. With room, the update stays on its page and touches no
    index, and the table does not grow.
    """
    if schema_editor.connection.vendor == "postgresql":
        table = schema_editor.quote_name(apps.get_model("distlocks", "Lock")._meta.db_table)
        schema_editor.execute(f"ALTER TABLE {table} SET (fillfactor = 70)")


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="Lock",
            fields=[
                (
                    "key",
                    distlocks.models.KeyField(
                        max_length=250, primary_key=True, serialize=False, verbose_name="key"
                    ),
                ),
                ("owner_id", models.CharField(blank=True, max_length=64, verbose_name="owner id")),
                ("fencing_token", models.BigIntegerField(verbose_name="fencing token")),
                ("acquired_at", models.BigIntegerField(verbose_name="acquired at (µs)")),
                ("expires_at", models.BigIntegerField(default=0, verbose_name="expires at (µs)")),
                (
                    "waiting_until",
                    models.BigIntegerField(default=0, verbose_name="awaited until (µs)"),
                ),
                ("host", models.CharField(blank=True, max_length=100, verbose_name="host")),
                ("pid", models.BigIntegerField(default=0, verbose_name="process id")),
                (
                    "thread",
                    models.CharField(blank=True, max_length=100, verbose_name="thread or task"),
                ),
                ("label", models.CharField(blank=True, max_length=200, verbose_name="label")),
                (
                    "metadata",
                    models.JSONField(blank=True, default=dict, verbose_name="metadata"),
                ),
            ],
            options={
                "verbose_name": "lock",
                "verbose_name_plural": "locks",
                "ordering": ["key"],
            },
        ),
        migrations.RunPython(leave_room_in_pages, migrations.RunPython.noop, elidable=False),
    ]
