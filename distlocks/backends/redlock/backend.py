"""The Redlock backend: the verbs, each decided by a majority of independent Redis servers."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ... import clock
from ...claims import (
    MICROSECOND,
    Denial,
    Extended,
    Extension,
    Grant,
    Holder,
    Request,
    Swept,
    to_us,
)
from ...conf import Params
from ...exceptions import BackendUnavailable
from ...keys import check_key
from ...waiting import lease_deadline
from .. import promises
from ..base import BaseBackend
from ..redis.backend import next_look
from ..redis.listing import holder_in, holders_in
from ..redis.records import holder, who
from ..redis.scripts import script
from ..redis.wire import packed
from .node import Node, of_each, real_now
from .quorum import free_in, majority, median, verdict
from .rounds import Crew, Round, why
from .settings import NAMES, Settings
from .told import agreed
from .votes import Ballot, Extensions

if TYPE_CHECKING:
    from django.core.checks import CheckMessage

T = TypeVar("T")

# Seconds for which servers are waited for that are late, before a common token is agreed upon.
RAISE_PATIENCE = 0.05
# How often those who have asked at once, so that nobody has got it, ask at once.
TRIES = 6
# About as many seconds as it takes to ask: then they are spread out.
ROUND_TRIP = 0.001


class RedlockBackend(BaseBackend):
    """Exclusive locks by a majority of independent Redis servers (6.2 or newer) or Valkey.

    OPTIONS: `servers`, a list of URLs, three or more, of servers that have nothing in common: no
    replicas of one another, best on different machines. `connection` holds more arguments for
    redis-py, `db` the database's number, `namespace` what all names in Redis begin with,
    `max_connections` how many connections a process may have to each server, `node_timeout` the
    seconds within which a server must answer, `clock_skew` the seconds by which the servers' clocks
    may differ.

    A lock is had while a majority says so, so that fewer than half of the servers may be down,
    unreachable or slow. The algorithm is Redlock (Redis documentation, "Distributed Locks with
    Redis"). Added to it are fencing tokens, which grow strictly over all grants of a key, and a
    guard: a server that has lost its memory does not vote for `MAX_TTL` and twice the `clock_skew`.

    Not promised: that nobody is let in beside a holder whose process was paused, which no lock
    service can promise (use lease.atomic()); any order among those who wait, who look again after
    up to 0.25 s. Shared locks, permits and tree keys are refused: with permits, each of three
    holders may have two of three servers.
    """

    supports_quarantine: ClassVar[bool] = True
    supports_sweep: ClassVar[bool] = True
    promise = promises.REDLOCK
    option_names: ClassVar[tuple[str, ...]] = NAMES

    def __init__(self, alias: str, params: Params) -> None:
        super().__init__(alias, params)
        self.settings = Settings(self)
        self.nodes = [Node(half) for half in self.settings.halves()]
        self._crew = Crew(self.nodes, alias)
        # Tries of one asker are told apart by number: what is under way of one must not touch the
        # next. Scripts compare them as numbers, exactly up to 53 bits.
        self._tries = itertools.count(1)
        self._may_be_ahead = b"%d" % to_us(self.settings.clock_skew)

    # Acquire

    def try_acquire(self, request: Request) -> Grant | Denial:
        deadline = lease_deadline(clock.lease_now(), request.ttl_us / MICROSECOND)
        for again in range(TRIES):
            ballot = self._ask(request, deadline)
            if ballot.is_granted:
                return Grant(
                    claims=request.claims,
                    owner_id=request.owner_id,
                    fencing_tokens=(ballot.token,) * len(request.claims),
                    acquired_us=ballot.acquired_us,
                    min_hold_us=request.min_hold_us,
                    expired=tuple(map(self.public_holder, ballot.expired)),
                )
            if ballot.is_contested:
                # One of those who ask at this moment is to get it.
                time.sleep(random.uniform(0, ROUND_TRIP * 2**again))
            elif not ballot.was_proposed_too_early:
                break
        if ballot.is_silent:
            raise self._no_majority(ballot.failures)
        return Denial(
            key=ballot.key or request.claims[0].key,
            remaining=ballot.remaining,
            holders=tuple(map(self.public_holder, ballot.holders)),
            reason=ballot.reason,
        )

    def _ask(self, request: Request, deadline: float) -> Ballot:
        """One try: all of it, or nothing is left of it."""
        ballot = Ballot(len(self.nodes), self._proposal())
        whose = request.owner_id.encode(), b"%d" % next(self._tries)
        keys = [key.encode() for key in request.keys]
        terms = b"%d" % request.hold_us, b"%d" % ballot.proposal, self._may_be_ahead
        with Round(self._crew) as together:
            together.send(script("redlock_take"), (*whose, *terms, who(request), *keys))
            for node, reply in together.answers():
                ballot.note(node, reply)
                if ballot.is_decided:
                    break
                if ballot.is_to_be_raised:
                    # What each has put on the keys counts: all are to have one token.
                    together.hurry(RAISE_PATIENCE)
            if ballot.is_to_be_raised:
                ballot.begin_to_raise()
                # Also on those whose first answer is still to come.
                words = (*whose, b"%d" % ballot.token, *keys)
                together.send(script("redlock_raise"), words, together.asked)
                for node, reply in together.answers():
                    ballot.note_raised(node, reply)
                    if ballot.is_granted:
                        break
            if not ballot.is_granted or clock.lease_now() >= deadline:
                ballot.give_up()
                # Free what was taken in vain, also where the answer is still to come.
                concerned = together.asked - (ballot.answered - ballot.takers)
                words = (*whose, b"", b"0", *keys)
                life = request.hold_us / MICROSECOND
                together.end(script("redlock_release"), words, life, concerned)
                waited_for = set(ballot.takers)
                for node, _ in together.answers() if waited_for else ():
                    waited_for.discard(node)
                    if not waited_for:
                        break
        return ballot

    def _proposal(self) -> int:
        """Which token to propose: the time by the servers' clocks."""
        ahead_us = self._ahead_us()
        if ahead_us is None:
            return clock.Clock().wall_us()
        return round(real_now() * MICROSECOND + ahead_us)

    def _ahead_us(self) -> float | None:
        """By how much most of the servers' clocks are ahead of the lease clock, if that is
        known."""
        known = [node.ahead_us for node in self.nodes if node.ahead_us is not None]
        return median(known) if len(known) >= majority(len(self.nodes)) else None

    # Release and extend

    def release(self, grant: Grant) -> bool:
        since = 0.0
        if (ahead_us := self._ahead_us()) is not None:
            since = (grant.acquired_us - ahead_us) / MICROSECOND - self.settings.tokens_ahead - 1
        token, min_hold = b"%d" % grant.fencing_tokens[0], b"%d" % grant.min_hold_us
        return self._end(grant, token, min_hold, since)

    def abandon(self, request: Request) -> None:
        self._end(request, b"", b"0", 0.0)

    def _end(self, what: Grant | Request, token: bytes, min_hold: bytes, since: float) -> bool:
        """End it on every server that has been asked for anything since a moment on the lease
        clock; whether it was still held, for all that can be known."""
        keys = [key.encode() for key in what.keys]
        words = (what.owner_id.encode(), b"", token, min_hold, *keys)
        yes = no = 0
        failures: dict[Node, Exception] = {}
        decided: bool | None = None
        with Round(self._crew) as together:
            concerned = {node for node in self.nodes if node.asked_at >= since}
            life = self.params.max_ttl
            together.end(script("redlock_release"), words, life, concerned)
            for node, reply in together.answers():
                if isinstance(reply, Exception):
                    failures[node] = reply
                elif b"0" in reply:
                    no += 1
                else:
                    yes += 1
                decided = verdict(len(self.nodes), yes, no)
                if decided is not None:
                    break
        if decided is None and len(failures) > len(self.nodes) - majority(len(self.nodes)):
            raise self._no_majority(failures)
        # While it may have been, it was: whether it has expired is the lease's own to know.
        return decided is not False

    def extend(self, extensions: Sequence[Extension]) -> Extended:
        votes = Extensions(len(self.nodes), extensions)
        for words, owners in votes.batches():
            with Round(self._crew) as together:
                together.send(script("redlock_extend"), words)
                for node, reply in together.answers():
                    votes.note(node, owners, reply)
                    if all(votes.verdict(owner) is not None for owner in owners):
                        break
            if votes.has_no_majority:
                # The others would wait as long, in vain.
                break
        if votes.is_silent:
            raise self._no_majority(votes.failures)
        return votes.result()

    def _no_majority(self, failures: Mapping[Node, Exception]) -> BackendUnavailable:
        return BackendUnavailable(
            f"{len(failures)} of the {len(self.nodes)} Redis servers of the lock backend "
            f"{self.alias!r} have no say, so there is no majority: {why(failures)}."
        )

    # Looking and clearing up

    def holders(self, prefix: str = "", *, limit: int | None = None) -> list[Holder]:
        name = (self.prefix + prefix).encode()

        def told(node: Node) -> list[Holder]:
            found = holders_in(node.servers, node.hash_name, name)
            return [holder(fields, now) for fields, now in found]

        found = [self.public_holder(one) for one in self._agreed(self._of_most(told))]
        found.sort(key=lambda one: (check_key(one.key), one.fencing_token))
        return found[:limit]

    def holders_of(self, key: str, *, limit: int | None = None) -> list[Holder]:
        name = (self.prefix + key).encode()

        def told(node: Node) -> list[Holder]:
            found = holder_in(node.servers, node.hash_name, name)
            return [holder(*found)] if found else []

        return [self.public_holder(one) for one in self._agreed(self._of_most(told))][:limit]

    def force_release(self, key: str) -> list[Holder]:
        words = packed(((self.prefix + key).encode(),))

        def free(node: Node) -> list[Holder]:
            now, *held = node.servers.run(node.hash_name, script("redlock_force"), 1, words)
            return [holder(fields, int(now)) for fields in held]

        return [self.public_holder(one) for one in self._agreed(self._of_most(free))]

    def _agreed(self, told: Sequence[Sequence[Holder]]) -> Iterator[Holder]:
        """Whom a majority knows to hold something, with those servers that did not answer."""
        silent = len(self.nodes) - len(told)
        return agreed(len(self.nodes), itertools.chain.from_iterable(told), silent)

    def sweep(
        self, *, older_than: float, batch_size: int, dry_run: bool = False
    ) -> Iterator[Swept]:
        def swept(node: Node) -> Swept:
            cursor, examined, deleted, expired = b"0", 0, 0, []
            while True:
                words = packed((cursor, b"%d" % batch_size, b"1" if dry_run else b"0"))
                cursor, seen, gone, now, ended = node.servers.run(
                    node.hash_name, script("redlock_sweep"), 3, words
                )
                examined, deleted = examined + seen, deleted + gone
                expired += [holder(fields, int(now)) for fields in ended]
                if cursor == b"0":
                    return Swept(examined=examined, expired=tuple(expired), deleted=deleted)

        done = self._of_most(swept)
        expired = self._agreed([one.expired for one in done])
        # What most of them have. The records of one lock are counted once.
        yield Swept(
            examined=round(median([one.examined for one in done])),
            expired=tuple(map(self.public_holder, expired)),
            deleted=round(median([one.deleted for one in done])),
        )

    def quarantine(self, *, end: bool = False) -> float:
        ahead = b"%d" % to_us(self.settings.tokens_ahead)
        words = packed((b"1" if end else b"0", ahead))
        left = self._of_most(
            lambda node: node.servers.run(node.hash_name, script("redlock_quarantine"), 2, words)
        )
        return free_in(len(self.nodes), [one / MICROSECOND for one in left])

    def _of_most(self, verb: Callable[[Node], T]) -> list[T]:
        """What the verb returns of each server; BackendUnavailable if most do not answer."""
        found, failed = of_each(self.nodes, verb)
        if len(found) < majority(len(self.nodes)):
            raise self._no_majority(failed)
        return list(found.values())

    # Waiting

    def wait(self, denial: Denial, until: float, attempt: int) -> None:
        clock.current().wait(threading.Event(), next_look(until, attempt))

    async def await_(self, denial: Denial, until: float, attempt: int) -> None:
        never = asyncio.get_running_loop().create_future()
        await clock.current().wait_async(never, next_look(until, attempt))

    # Housekeeping

    def check(self) -> list[CheckMessage]:
        from .checks import check_settings

        return check_settings(self)

    def check_store(self) -> list[CheckMessage]:
        from .checks import check_servers

        return check_servers(self)

    def close(self) -> None:
        for node in self.nodes:
            node.thread.close(wait=False)
            node.servers.close()
