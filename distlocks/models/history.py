"""What has happened to locks, and who waits for them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from .. import facts
from ..claims import EXCLUSIVE, from_us
from ..histogram import SIZE
from ..keys import MAX_LENGTH
from .fields import KeyField
from .locks import MODES

EVENT_KINDS = {
    facts.CONTENDED: _("contended"),
    facts.ACQUIRED: _("acquired after waiting"),
    facts.TIMED_OUT: _("timed out"),
    facts.EXPIRED: _("expired"),
    facts.TAKEN_OVER: _("taken over"),
    facts.LOST: _("lost"),
    facts.RELEASED_LATE: _("released late"),
    facts.FORCED: _("force-released"),
    facts.AUTHORITY: _("authority changed"),
    facts.CYCLE: _("waiting for each other"),
    facts.ERROR: _("store did not answer"),
}


class LockEvent(models.Model):
    """Something out of the ordinary that happened to a lock.

    Written in bulk, shortly after the fact; moments are by the clock of the process that tells.
    """

    at = models.DateTimeField(_("when"))
    kind = models.CharField(_("what"), max_length=20, choices=EVENT_KINDS)
    # The alias.
    backend = models.CharField(_("backend"), max_length=100)
    # Without the alias' KEY_PREFIX.
    key = KeyField(_("key"), max_length=MAX_LENGTH, blank=True)
    # What the key has in common with others: see history.patterns.
    pattern = KeyField(_("keys like it"), max_length=MAX_LENGTH, blank=True)
    # Whom it happened to: who waited, or who held the key.
    owner_id = models.CharField(_("owner id"), max_length=64, blank=True)
    fencing_token = models.BigIntegerField(_("fencing token"), null=True)
    host = models.CharField(_("host"), max_length=100, blank=True)
    pid = models.BigIntegerField(_("process id"), default=0)
    thread = models.CharField(_("thread or task"), max_length=100, blank=True)
    label = models.CharField(_("label"), max_length=200, blank=True)
    metadata = models.JSONField(_("metadata"), default=dict, blank=True)
    # Who was in the way, or whose lease was taken over: as the fields above, by name.
    other = models.JSONField(_("the other side"), default=dict, blank=True)
    waited = models.FloatField(_("waited (s)"), null=True)
    held = models.FloatField(_("held (s)"), null=True)
    reason = models.CharField(_("reason"), max_length=500, blank=True)

    class Meta:
        verbose_name = _("lock event")
        verbose_name_plural = _("lock history")
        ordering: ClassVar[list[str]] = ["-at", "-id"]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["at", "id"], name="distlocks_event_at"),
            models.Index(fields=["kind", "at", "id"], name="distlocks_event_kind"),
            models.Index(fields=["key", "at", "id"], name="distlocks_event_key"),
            models.Index(fields=["pattern", "at", "id"], name="distlocks_event_pattern"),
            models.Index(fields=["backend", "at", "id"], name="distlocks_event_backend"),
        ]

    def __str__(self) -> str:
        return f"{self.kind}: {facts.shown(self.key)}"


class LockRollup(models.Model):
    """What has been counted in one minute, or one hour, of locks whose keys are alike.

    Waits are those of grants, from the call to the grant, also when there was nothing to wait for;
    holds are those of released leases. Both are counted by their length, in buckets: see
    history.histogram.
    """

    backend = models.CharField(_("backend"), max_length=100)
    # Seconds since the epoch; and how many.
    began = models.BigIntegerField(_("began"))
    span = models.IntegerField(_("seconds"))
    # Empty: of all patterns together.
    pattern = KeyField(_("keys"), max_length=MAX_LENGTH, blank=True)
    # Nobody counts 600,000 things a second for an hour, so these are wide enough; half as wide as
    # others, they are added up in half the time.
    acquired = models.IntegerField(_("acquired"), default=0)
    # Of all requests, the granted ones and the others: found their key taken.
    contended = models.IntegerField(_("contended"), default=0)
    timed_out = models.IntegerField(_("timed out"), default=0)
    expired = models.IntegerField(_("expired"), default=0)
    lost = models.IntegerField(_("lost"), default=0)
    forced = models.IntegerField(_("force-released"), default=0)
    errors = models.IntegerField(_("errors"), default=0)
    # Events that could not be kept.
    dropped = models.IntegerField(_("dropped"), default=0)
    wait_seconds = models.FloatField(_("waited in all (s)"), default=0.0)
    hold_seconds = models.FloatField(_("held in all (s)"), default=0.0)

    class Meta:
        verbose_name = _("lock statistics")
        verbose_name_plural = _("lock statistics")
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["span", "began", "backend", "pattern"], name="distlocks_rollup_of"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.backend} {self.pattern or '*'}: {from_us(self.began * 1_000_000)}"


WAIT_COLUMNS = tuple([f"wait_{index}" for index in range(SIZE)])
HOLD_COLUMNS = tuple([f"hold_{index}" for index in range(SIZE)])
for _column in WAIT_COLUMNS + HOLD_COLUMNS:
    models.IntegerField(_column, default=0).contribute_to_class(LockRollup, _column)


class LockWaiter(models.Model):
    """Who has been waiting for a lock for longer than a moment, and what it holds meanwhile.

    Told by the waiting process every few seconds, whatever store the lock is in. Moments are
    microseconds since the epoch, by that process's clock.
    """

    owner_id = models.CharField(_("owner id"), max_length=64, primary_key=True)
    backend = models.CharField(_("backend"), max_length=100)
    # Of what it wants, the key in its way. Without the alias' KEY_PREFIX.
    key = KeyField(_("key"), max_length=MAX_LENGTH)
    mode = models.CharField(_("mode"), max_length=10, choices=MODES, default=EXCLUSIVE)
    host = models.CharField(_("host"), max_length=100, blank=True)
    pid = models.BigIntegerField(_("process id"), default=0)
    thread = models.CharField(_("thread or task"), max_length=100, blank=True)
    label = models.CharField(_("label"), max_length=200, blank=True)
    metadata = models.JSONField(_("metadata"), default=dict, blank=True)
    since = models.BigIntegerField(_("since (µs)"))
    # When it gives up; null if never.
    deadline = models.BigIntegerField(_("gives up at (µs)"), null=True)
    # Not heard of for longer than that, it is gone.
    valid_until = models.BigIntegerField(_("told until (µs)"))
    # The owner ids of those that keep it from the key.
    blockers = models.JSONField(_("kept out by"), default=list, blank=True)
    # What its thread or task holds: [{"owner_id", "backend", "keys"}]; and how many that are.
    holds = models.JSONField(_("holds"), default=list, blank=True)
    holding = models.IntegerField(_("how many"), default=0)

    class Meta:
        verbose_name = _("lock waiter")
        verbose_name_plural = _("lock waiters")
        ordering: ClassVar[list[str]] = ["since", "owner_id"]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["key", "since"], name="distlocks_waiter_key"),
        ]

    def __str__(self) -> str:
        return f"{facts.shown(self.key)}: {self.host} pid {self.pid} {self.thread}"
