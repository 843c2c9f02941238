"""Signals, sent with send_robust() from a thread of distlocks' own, shortly after the fact.

The sender is the backend's class. Every signal carries `alias` and `keys`; the handlers of one
process run one after the other.
"""

from __future__ import annotations

from django.dispatch import Signal

# A request was granted. Arguments: alias, keys, owner_id, fencing_tokens, waited (seconds), label.
lock_acquired = Signal()
# A request was not granted in time. Arguments: alias, keys, holders, waited (seconds), label.
lock_denied = Signal()
# A lease was given back. Arguments: alias, keys, owner_id, fencing_tokens, ours (bool), label.
lock_released = Signal()
# A lease ended before its holder was done. Arguments: alias, keys, owner_id, fencing_tokens,
# reason, label.
lease_lost = Signal()
# Leases were found past their expiry: by a sweep or, where the store tells (not SQLite, MariaDB and
# advisory locks), by who took them over. Arguments: alias, keys, holders.
locks_expired = Signal()
# A lease is not going to be extended any more and ends at its deadline. Arguments: alias, keys,
# owner_id, fencing_tokens, remaining (seconds), reason, label.
lease_ending = Signal()
# Processes wait for each other's locks in a circle, and none of them can go on. Sent once, in one
# of them. Arguments: alias, keys (those waited for), waiters (distlocks.models.LockWaiter, one for
# each process, thread or task in the circle).
cycle_found = Signal()
# Another store grants the locks of a fast path from now on, or none while that changes; sent in
# each process that notices. Arguments: alias (no keys), authority ("redis", "drain", "db" or
# "closing"), epoch, reason, made_here (whether this process has brought it about).
authority_changed = Signal()
