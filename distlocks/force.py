"""Freeing a key over its holder's head."""

from __future__ import annotations

import logging

from django.db import connections, transaction

from . import facts, logs
from .backends.base import BaseBackend
from .claims import PERMIT, Holder
from .conf import DEFAULT_ALIAS
from .exceptions import BackendUnavailable, NotSupported, StaleToken
from .facts import Who
from .handler import locks
from .history.journal import journal
from .keys import Key, check_key
from .transactions import testcase_depth

# So many holders of a key are refused before it is freed, the others right after.
FIRST_HOLDERS = 100


def force_release(
    key: Key, *, backend: str = DEFAULT_ALIAS, reason: str = "", by: str = ""
) -> list[Holder]:
    """Free `key` from all who have it; who had it, empty when it was free.

    A holder learns that its lease is lost when it is next extended, at the latest after a third
    of its ttl, and its release does not touch the next holder. Freeing a key above tree keys takes
    all that is held below it from its holders. On the alias' GUARD_DATABASES their guarded
    transactions are refused from now on; one that is open already finishes first. Work that is not
    guarded goes on until its process looks.

    The guards go first. If one cannot be raised, because its database is down or the holder's
    transaction stays open, the database's error is raised and the key stays held: try again.
    Raises BackendUnavailable if the store does not answer, and NotSupported inside a transaction
    on one of them: its rollback would take back the guard and not the release.

    Where the key changes hands in between, its last holder's guard comes after: an error of that
    one leaves the key free, and says who had it as its attribute `released`.

    `reason` and `by` (who has decided it) are kept in the history and the log.
    """
    store = locks[backend]
    # From a terminal or a form, and to be kept and logged.
    reason, by = facts.shown_text(reason), facts.shown_text(by)
    for alias in store.params.guard_databases:
        if len(connections[alias].atomic_blocks) > testcase_depth(connections[alias]):
            raise NotSupported(
                f"force_release() must not be called inside a transaction on {alias!r}, whose "
                f"rollback would let the old holder in again. Call it outside atomic(); under "
                f"ATOMIC_REQUESTS, decorate the view with @transaction.non_atomic_requests.",
                keys=(key,),
            )
    name = check_key(key)
    try:
        there = store.holders_of(name, limit=FIRST_HOLDERS)
    except BackendUnavailable as error:
        # It was only looked at.
        error.in_doubt = False
        raise
    refused = _refuse(store, name, there, 0)
    held = store.force_release(name)
    for holder in held:
        told = "".join([f" by {by}" if by else "", f": {reason}" if reason else ""])
        logs.event(
            logging.WARNING,
            facts.FORCED,
            store.alias,
            (holder.key,),
            "Force-released%s: %s",
            told,
            holder,
            by=by,
            reason=reason,
            **logs.of(holder),
        )
        journal.note(
            facts.FORCED,
            store,
            (holder.key,),
            who=Who.of(holder),
            other=Who(label=by) if by else None,
            fencing_token=holder.fencing_token,
            reason=reason,
        )
    # It may have changed hands in between.
    try:
        _refuse(store, name, held, refused)
    except Exception as error:
        # Or its caller would take the key for held.
        error.released = held  # type: ignore[attr-defined]
        raise
    return held


def _refuse(store: BaseBackend, name: str, holders: list[Holder], refused: int) -> int:
    """Refuse guarded transactions of `holders` from now on, whose tokens are past `refused`; up
    to which token they are refused now."""
    from .fences import raise_fence

    tokens = [
        holder.fencing_token
        for holder in holders
        # Permits enter no guard.
        if not holder.cooling_down and holder.mode != PERMIT
    ]
    highest = max(tokens, default=0)
    for alias in store.params.guard_databases if highest > refused else ():
        try:
            with transaction.atomic(using=alias):
                # One more than the holders', and less than the next holder's.
                raise_fence(connections[alias], store.prefix + name, highest + 1, wait=30, idle=30)
        except StaleToken:
            # A later holder has been there already.
            continue
    return max(highest, refused)
