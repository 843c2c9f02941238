"""Who has what, in the tables of the backends that keep their locks in a database."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..claims import EXCLUSIVE, INTENTION, PERMIT, SHARED, from_us
from ..keys import MAX_LENGTH, MAX_PREFIX_LENGTH
from .fields import KeyField, StoreClock


class LockQuerySet(models.QuerySet["Lock"]):
    """Locks by what they are now, by the clock of the database server."""

    def taken(self) -> LockQuerySet:
        """Keys that nobody can have now: held, or cooling down."""
        return self.filter(expires_at__gt=StoreClock())

    def held(self) -> LockQuerySet:
        """Keys that somebody has exclusively whose lease has not expired."""
        return self.taken().exclude(owner_id="")

    def expired(self) -> LockQuerySet:
        """Keys whose holder has neither released nor extended them in time."""
        return self.filter(expires_at__lte=StoreClock()).exclude(owner_id="")


class Claimed(models.Model):
    """Who has a claim, and until when.

    Moments are microseconds since the epoch, by the database server's clock.
    """

    owner_id = models.CharField(_("owner id"), max_length=64, blank=True)
    fencing_token = models.BigIntegerField(_("fencing token"))
    acquired_at = models.BigIntegerField(_("acquired at (µs)"))
    expires_at = models.BigIntegerField(_("expires at (µs)"), default=0)
    host = models.CharField(_("host"), max_length=100, blank=True)
    pid = models.BigIntegerField(_("process id"), default=0)
    thread = models.CharField(_("thread or task"), max_length=100, blank=True)
    label = models.CharField(_("label"), max_length=200, blank=True)
    metadata = models.JSONField(_("metadata"), default=dict, blank=True)

    class Meta:
        abstract = True

    @property
    def acquired(self) -> datetime:
        """When the claim was granted."""
        return from_us(self.acquired_at)

    @property
    def expires(self) -> datetime | None:
        """When the claim ends if nobody extends it; None when it was released."""
        return from_us(self.expires_at) if self.expires_at else None


MODES = {
    EXCLUSIVE: _("exclusive"),
    SHARED: _("shared"),
    PERMIT: _("permit"),
    INTENTION: _("held further down"),
}


class Lock(Claimed):
    """A key, and who has it exclusively.

    Freed in place: the owner emptied, the expiry zeroed, the fencing token kept so that the next
    one is higher. What identifies the holder stays after the release, as the last one's. Where
    several have claims on the key, the mode is theirs and the owner is empty: they have a row
    each in LockHolder, and `expires_at` is the latest of theirs. It is not indexed: every renewal
    would have to write the index too, and PostgreSQL could not update the row in place.
    """

    key = KeyField(_("key"), primary_key=True, max_length=MAX_LENGTH + MAX_PREFIX_LENGTH)
    mode = models.CharField(
        _("mode"), max_length=10, choices=MODES, default=EXCLUSIVE, db_default=EXCLUSIVE
    )
    # Until when somebody sleeps beside the key and wants to be told of its release.
    waiting_until = models.BigIntegerField(_("awaited until (µs)"), default=0)
    # Who waits for what those that have the key now would keep from it for ever: until when
    # others must let it pass.
    reserved_by = models.CharField(
        _("reserved by"), max_length=64, blank=True, default="", db_default=""
    )
    reserved_until = models.BigIntegerField(_("reserved until (µs)"), default=0, db_default=0)

    objects = LockQuerySet.as_manager()

    class Meta:
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        # Walks the primary key.
        ordering: ClassVar[list[str]] = ["key"]
        permissions: ClassVar[list[Any]] = [("force_release_lock", _("Can force-release locks"))]

    def __str__(self) -> str:
        return self.key

    @property
    def cooling_down(self) -> bool:
        """Whether the work is over and only the minimum hold keeps the key taken."""
        return self.mode == EXCLUSIVE and not self.owner_id


class LockHolder(Claimed):
    """One of several claims on a key: shared, a permit, or the intention above a tree key's.

    Written only by who has the key's row in Lock in its hands.
    """

    key = KeyField(_("key"), max_length=MAX_LENGTH + MAX_PREFIX_LENGTH)
    mode = models.CharField(_("mode"), max_length=10, choices=MODES)
    # By its owner; it then lasts until its minimum hold has passed, and its row for a while longer.
    released_at = models.BigIntegerField(_("released at (µs)"), default=0)

    class Meta:
        verbose_name = _("lock holder")
        verbose_name_plural = _("lock holders")
        ordering: ClassVar[list[str]] = ["key", "fencing_token"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["key", "owner_id"], name="distlocks_lockholder_key_owner"
            ),
        ]
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["key", "expires_at"], name="distlocks_lockholder_key_until"),
        ]

    def __str__(self) -> str:
        return f"{self.key}: {self.mode}"


class AdvisoryLock(Claimed):
    """A key whose lock is an advisory one of PostgreSQL's, and who had it last.

    Who has it *now* only the server's list of locks tells: a release frees the lock and leaves the
    row. Sharers have a row each, whose name is the key's, a record separator, and the owner id;
    the key's own row keeps the token for all. `expires_at` is when the lease ends unless it is
    extended. Used on PostgreSQL only.
    """

    name = KeyField(_("name"), primary_key=True, max_length=MAX_LENGTH + MAX_PREFIX_LENGTH + 65)
    # Whatever became of who had the key, nobody has it before; and nobody exclusively.
    cools_until = models.BigIntegerField(_("cools down until (µs)"), default=0)
    shared_until = models.BigIntegerField(_("cools down after sharers until (µs)"), default=0)
    # The number of the lock, and the server's process id of the session that took it.
    lock_id = models.BigIntegerField(_("number of the lock"))
    session = models.IntegerField(_("session"), default=0)
    # When that server was started: one that has taken its place, or was started again, knows of no
    # lock, and who had one may not know that yet.
    incarnation = models.BigIntegerField(_("server started at (µs)"), default=0)

    class Meta:
        verbose_name = _("advisory lock")
        verbose_name_plural = _("advisory locks")
        ordering: ClassVar[list[str]] = ["name"]

    def __str__(self) -> str:
        return self.name.replace("\x1e", ": ")
