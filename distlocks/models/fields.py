"""A column for keys, and the clock of the database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.expressions import Func

if TYPE_CHECKING:
    CharField = models.CharField[str, str]
else:
    CharField = models.CharField


class KeyField(CharField):
    """A text column that compares exactly: case, accents and trailing spaces count."""

    # What each database needs for that; SQLite compares exactly as it is.
    collations: ClassVar[dict[str, str]] = {
        "postgresql": "C",
        "mysql": "utf8mb4_nopad_bin",
    }

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, Any]:
        parameters: dict[str, Any] = dict(super().db_parameters(connection))
        parameters["collation"] = self.collations.get(connection.vendor)
        return parameters

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        if connection.vendor == "postgresql":
            # The full name of varchar keeps Django from adding a second index for LIKE, which
            # the collation C makes superfluous.
            return f"character varying({self.max_length})"
        return super().db_type(connection)


class StoreClock(Func):
    """The database server's clock in microseconds; this process's where it has no statement.

    Read once per statement, and not for each row.
    """

    template = "%(expressions)s"
    arity = 0
    output_field = models.BigIntegerField()

    def as_sql(  # type: ignore[override]
        self, compiler: Any, connection: Any, **context: Any
    ) -> tuple[str, list[Any]]:
        if connection.vendor == "postgresql":
            from ..backends.database.postgresql import US

            return f"(SELECT {US})", []
        if connection.vendor == "sqlite":
            from ..backends.database.sqlite import US

            return f"(SELECT {US})", []
        if connection.vendor == "mysql":
            from ..backends.database.mariadb import US

            return f"(SELECT {US})", []
        from ..clock import current

        return "%s", [current().wall_us()]
