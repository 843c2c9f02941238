from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

import distlocks.models


class Migration(migrations.Migration):
    dependencies: ClassVar[list[tuple[str, str]]] = [("distlocks", "0001_initial")]
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="LockGuard",
            fields=[
                (
                    "key",
                    distlocks.models.KeyField(
                        max_length=250, primary_key=True, serialize=False, verbose_name="key"
                    ),
                ),
                ("token", models.BigIntegerField(verbose_name="fencing token")),
            ],
            options={"verbose_name": "lock guard", "verbose_name_plural": "lock guards"},
        ),
    ]
