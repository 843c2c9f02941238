"""What may still be done: which token may enter a guard, and which store may grant."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..keys import MAX_LENGTH, MAX_PREFIX_LENGTH
from .fields import KeyField


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


PHASES = {
    "redis": _("Redis grants"),
    "drain": _("nobody grants until the leases from Redis have ended"),
    "db": _("the database grants"),
    "closing": _("nobody grants until the leases from the database have ended"),
}


class LockAuthority(models.Model):
    """Which store may grant the locks of a fast path, agreed on by all its processes.

    Changed only by comparing epoch and phase first. A row that is lost, or put back to what it was,
    may let two stores grant at once.
    """

    # Of the locks' names in Redis, and their KEY_PREFIX.
    name = KeyField(_("name"), primary_key=True, max_length=MAX_LENGTH + MAX_PREFIX_LENGTH)
    # Goes up when the authority leaves a store, and with each try to return to Redis.
    epoch = models.BigIntegerField(_("epoch"))
    phase = models.CharField(_("authority"), max_length=10, choices=PHASES)
    # By the database server's clock, in microseconds.
    since = models.BigIntegerField(_("since (µs)"))
    why = models.CharField(_("why"), max_length=500, blank=True)
    # The longest of all its processes; microseconds.
    mode_lease = models.BigIntegerField(_("mode lease (µs)"))
    max_ttl = models.BigIntegerField(_("longest lease (µs)"))
    # Redis must have been healthy for so long before it is returned to; and when it was last not.
    patience = models.BigIntegerField(_("patience (µs)"))
    unhealthy_at = models.BigIntegerField(_("Redis last seen unhealthy at (µs)"), default=0)
    # By an operator: the database keeps the authority until told otherwise.
    pinned = models.BooleanField(_("pinned"), default=False)
    # By an operator: leases of the database are no longer extended, so that it can be left.
    ends_leases = models.BooleanField(_("ends leases"), default=False)

    class Meta:
        verbose_name = _("lock authority")
        verbose_name_plural = _("lock authorities")
        ordering: ClassVar[list[str]] = ["name"]

    def __str__(self) -> str:
        return self.name
