"""Redlock as a model: a majority of nodes grants a key, each grant with a higher token.

Two promises: no two attempts for the key are ever admitted at once, each before its own deadline;
and in the order of their admissions, their tokens strictly grow.

N nodes know nothing of each other. A request may be executed late, executed twice, or never, and
its answer may be lost. A client may stop for ever between any two steps. A node may lose its data
at any time, or come back with old data. The clocks of the nodes differ by at most the skew S, and
T is the longest lease; tokens are times of the nodes' clocks.

Each rule is a switch of `Rules`, so that one can see what happens without it:

R1   quorum_is_majority: it takes more than half of all nodes, for each of the decisions below.
R2   value_above_last: a client proposes any token, mostly the time. A free node takes its key, with
     the proposal or, if that is higher, one more than the node's last value, which it answers.
R3   raised_if_unequal: if a majority answered just the proposal, that is the token. Otherwise it is
     the highest answer of any majority, after the nodes have been raised to it:
     raise_needs_key: a node that keeps the client's key makes that its last value, and counts; so
     do those that had answered it.
     raise_needs_majority: it takes a majority of these.
R4   kept_past_deadline: a node keeps a key until after its owner's deadline, which is counted from
     before the request was sent. Each attempt has an owner id of its own: with one for two, a late
     release of the first would drop the key of the second, before its deadline.
R5   extend_needs_majority: an extension takes a majority,
     extend_needs_key: of nodes that keep the key. Others may then drop it before the new deadline.
R6   quarantined: a node that lost its data first refuses everybody.
     old_data_noticed: so does one that comes back with old data.
     no_extend_in_quarantine: it does not count for an extension either, though it may have found
     the key in its old data.
     no_raise_in_quarantine: nor for a raise. This rule alone is not needed: who raises has not
     extended yet, so a node that finds its key in old data has kept it for it all the time.
     quarantine_covers_lease, quarantine_covers_skew: a quarantine lasts T + 2 S.
     quarantine_leaves_floor: after it, the node's last value is the time at which it ended.
R7   ahead_refused: a node refuses a proposal more than S ahead of its clock.

A node's last value could get ahead of all clocks by many requests within one unit of time, each of
which adds one. The unit is a microsecond, no node is that fast, and the model does not allow it;
`Bounds.hasty` shows why it matters.

All clocks run at one rate: that they do not is what the margins of the real deadlines are for. Time
goes in ticks. In the tick of its deadline a lease is still believed in, and in the tick in which
its quarantine ends a node still refuses.

What is left out, since nothing could come of it that does not come of what is there:

An attempt that ends takes its keys with it, whether it was released, given up or came to its
deadline. A node that keeps a key for longer only refuses others, as if their requests were late.
A request executed after the end of its attempt does what one of an attempt does that is given up
later: an attempt more covers that. A raise executed late finds its key, so nobody else has used the
node since: it might as well have been executed in time.

An attempt begins when its first request is executed, and an extension likewise. Nobody could tell
that it began before, and its deadline would only be earlier.

Where a client decides, it has the answers of any majority, and of all that make no difference to
the highest.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.model.redlock_state import (
    ASKING,
    EXTENDING,
    FIRM,
    HOLDING,
    LOOSE,
    NONE,
    RAISING,
    Attempt,
    Node,
    Slot,
    State,
    count,
    ended,
    loosened,
    with_attempt,
    with_node,
    with_said,
)
from tests.model.values import put


@dataclass(frozen=True)
class Rules:
    """The rules in force: see the docstring of the module."""

    quorum_is_majority: bool = True
    value_above_last: bool = True
    raised_if_unequal: bool = True
    raise_needs_key: bool = True
    raise_needs_majority: bool = True
    kept_past_deadline: bool = True
    extend_needs_majority: bool = True
    extend_needs_key: bool = True
    quarantined: bool = True
    old_data_noticed: bool = True
    no_extend_in_quarantine: bool = True
    no_raise_in_quarantine: bool = True
    quarantine_covers_lease: bool = True
    quarantine_covers_skew: bool = True
    quarantine_leaves_floor: bool = True
    ahead_refused: bool = True


@dataclass(frozen=True)
class Bounds:
    """How much of the world is searched."""

    # How many attempts begin in all, and the highest token that one proposes, the lowest being 1.
    attempts: int = 2
    proposals: int = 3
    # The last values of the nodes, as earlier attempts have left them.
    lasts: tuple[int, ...] = (2, 0, 0)
    extends: bool = False
    # How often a node may execute the same request for a key.
    copies: int = 1
    # How often a node loses its data or comes back with old data.
    faults: int = 0
    # The time in the beginning, and in the end. Only faults make it matter.
    begin: int = 9
    end: int = 9
    lease_ticks: int = 1
    # S, and by how much the clock of each node is really ahead of the slowest.
    skew: int = 0
    ahead: tuple[int, ...] = (0, 0, 0)
    # Whether a node's last value may get ahead of all clocks.
    hasty: bool = False


Steps = Iterator[tuple[str, State]]


def violation(state: State) -> str:
    holders = [one.name for one in state.attempts if one.phase in (HOLDING, EXTENDING)]
    if len(holders) > 1:
        return f"{holders} hold the key at once"
    return f"token {state.late} after {state.highest}" if state.late else ""


class RedlockTokens:
    """What may happen under some rules, within some bounds."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules = rules
        self.bounds = bounds
        nodes = len(bounds.lasts)
        self.majority = nodes // 2 + 1 if rules.quorum_is_majority else nodes // 2
        self.raised = self.majority if rules.raise_needs_majority else self.majority - 1
        self.extended = self.majority if rules.extend_needs_majority else self.majority - 1
        self.quarantine = (
            bounds.lease_ticks * rules.quarantine_covers_lease
            + 2 * bounds.skew * rules.quarantine_covers_skew
        )

    def initial(self) -> State:
        bounds = self.bounds
        nodes = [Node(*each, 0, ()) for each in zip(bounds.ahead, bounds.lasts, strict=True)]
        return self._settled(State(bounds.begin, 0, 0, 0, bounds.faults, (), tuple(nodes)))

    def successors(self, state: State) -> Steps:
        yield from self._tick(state)
        if state.begun < self.bounds.attempts:
            yield from self._begin(state)
        for who, one in enumerate(state.attempts):
            yield f"{one.name} ends", ended(state, who)
            yield from self._acquire(state, who)
            if one.phase == ASKING:
                yield from self._decide(state, who)
            elif one.phase == RAISING:
                yield from self._raise(state, who)
            elif self.bounds.extends:
                yield from self._extend(state, who)
            yield from self._expire(state, who)
        if state.faults_left:
            for number in range(len(state.nodes)):
                yield from self._fail(state, number)

    # Time.

    def _tick(self, state: State) -> Steps:
        now, last_lease = state.now + 1, self.bounds.lease_ticks
        if now > self.bounds.end or any(now > one.since + last_lease for one in state.attempts):
            return
        nodes = [
            node._replace(shut_until=0) if now + node.ahead > node.shut_until else node
            for node in state.nodes
        ]
        yield "a tick", self._settled(state._replace(now=now, nodes=tuple(nodes)))

    def _settled(self, state: State) -> State:
        """The state as late as it can be, once no quarantine will end any more.

        Only quarantines wait for deadlines. Without them, what may happen at one time may happen
        later as well. And a node that stays in quarantine until the end of the search is like one
        that no request reaches.
        """
        if state.now + self.quarantine >= self.bounds.end and self._shut_means_dead():
            state = state._replace(faults_left=0)
        if state.faults_left or any(node.shut_until for node in state.nodes):
            return state
        endless = [one._replace(since=self.bounds.end) for one in state.attempts]
        return state._replace(now=self.bounds.end, attempts=tuple(endless))

    def _shut_means_dead(self) -> bool:
        rules = self.rules
        return (
            rules.quarantined
            and rules.old_data_noticed
            and rules.no_extend_in_quarantine
            and rules.no_raise_in_quarantine
        )

    def _since(self, state: State) -> int:
        """When what begins now began."""
        return state.now if state.faults_left else self.bounds.end

    # Acquiring.

    def _begin(self, state: State) -> Steps:
        who = len(state.attempts)
        unasked = Slot(NONE, self.bounds.copies, 0)
        for proposal in range(1, self.bounds.proposals + 1):
            one = Attempt(state.begun, ASKING, proposal, 0, self._since(state), 0)
            nodes = [node._replace(slots=(*node.slots, unasked)) for node in state.nodes]
            begun = state._replace(
                begun=state.begun + 1, attempts=(*state.attempts, one), nodes=tuple(nodes)
            )
            yield from self._acquire(begun, who)

    def _acquire(self, state: State, who: int) -> Steps:
        """A free node takes its key, for the first time or again."""
        one = state.attempts[who]
        for number, node in enumerate(state.nodes):
            slot = node.slots[who]
            if not slot.copies or node.shut_until or any(each.key for each in node.slots):
                continue
            value = self._value(state, node, one.proposal)
            if not value:
                continue
            asking = one.phase == ASKING
            # Taken after the admission, it may expire before the deadline of an extension.
            key = FIRM if asking or one.phase == RAISING else LOOSE
            taken = Slot(key, slot.copies - 1, value if asking else slot.said)
            after = node._replace(last=value, slots=put(node.slots, who, taken))
            label = f"node {number} takes the key of {one.name}, proposed {one.proposal}: {value}"
            yield label, with_node(state, number, after)

    def _value(self, state: State, node: Node, proposal: int) -> int:
        """The node's answer; 0 if it refuses."""
        bounds, rules = self.bounds, self.rules
        if rules.ahead_refused and proposal > state.now + node.ahead + bounds.skew:
            return 0
        least = node.last + rules.value_above_last
        if least <= proposal:
            return proposal
        paced = least <= state.now + max(bounds.ahead) + bounds.skew
        return least if paced or bounds.hasty else 0

    def _decide(self, state: State, who: int) -> Steps:
        """It has answers of a majority."""
        one = state.attempts[who]
        answers = [node.slots[who].said for node in state.nodes if node.slots[who].said]
        if answers.count(one.proposal) >= self.majority:
            yield from self._admit(state, who, one.proposal)
        for token in sorted(set(answers)):
            if sum(answer <= token for answer in answers) < self.majority:
                continue
            if not self.rules.raised_if_unequal:
                yield from self._admit(state, who, token)
                continue
            raising = one._replace(phase=RAISING, token=token)
            after = with_said(
                state, who, [int(node.slots[who].said == token) for node in state.nodes]
            )
            yield f"{one.name} raises its nodes to {token}", with_attempt(after, who, raising)

    def _raise(self, state: State, who: int) -> Steps:
        one = state.attempts[who]
        for number, node in enumerate(state.nodes):
            slot = node.slots[who]
            if slot.said or (node.shut_until and self.rules.no_raise_in_quarantine):
                continue
            if slot.key or not self.rules.raise_needs_key:
                after = node._replace(
                    last=max(node.last, one.token),
                    slots=put(node.slots, who, slot._replace(said=1)),
                )
                yield f"node {number} is raised by {one.name}", with_node(state, number, after)
        if count(state, who) >= self.raised:
            yield from self._admit(state, who, one.token)

    def _admit(self, state: State, who: int, token: int) -> Steps:
        one = state.attempts[who]
        holding = one._replace(phase=HOLDING, token=0)
        after = with_attempt(with_said(state, who, [0] * len(state.nodes)), who, holding)
        if token <= state.highest:
            after = after._replace(late=token)
        else:
            after = after._replace(highest=token)
        yield f"{one.name} is admitted with token {token}", after

    # Holding.

    def _extend(self, state: State, who: int) -> Steps:
        one = state.attempts[who]
        asked = one.asked if one.phase == EXTENDING else self._since(state)
        extending = one._replace(phase=EXTENDING, asked=asked)
        for number, node in enumerate(state.nodes):
            slot = node.slots[who]
            if slot.said or (self.rules.extend_needs_key and not slot.key):
                continue
            if node.shut_until and self.rules.no_extend_in_quarantine:
                continue
            counting = slot._replace(key=FIRM if slot.key else NONE, said=1)
            after = node._replace(slots=put(node.slots, who, counting))
            yield (
                f"node {number} extends the key of {one.name}",
                with_attempt(with_node(state, number, after), who, extending),
            )
        if one.phase == HOLDING:
            return
        holding = one._replace(phase=HOLDING, asked=0)
        nobody = [0] * len(state.nodes)
        given_up = with_attempt(with_said(state, who, nobody), who, holding)
        yield f"{one.name} gives up an extension", given_up
        if count(state, who) >= self.extended:
            loose = with_said(loosened(state, who), who, nobody)
            yield (
                f"{one.name} has extended",
                with_attempt(loose, who, holding._replace(since=asked)),
            )

    def _expire(self, state: State, who: int) -> Steps:
        """A node drops its key."""
        for number, node in enumerate(state.nodes):
            slot = node.slots[who]
            if slot.key == LOOSE or (slot.key == FIRM and not self.rules.kept_past_deadline):
                after = node._replace(slots=put(node.slots, who, slot._replace(key=NONE)))
                label = f"node {number} drops the key of {state.attempts[who].name}"
                yield label, with_node(state, number, after)

    # What befalls nodes.

    def _fail(self, state: State, number: int) -> Steps:
        """The node loses all its data, or comes back with old data."""
        state = state._replace(faults_left=state.faults_left - 1)
        node = state.nodes[number]
        blank = tuple([slot._replace(key=NONE) for slot in node.slots])
        empty = node._replace(last=0, slots=blank)
        shut = self._shut(state, empty) if self.rules.quarantined else empty
        yield f"node {number} loses its data", self._settled(with_node(state, number, shut))
        # With nobody's key, or with one that it has ever had.
        found = [blank]
        for who, slot in enumerate(node.slots):
            if slot.copies < self.bounds.copies:
                found.append(put(blank, who, slot._replace(key=LOOSE)))
        for slots in found:
            for last in range(node.last + 1):
                after = node._replace(last=last, slots=slots)
                if self.rules.quarantined and self.rules.old_data_noticed:
                    after = self._shut(state, after)
                label = f"node {number} comes back with old data"
                yield label, self._settled(with_node(state, number, after))

    def _shut(self, state: State, node: Node) -> Node:
        """The node in quarantine. Nobody sees its last value until the end."""
        end = state.now + node.ahead + self.quarantine
        last = end if self.rules.quarantine_leaves_floor else node.last
        return node._replace(last=last, shut_until=end)
