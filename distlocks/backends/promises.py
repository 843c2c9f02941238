"""What operators are told that a backend promises: see the README's tables."""

from django.utils.translation import gettext_lazy as _

DATABASE = _(
    "An efficiency lock: alone, it may admit two beside a holder that was paused. A correctness "
    "lock with lease.atomic(), or where the fencing token is checked. Leases are there as "
    "committed after a crash of the database, and as replicated after a failover. A dead holder's "
    "lock is had as its lease ends."
)
ADVISORY = _(
    "A correctness lock inside atomic(), with lease.atomic(), or where the fencing token is "
    "checked; else an efficiency lock, which may admit two beside a holder that was paused. After "
    "a crash of the database all leases are lost, and their keys taken until they would have ended."
)
REDIS = _(
    "An efficiency lock: alone, it may admit two beside a holder that was paused, and in a split "
    "brain without min-replicas-to-write. A correctness lock with lease.atomic(), or where the "
    "fencing token is checked. After a crash or a failover, nobody is granted a lock for MAX_TTL. "
    "First come, first served."
)
REDLOCK = _(
    "An efficiency lock: alone, it may admit two beside a holder that was paused. A correctness "
    "lock with lease.atomic(), or where the fencing token is checked. Grants while a majority of "
    "its servers is there; one that has forgotten does not vote for MAX_TTL and 2 s."
)
ZOOKEEPER = _(
    "An efficiency lock: alone, it may admit two beside a holder that was paused. A correctness "
    "lock with lease.atomic(), or where the fencing token is checked. Grants while a majority of "
    "its servers is there; leases are there as acknowledged after a crash or a failover. First "
    "come, first served."
)
FAST_PATH = _(
    "Promises what Redis does while Redis grants and what the database does otherwise, and "
    "excludes across both. When Redis fails, nobody is granted a lock for about mode_lease and "
    "MAX_TTL."
)
MEMORY = _(
    "Excludes the threads and tasks of one process and never admits two of them; other processes "
    "have locks of their own. All are gone with the process."
)
