"""The tables. No foreign keys; every query of ours names its database."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.expressions import Func
from django.utils.translation import gettext_lazy as _

from . import facts
from .claims import EXCLUSIVE, INTENTION, PERMIT, SHARED, from_us
from .histogram import SIZE
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
            from .backends.database.postgresql import US

            return f"(SELECT {US})", []
        if connection.vendor == "sqlite":
            from .backends.database.sqlite import US

            return f"(SELECT {US})", []
        if connection.vendor == "mysql":
            from .backends.database.mariadb import US

            return f"(SELECT {US})", []
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
