"""What the servers have answered so far, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...claims import MICROSECOND, Extended, Extension, Holder
from ..redis.records import holder
from ..redis.wire import Reply
from .node import Node
from .quorum import Outcome, free_in, majority, most_common, outcome, verdict
from .rounds import why
from .told import agreed

# So many claims are extended by one script: a longer one would keep others waiting.
EXTENDED_AT_ONCE = 200


class Ballot:
    """One try to take some keys on a majority of the servers."""

    def __init__(self, nodes: int, proposal: int) -> None:
        self._nodes = nodes
        self.proposal = proposal
        # What those that took the keys have put on them.
        self._values: dict[Node, int] = {}
        # Those on which somebody else has one of them.
        self._taken: dict[Node, Holder] = {}
        # Seconds until those vote again that have lost their memory.
        self._quarantined: dict[Node, float] = {}
        # Those for whose clocks the proposal is too far ahead.
        self._too_early: set[Node] = set()
        self.failures: dict[Node, Exception] = {}
        self._expired: list[Holder] = []
        self._outcome = Outcome.OPEN
        self._raised: set[Node] = set()
        self.token = proposal
        # The same on every server.
        self.acquired_us = proposal

    def note(self, node: Node, reply: Reply) -> None:
        """An answer of the script redlock_take, or how the node has failed."""
        if isinstance(reply, Exception):
            self.failures[node] = reply
        else:
            now = int(reply[1])
            node.heard(now)
            if reply[0] == b"G":
                self._values[node] = int(reply[2])
                self.acquired_us = int(reply[3])
                self._expired += [holder(fields, now) for fields in reply[4]]
            elif reply[0] == b"D":
                self._taken[node] = holder(reply[2], now)
            elif reply[0] == b"Q":
                self._quarantined[node] = reply[2] / MICROSECOND
            else:
                self._too_early.add(node)
        refusals = len(self.answered) + len(self.failures) - len(self._values)
        values = self._values.values()
        self._outcome = outcome(self._nodes, self.proposal, values, refusals)
        if self._outcome is Outcome.TO_BE_RAISED:
            self.token = max(values)

    @property
    def is_decided(self) -> bool:
        """Whether no further answer can make a difference: not even to who has the key."""
        if self._outcome is Outcome.REFUSED:
            most = self._most
            return most >= majority(self._nodes) or most + self._unknown < majority(self._nodes)
        if self._outcome is Outcome.TO_BE_RAISED:
            return not self._unknown
        return self._outcome is not Outcome.OPEN

    @property
    def _most(self) -> int:
        """On how many servers one other has the key."""
        owners = [one.owner_id for one in self._taken.values()]
        return most_common(owners)[1] if owners else 0

    @property
    def _unknown(self) -> int:
        """How many servers have not answered yet."""
        return self._nodes - len(self.answered) - len(self.failures)

    @property
    def is_granted(self) -> bool:
        return self._outcome is Outcome.GRANTED

    @property
    def answered(self) -> set[Node]:
        """Who has answered."""
        return {*self._values, *self._taken, *self._quarantined, *self._too_early}

    @property
    def takers(self) -> set[Node]:
        """Who has taken the keys for the asker."""
        return set(self._values)

    # A common token

    @property
    def is_to_be_raised(self) -> bool:
        """Whether a majority has the keys, and a token is to be agreed upon."""
        return self._outcome is Outcome.TO_BE_RAISED

    def begin_to_raise(self) -> None:
        """The token is chosen: some have it already."""
        for node, value in self._values.items():
            if value == self.token:
                self._has_token(node)

    def note_raised(self, node: Node, reply: Reply) -> None:
        """An answer of the script redlock_raise."""
        if reply == b"1":
            self._has_token(node)

    def _has_token(self, node: Node) -> None:
        self._raised.add(node)
        if len(self._raised) >= majority(self._nodes):
            self._outcome = Outcome.GRANTED

    # What there is to say

    def give_up(self) -> None:
        """It has taken longer than the lease, or no token was agreed upon."""
        self._outcome = Outcome.REFUSED

    @property
    def was_proposed_too_early(self) -> bool:
        """Whether it is the proposal's doing: the servers' clocks are not what they were thought
        to be."""
        could_vote = len(self._too_early) + len(self._values)
        return bool(self._too_early) and could_vote >= majority(self._nodes)

    @property
    def is_silent(self) -> bool:
        """Whether so many do not answer that there is no majority."""
        return len(self.failures) > self._nodes - majority(self._nodes)

    @property
    def is_contested(self) -> bool:
        """Whether some have asked at the same moment, and none is known to have a majority."""
        return bool(self._taken) and self._most < majority(self._nodes) and not self.is_granted

    @property
    def _is_split(self) -> bool:
        """Whether nobody can have a majority: not even with those that say nothing."""
        silent = self._unknown + len(self.failures) + len(self._quarantined)
        return bool(self._taken) and self._most + silent < majority(self._nodes)

    @property
    def expired(self) -> Iterator[Holder]:
        """Whose leases a majority has found past their expiry."""
        return agreed(self._nodes, self._expired)

    @property
    def key(self) -> str:
        """One that somebody else has; '' if none was found."""
        return next((str(one.key) for one in self._taken.values()), "")

    @property
    def holders(self) -> list[Holder]:
        """Who has the key in the way."""
        if not self._taken or self._is_split:
            return []
        owner, _ = most_common(one.owner_id for one in self._taken.values())
        return [next(one for one in self._taken.values() if one.owner_id == owner)]

    @property
    def remaining(self) -> float:
        """Seconds until a majority may be free; 0 if that cannot be told."""
        if self._is_split:
            return 0.0
        held = [one.remaining for one in self._taken.values()]
        lefts = [0.0 for _ in self._values] + held + list(self._quarantined.values())
        until_free = free_in(self._nodes, lefts)
        return until_free if until_free < float("inf") else max(held, default=0.0)

    @property
    def reason(self) -> str:
        """What else is in the way than who has the key."""
        reasons = []
        if self._quarantined:
            left = max(self._quarantined.values())
            reasons.append(
                f"{len(self._quarantined)} of the {self._nodes} Redis servers have new memories of "
                f"locks (a restart, a flush or an eviction): they vote again in {left:.1f} s, when "
                f"all leases from before have ended."
            )
        if self.failures:
            reasons.append(
                f"Of the {self._nodes} Redis servers, some have no say: {why(self.failures)}."
            )
        if self._too_early:
            servers = ", ".join(map(str, self._too_early))
            reasons.append(
                f"The clocks of {servers} are behind the others by more than 'clock_skew': set "
                f"them, or raise it."
            )
        if self._is_split:
            reasons.append("Several have asked for it at once.")
        return " ".join(reasons)


class Extensions:
    """The votes of the servers on a batch of extensions."""

    def __init__(self, nodes: int, extensions: Sequence[Extension]) -> None:
        self._nodes = nodes
        self._extensions = extensions
        self._yes: dict[str, int] = {}
        self._no: dict[str, int] = {}
        self.failures: dict[Node, Exception] = {}

    def batches(self) -> Iterator[tuple[list[bytes], list[str]]]:
        """Arguments of the script redlock_extend, and whose each claim among them is: all claims
        of a grant together."""
        words: list[bytes] = []
        owners: list[str] = []
        for extension in self._extensions:
            grant = extension.grant
            owner = grant.owner_id.encode()
            terms = b"%d" % extension.ttl_us, b"%d" % grant.min_hold_us
            for key, token in zip(grant.keys, grant.fencing_tokens, strict=True):
                words += (key.encode(), owner, b"%d" % token, *terms)
                owners.append(grant.owner_id)
            if len(owners) >= EXTENDED_AT_ONCE:
                yield words, owners
                words, owners = [], []
        if owners:
            yield words, owners

    def note(self, node: Node, owners: Sequence[str], reply: Reply) -> None:
        """A node's answer about these claims, or how it has failed."""
        if isinstance(reply, Exception):
            self.failures[node] = reply
            return
        worst: dict[str, str] = {}
        for owner, answer in zip(owners, reply.decode(), strict=True):
            worst[owner] = max(worst.get(owner, "1"), answer, key="1B0".index)
        for owner, answer in worst.items():
            self._yes[owner] = self._yes.get(owner, 0) + (answer == "1")
            self._no[owner] = self._no.get(owner, 0) + (answer == "0")

    def verdict(self, owner: str) -> bool | None:
        """Whether a majority has extended its claims."""
        return verdict(self._nodes, self._yes.get(owner, 0), self._no.get(owner, 0))

    @property
    def has_no_majority(self) -> bool:
        """Whether too few answer to decide anything."""
        return len(self.failures) > self._nodes - majority(self._nodes)

    @property
    def is_silent(self) -> bool:
        """Whether nothing can be said of any."""
        return self.has_no_majority and all(
            self.verdict(one.grant.owner_id) is None for one in self._extensions
        )

    def result(self) -> Extended:
        owners = [one.grant.owner_id for one in self._extensions]
        return Extended(
            extended=frozenset(owner for owner in owners if self.verdict(owner) is True),
            lost=frozenset(owner for owner in owners if self.verdict(owner) is False),
        )
