"""How a request is granted or denied, and how who is denied waits for its turn."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kazoo.exceptions import NoNodeError

from ...claims import Claim, Denial, Grant, Holder, Request, next_token
from .nodes import Named, claim_in, place_in
from .records import Held, about, claim_data, holder, place_data
from .requests import children, children_and_stat, create, create_place, delete, ensure, get
from .session import Talk, Transaction
from .table import Look, Place, in_order, look, microseconds_left, parsed

if TYPE_CHECKING:
    from .backend import ZooKeeperBackend

# Holders that a denial names, at most.
NAMED = 100
# Seconds until who has been outrun all the time may try again.
OUTRUN = 0.05


def attempt(backend: ZooKeeperBackend, talk: Talk, request: Request) -> Grant | Denial:
    """Grant the request or deny it."""
    catch_up = False
    while time.monotonic() < talk.give_up:
        root, looks = look(talk, request.keys, catch_up=catch_up)
        if any(one.version < 0 for one in looks):
            _make_keys(talk, [one.name for one in looks if one.version < 0])
            continue
        now_us = talk.session.now_us()
        # Once for all: what has been passed over is deleted, as it was seen, by the grant.
        alive = {one.name: backend.judge.live(one, now_us) for one in looks}
        found = _first_refusal(backend, request, looks, now_us, alive)
        if isinstance(found, Place):
            talk.ask(delete(found.path))
            continue
        if found is not None:
            if not (request.waits or catch_up):
                # A server that lags behind the others tells of holders that have gone. Who waits
                # finds out: its place is a write, and its watch is of the version that was seen.
                catch_up = True
                continue
            return _denied(talk, request, looks, found)
        grant = _grant(backend, talk, request, root, looks, now_us, alive)
        if grant is not None:
            return grant
        # Another was faster, and this server may not know of it yet. Not all again at once.
        time.sleep(random.uniform(0, OUTRUN / 5))
        catch_up = True
    return Denial(key=request.keys[0], remaining=OUTRUN, reason="Others were faster each time.")


def _make_keys(talk: Talk, names: Sequence[str]) -> None:
    paths = talk.session.paths
    made = talk.ask(*[create(paths.key(name), b"0") for name in names])
    if any(isinstance(answer, NoNodeError) for answer in made):
        # Somebody has cleared up.
        talk.ask(ensure(paths.locks))


def _first_refusal(
    backend: ZooKeeperBackend,
    request: Request,
    looks: list[Look],
    now_us: int,
    alive: dict[str, list[Held]],
) -> Denial | Place | None:
    """Why the request is denied, or who has not taken its turn and loses its place; None if it can
    be granted."""
    owner_id = request.owner_id
    for claim, there in zip(request.claims, looks, strict=True):
        if _own(backend, there, request, now_us):
            continue
        remaining, reason = 0.0, ""
        refused = backend.judge.refusal(claim, alive[there.name], owner_id, now_us)
        if refused is not None:
            remaining = microseconds_left(refused.remaining)
        turn = backend.judge.turn(there, owner_id, now_us)
        if turn is not None:
            if turn.idle is not None:
                return turn.idle
            reason = "Others have waited for longer."
            remaining = turn.look_again
        if refused is not None or turn is not None:
            return Denial(
                key=claim.key,
                remaining=remaining,
                holders=_shown(backend, there, owner_id, now_us),
                version=there.changes,
                reason=reason,
            )
    return None


def _shown(
    backend: ZooKeeperBackend, there: Look, owner_id: str, now_us: int
) -> tuple[Holder, ...]:
    key = backend.public_key(there.name)
    return tuple(
        [
            holder(one, key, now_us)
            for one in backend.judge.live(there, now_us)[:NAMED]
            if one.named.owner_id != owner_id or one.named.released
        ]
    )


def _own(backend: ZooKeeperBackend, there: Look, request: Request, now_us: int) -> Held | None:
    """The claim that an earlier try of the request, whose answer was lost, has got."""
    for one in there.held:
        named = one.named
        if named.owner_id == request.owner_id and one.trusted and not named.released:
            return None if backend.judge.is_over(one, now_us) else one
    return None


def _grant(
    backend: ZooKeeperBackend,
    talk: Talk,
    request: Request,
    root: int,
    looks: list[Look],
    now_us: int,
    alive: dict[str, list[Held]],
) -> Grant | None:
    """Take the keys as they were seen; None if one of them is not so any more."""
    session = talk.session
    paths = session.paths
    changes = Transaction(talk)
    # A key that was deleted and made again would look as if nothing had happened.
    changes.check(paths.root, root)
    tokens, acquired, taken = [], [], []
    expired: list[Held] = []
    for claim, there in zip(request.claims, looks, strict=True):
        own = _own(backend, there, request, now_us)
        if own is not None and own.named.session == session.name:
            changes.set(own.path, own.data(ttl_us=request.ttl_us), own.version)
            tokens.append(own.token)
            acquired.append(own.acquired_us)
            taken.append(own.path)
            continue
        token = next_token(there.token, now_us)
        changes.set(paths.key(there.name), b"%d" % token, there.version)
        for one in there.held:
            mine = one.named.owner_id == request.owner_id and not one.named.released
            if mine or one not in alive[there.name]:
                changes.delete(one.path, one.version)
                if not (mine or one.named.released):
                    expired.append(one)
        named = Named(claim, request.owner_id, session.name)
        path = f"{paths.key(there.name)}/{named.node}"
        changes.create(
            path, claim_data(token, now_us, request.ttl_us, request.min_hold_us, about(request))
        )
        tokens.append(token)
        acquired.append(now_us)
        taken.append(path)
    for there in looks:
        place = there.place_of(request.owner_id)
        if place is not None:
            changes.delete(place.path)
    (answer,) = talk.ask(changes.send)
    outcome = changes.outcome(answer)
    if outcome.failure is not None:
        return None
    session.note_lease(request.owner_id, request.ttl_us)
    for path in taken:
        backend.judge.seen.since(path, outcome.state)
    return Grant(
        claims=request.claims,
        owner_id=request.owner_id,
        fencing_tokens=tuple(tokens),
        acquired_us=acquired[0],
        min_hold_us=request.min_hold_us,
        expired=tuple(
            [holder(one, backend.public_key(one.named.claim.key), now_us) for one in expired]
        ),
        store=session.name,
    )


# Waiting


def _denied(talk: Talk, request: Request, looks: list[Look], denial: Denial) -> Denial:
    """The denial, and a place in the queue of the key that is in the way, and in no other: who
    stood in several could wait for another who waits for it."""
    queued = ""
    for there in looks:
        place = there.place_of(request.owner_id)
        if request.waits and there.name == denial.key:
            queued = request.owner_id
            if place is None:
                claim = next(one for one in request.claims if one.key == denial.key)
                _join(talk, claim, request)
        elif place is not None:
            talk.ask(delete(place.path))
    return replace(denial, queued=queued)


def _join(talk: Talk, claim: Claim, request: Request) -> None:
    """Take a place at the end of the queue."""
    paths = talk.session.paths
    queue = paths.queue(claim.key)
    named = Named(claim, request.owner_id, "")

    place = create_place(f"{queue}/{named.node}", place_data(request))
    while isinstance(talk.ask(place)[0], NoNodeError):
        talk.ask(ensure(queue))


def what_to_watch(denial: Denial, talk: Talk) -> str | None:
    """The node whose change ends the wait; None if it makes sense to try again now."""
    paths = talk.session.paths
    if not denial.queued:
        return paths.key(denial.key)
    queue = paths.queue(denial.key)
    (nodes,) = talk.ask(children(queue))
    if isinstance(nodes, NoNodeError):
        return None
    before = paths.key(denial.key)
    for place in in_order(parsed(nodes, denial.key, place_in), queue):
        if place.named.owner_id == denial.queued:
            return before
        before = place.path
    # The session in which it stood there is gone.
    return None


def watch(backend: ZooKeeperBackend, denial: Denial, path: str, talk: Talk) -> bool:
    """Have who sleeps beside the path woken when the node changes; False if it has since."""
    session = talk.session
    key = session.paths.key(denial.key)
    watcher = session.watcher(path, backend.wakeups.wake)
    if path != key:
        (answer,) = talk.ask(get(path, watcher))
        return not isinstance(answer, NoNodeError)
    (answer,) = talk.ask(children_and_stat(key, watcher))
    if isinstance(answer, NoNodeError) or answer[1].cversion != denial.version:
        return False
    # The death of a holder is none of the key's changes.
    claims = parsed(answer[0], denial.key, claim_in)
    others = {named.session for _, named in claims} - {session.name}
    for one in sorted(others):
        mark = session.paths.session(one)
        told = session.watcher(mark, lambda _: backend.wakeups.wake_all())
        talk.ask(get(mark, told))
    return True
