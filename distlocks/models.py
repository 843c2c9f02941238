"""The tables. No foreign keys; every query of ours names its database."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.expressions import Func
from django.utils.translation import gettext_lazy as _

from .claims import from_us
from .keys import MAX_LENGTH, MAX_PREFIX_LENGTH

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
    """The database server's clock in microseconds; this process's where it has no statement."""

    template = "%(expressions)s"
    arity = 0
    output_field = models.BigIntegerField()

    def as_sql(  # type: ignore[override]
        self, compiler: Any, connection: Any, **context: Any
    ) -> tuple[str, list[Any]]:
        if connection.vendor == "postgresql":
            from .backends.database.postgresql import US

            return US, []
        if connection.vendor == "sqlite":
            from .backends.database.sqlite import US

            return US, []
        if getattr(connection, "mysql_is_mariadb", False):
            from .backends.database.mariadb import US

            return US, []
        from .clock import current

        return "%s", [current().wall_us()]


class LockGuard(models.Model):
    """The highest fencing token that has entered a guarded transaction on this database, by key.

    Lives beside the data that it guards, whatever store the lock is in.
    """

    key = KeyField(_("key"), primary_key=True, max_length=MAX_LENGTH + MAX_PREFIX_LENGTH)
    # Carries the time at which its lock was acquired, in microseconds.
    token = models.BigIntegerField(_("fencing token"))

    class Meta:
        verbose_name = _("lock guard")
        verbose_name_plural = _("lock guards")

    def __str__(self) -> str:
        return f"{self.key}: {self.token}"


class LockQuerySet(models.QuerySet["Lock"]):
    """Locks by what they are now, by the clock of the database server."""

    def taken(self) -> LockQuerySet:
        """Keys that nobody can have now: held, or cooling down."""
        return self.filter(expires_at__gt=StoreClock())

    def held(self) -> LockQuerySet:
        """Keys with a holder whose lease has not expired."""
        return self.taken().exclude(owner_id="")

    def expired(self) -> LockQuerySet:
        """Keys whose holder has neither released nor extended them in time."""
        return self.filter(expires_at__lte=StoreClock()).exclude(owner_id="")


class Lock(models.Model):
    """A key, and who has it.

    Freed in place: the owner emptied, the expiry zeroed, the fencing token kept so that the next
    one is higher. Moments are microseconds since the epoch, by the database server's clock. What
    identifies the holder stays after the release, as the last one's.
    """

    key = KeyField(_("key"), primary_key=True, max_length=MAX_LENGTH + MAX_PREFIX_LENGTH)
    owner_id = models.CharField(_("owner id"), max_length=64, blank=True)
    fencing_token = models.BigIntegerField(_("fencing token"))
    acquired_at = models.BigIntegerField(_("acquired at (µs)"))
    # The latest expiry of any claim on the key. Not indexed: every renewal would have to write
    # the index too, and PostgreSQL could not update the row in place.
    expires_at = models.BigIntegerField(_("expires at (µs)"), default=0)
    # Until when somebody sleeps beside the key and wants to be told of its release.
    waiting_until = models.BigIntegerField(_("awaited until (µs)"), default=0)
    host = models.CharField(_("host"), max_length=100, blank=True)
    pid = models.BigIntegerField(_("process id"), default=0)
    thread = models.CharField(_("thread or task"), max_length=100, blank=True)
    label = models.CharField(_("label"), max_length=200, blank=True)
    metadata = models.JSONField(_("metadata"), default=dict, blank=True)

    objects = LockQuerySet.as_manager()

    class Meta:
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        # Walks the primary key.
        ordering: ClassVar[list[str]] = ["key"]

    def __str__(self) -> str:
        return self.key

    @property
    def acquired(self) -> datetime:
        """When the lock was last acquired."""
        return from_us(self.acquired_at)

    @property
    def expires(self) -> datetime | None:
        """When the key becomes free if nobody extends it; None when it was freed."""
        return from_us(self.expires_at) if self.expires_at else None

    @property
    def cooling_down(self) -> bool:
        """Whether the work is over and only the minimum hold keeps the key taken."""
        return not self.owner_id
