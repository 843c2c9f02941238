"""What is on a key, and who may have it."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from kazoo.exceptions import NoNodeError

from ...claims import EXCLUSIVE, MICROSECOND, Claim, Present, Refusal, refusal, to_us
from ...clock import lease_now
from ...waiting import MAX_SLEEP
from . import requests
from .nodes import Named, claim_in, place_in
from .records import Held, held
from .session import Interrupted, Session, Talk

# Seconds in which who is first in a queue takes the key that it can have: it loses its place
# then, for it may have died.
PASS_AFTER = 0.5
# Seconds after which the second in a queue looks whether the first goes on.
LOOK_AGAIN = 2.5
# Seconds between two in a queue who find that the first is idle.
APART = 0.1
# Seconds after which the servers' clock is read anew.
CLOCK_LASTS = 10.0
# So many things are remembered that were seen.
REMEMBERED = 10_000


class Place(NamedTuple):
    """Of somebody who waits."""

    named: Named
    path: str


@dataclass(frozen=True, slots=True)
class Look:
    """A key as it was at one moment, or within a few milliseconds."""

    name: str
    # Its last fencing token, and the version of its node; -1 if it has none.
    token: int
    version: int
    # Both change when a claim is added or removed.
    changes: int
    state: int
    # When its token was written, by the servers' clock.
    written_us: int
    held: list[Held]
    queue: list[Place]

    def place_of(self, owner_id: str) -> Place | None:
        return next((one for one in self.queue if one.named.owner_id == owner_id), None)

    def ahead_of(self, owner_id: str) -> list[Place]:
        """Who waits and came before the owner id."""
        ahead = []
        for one in self.queue:
            if one.named.owner_id == owner_id:
                break
            ahead.append(one)
        return ahead


class Seen:
    """Since when this process has seen things as they are, on the lease clock."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._since: OrderedDict[str, tuple[object, float]] = OrderedDict()

    def since(self, what: str, state: object) -> float:
        """When this state of it was first seen: now, if it was not."""
        now = lease_now()
        with self._mutex:
            known = self._since.get(what)
            if known is None or known[0] != state:
                known = self._since[what] = (state, now)
                self._since.move_to_end(what)
                if len(self._since) > REMEMBERED:
                    self._since.popitem(last=False)
            return known[1]


class Judge:
    """Tells when a claim is over, who may have a key, and whose turn it is.

    A claim is over when its owner has said so. Without that, there are two proofs, each of them
    enough that its holder, who trusts it for less than its ttl from before it was last extended,
    does so no more:

    - This process has seen it unchanged for its whole ttl, by the lease clock.
    - The session that it goes with is dead, and its ttl has passed by the servers' clock.

    The death of the session alone would be none: what a server has heard from a client reaches
    the leader, which counts, only with the next heartbeat between the two, and not at all if they
    are cut off from each other before it. And the servers' clock alone would be none either: the
    next leader is another machine. Both together fail only if both go wrong at once. Whoever takes
    over what is over does so only as long as the node has not been changed since it was read.
    """

    def __init__(self) -> None:
        self.seen = Seen()

    def is_over(self, found: Held, now_us: int) -> bool:
        """Whether the claim keeps nobody out any more."""
        return self.left_us(found, now_us) <= 0

    def left_us(self, found: Held, now_us: int) -> int:
        """Microseconds for which the claim keeps others out, if nobody extends it."""
        cooling = found.cooled_us - now_us
        if found.named.released:
            return cooling
        watched = lease_now() - self.seen.since(found.path, found.state)
        left = found.ttl_us - to_us(watched)
        if not found.trusted:
            left = min(left, found.expires_us - now_us)
        return max(left, cooling)

    def live(self, look: Look, now_us: int) -> list[Held]:
        """The claims on a key that are not over."""
        return [one for one in look.held if not self.is_over(one, now_us)]

    def refusal(
        self, claim: Claim, live: Sequence[Held], owner_id: str, now_us: int
    ) -> Refusal | None:
        """Why the owner id cannot have the claim beside these, which were live a moment ago."""
        others = [one for one in live if one.named.owner_id != owner_id or one.named.released]
        ends: list[int] = []
        modes = []
        for one in others:
            # None of them is passed over any more: who deletes what is over goes by the same list.
            ends.append(now_us + max(self.left_us(one, now_us), 1))
            modes.append(one.named.claim.mode)
        ends.sort()
        return refusal(
            claim,
            Present(
                now=now_us,
                exclusive_until=ends[-1] if EXCLUSIVE in modes else 0,
                others=len(ends),
                mode=modes[0] if modes else "",
                soonest=ends[0] if ends else 0,
                latest=ends[-1] if ends else 0,
            ),
        )

    def turn(self, look: Look, owner_id: str, now_us: int) -> Turn | None:
        """Who of those that wait goes before the owner id; None if it is its turn."""
        ahead = look.ahead_of(owner_id)
        if not ahead:
            return None
        first = ahead[0]
        named = first.named
        if self.refusal(named.claim, self.live(look, now_us), named.owner_id, now_us) is not None:
            alone = len(ahead) == 1
            # Not all in the same moment.
            return Turn(None, LOOK_AGAIN if alone else MAX_SLEEP * random.uniform(0.8, 1.0))
        idle = lease_now() - self.seen.since(look.name, (look.state, first.path))
        if idle >= PASS_AFTER:
            return Turn(first, 0.0)
        return Turn(None, PASS_AFTER - idle + len(ahead) * APART)


