"""Freeing a key over its holder's head."""

from __future__ import annotations

import logging

from django.db import connections, transaction

from .backends.base import BaseBackend
from .claims import Holder
from .conf import DEFAULT_ALIAS
from .exceptions import NotSupported, StaleToken
from .handler import locks
from .keys import check_key
from .transactions import testcase_depth

logger = logging.getLogger("distlocks")


def force_release(key: str, *, backend: str = DEFAULT_ALIAS) -> Holder | None:
    """Free `key` whoever has it; who had it, or None when it was free.

    The holder learns that its lease is lost when it is next extended, at the latest after a third
    of its ttl, and its release does not touch the next holder. On the alias' GUARD_DATABASES its
    guarded transactions are refused from now on; one that is open already finishes first. Work
    that is not guarded goes on until its process looks.

    The guards go first. If one cannot be raised, because its database is down or the holder's
    transaction stays open, the database's error is raised and the key stays held: try again.
    Raises BackendUnavailable if the store does not answer, and NotSupported inside a transaction
    on one of them: its rollback would take back the guard and not the release.
    """
    store = locks[backend]
    for alias in store.params.guard_databases:
        if len(connections[alias].atomic_blocks) > testcase_depth(connections[alias]):
            raise NotSupported(
                f"force_release() must not be called inside a transaction on {alias!r}, whose "
                f"rollback would let the old holder in again. Call it outside atomic(); under "
                f"ATOMIC_REQUESTS, decorate the view with @transaction.non_atomic_requests.",
                keys=(key,),
            )
    # In the order of the keys, the key itself comes before all others that begin with it.
    found = store.holders(check_key(key), limit=1)
    if found and found[0].key == key:
        _refuse(store, found[0])
    holder = store.force_release(key)
    if holder is not None:
        logger.warning("Force-released: %s", holder)
        if not found or found[0].fencing_token != holder.fencing_token:
            # It changed hands in between.
            _refuse(store, holder)
    return holder


def _refuse(store: BaseBackend, holder: Holder) -> None:
    """Refuse guarded transactions of `holder` from now on."""
    from .guard import raise_fence

    for alias in () if holder.cooling_down else store.params.guard_databases:
        try:
            with transaction.atomic(using=alias):
                # One more than the holder's, and less than the next holder's.
                token = holder.fencing_token + 1
                raise_fence(connections[alias], store.prefix + holder.key, token, wait=30, idle=30)
        except StaleToken:
            # A later holder has been there already.
            continue