class Turn(NamedTuple):
    """Somebody else's turn."""

    # Who has not taken it, although it could: its place is for others.
    idle: Place | None
    # Seconds until it makes sense to look again.
    look_again: float


def root_version(stat: Any, session: Session) -> int:
    """How often keys have been deleted."""
    if stat is None:
        # Somebody has removed everything. It is made anew, with another session.
        session.die()
        raise Interrupted(f"{session.paths.root} is gone", in_doubt=False)
    return int(stat.version)


def look(
    talk: Talk, names: Sequence[str], *, queues: bool = True, catch_up: bool = False
) -> tuple[int, list[Look]]:
    """The version of the root and then, not before that, what is on these keys.

    One round trip while nobody has them, two otherwise. A server may lag behind the others;
    `catch_up` makes it see what was there when it was asked.
    """
    session = talk.session
    paths = session.paths
    sends = [requests.catch_up(paths.root)] if catch_up else []
    # Who only looks on would know less and less of what time it is there.
    tell_time = session.clock_age > CLOCK_LASTS
    if tell_time:
        sends.append(requests.write(paths.session(session.name)))
    sends.append(requests.exists(paths.root))
    for name in names:
        key = paths.key(name)
        sends += [requests.get(key), requests.children_and_stat(key)]
        if queues:
            sends.append(requests.children(paths.queue(name)))
    answers = iter(talk.ask(*sends))
    if catch_up:
        next(answers)
    if tell_time:
        session.note_own(next(answers))
    version = root_version(next(answers), session)
    read = [(next(answers), next(answers), next(answers) if queues else []) for _ in names]
    claims = _claims(
        talk,
        {
            name: parsed(found[0], name, claim_in)
            for name, (_, found, _) in zip(names, read, strict=True)
            if not isinstance(found, NoNodeError)
        },
    )
    return version, [
        _looked(name, node, children, queue, claims.get(name, []), paths.queue(name))
        for name, (node, children, queue) in zip(names, read, strict=True)
    ]


def parsed(
    nodes: Iterable[str], name: str, parse: Callable[[str, str], Named]
) -> list[tuple[str, Named]]:
    found = []
    for node in nodes:
        # What is none of ours is left alone.
        with suppress(ValueError):
            found.append((node, parse(name, node)))
    return found


def in_order(places: Iterable[tuple[str, Named]], queue_path: str) -> list[Place]:
    """Those who wait, first come first."""
    return [
        Place(named, f"{queue_path}/{node}")
        for node, named in sorted(places, key=lambda place: place[1].number)
    ]


def _looked(
    name: str, node: Any, children: Any, queue: Any, claims: list[Held], queue_path: str
) -> Look:
    places = [] if isinstance(queue, NoNodeError) else parsed(queue, name, place_in)
    waiting = in_order(places, queue_path)
    if isinstance(node, NoNodeError) or isinstance(children, NoNodeError):
        return Look(name, 0, -1, -1, 0, 0, [], waiting)
    (data, stat), (_, family) = node, children
    return Look(
        name=name,
        token=int(data),
        version=stat.version,
        changes=family.cversion,
        state=family.pzxid,
        written_us=stat.mtime * 1000,
        held=claims,
        queue=waiting,
    )


def _claims(talk: Talk, found: dict[str, list[tuple[str, Named]]]) -> dict[str, list[Held]]:
    """The claims of these nodes, by key, without those that have gone since."""
    session = talk.session
    paths = session.paths
    nodes = [
        (name, named, f"{paths.key(name)}/{node}")
        for name, pairs in found.items()
        for node, named in pairs
    ]
    if not nodes:
        return {}
    sessions = sorted({named.session for _, named, _ in nodes} - {session.name})
    # Of a session that is seen to be dead after a claim of it has been seen, there will be no more.
    answers = talk.ask(
        *[requests.get(path) for _, _, path in nodes],
        *[requests.exists(paths.session(one)) for one in sessions],
    )
    alive = {session.name} | {
        one for one, stat in zip(sessions, answers[len(nodes) :], strict=True) if stat is not None
    }
    claims: dict[str, list[Held]] = {}
    for (name, named, path), answer in zip(nodes, answers, strict=False):
        if not isinstance(answer, NoNodeError):
            claims.setdefault(name, []).append(
                held(named, path, *answer, trusted=named.session in alive)
            )
    # What went in between may have left its minimum hold in its place.
    after = [
        (name, named._replace(released=True), f"{path}.released")
        for (name, named, path), answer in zip(nodes, answers, strict=False)
        if isinstance(answer, NoNodeError) and not named.released
    ]
    if after:
        rests = talk.ask(*[requests.get(path) for _, _, path in after])
        for (name, named, path), answer in zip(after, rests, strict=True):
            if not isinstance(answer, NoNodeError):
                claims.setdefault(name, []).append(held(named, path, *answer, trusted=True))
    for several in claims.values():
        several.sort(key=lambda one: one.token)
    return claims


def microseconds_left(left_us: int) -> float:
    """As seconds, for a denial."""
    return max(left_us, 0) / MICROSECOND
