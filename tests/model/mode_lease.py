"""The fast path as a model: Redis grants while it can, the database while Redis cannot.

The promise is that no two processes ever believe at once, each by its own clock, to have the key.
Nothing else in the world is friendly. Redis is two instances, since after a fail-over the old
primary may live on beside the new one, and a request may reach either. A message may be late
without bound, or lost. A process may stop for ever between any two steps. An instance may lose its
data at any time, or come back with old data. And whoever wants to may change the authority at any
time, so nothing hangs on how a failure is noticed. Only the database is sane: one, linearizable.

One row in the database says who has the authority. Every change of it is a compare-and-set of its
epoch and phase, and most of them raise the epoch:

    redis --raise--> drain --W later--> database --raise--> closing --an attempt's--> redis
                                            ^------raise-------'

Each rule is a switch of `Rules`, so that one can see what happens without it:

R1   age_from_before_read: what a process has read of the row ages from before it was read.
R2   knowledge_ages: only while it has read "redis" and that is younger than M does a process send
     requests to Redis.
     epoch_checked: Redis refuses a request with another epoch than it was opened for,
     incarnation_checked: and any request once it is not the incarnation that was opened.
     copying_ends_incarnation: an incarnation ends with a restart, and also when an instance becomes
     a copy of another. A run id, which only a restart changes, does not tell.
R3   deadline_from_before_send: a process believes in a lease from before it sent the request; the
     store keeps it from when the request is executed.
R4   release_is_final: an answer that comes after the release is ignored.
R5   drain_first: when Redis loses the authority, a drain comes before the database.
R6   drain_covers_leases: the drain lasts W = M + T, where T is the longest lease, not only M.
R7   grant_checks_row: the database grants only in the phase "database" and in the epoch that the
     request carries, by a check in the granting statement itself.
R8   closing_grants_nothing: closing, it extends what is held, but grants nothing new.
     closing_raises_epoch: closing begins with a new epoch.
     leases_end_first: no attempt to open Redis before the last lease of the database has ended.
R9   epoch_per_attempt: each attempt raises the epoch,
     nonce_needed: then leaves a random nonce at an instance, and then sends OPEN, which does
     nothing unless it finds the nonce, and uses it up.
     nonce_sent_once: an OPEN may be sent again, and executed again; a nonce is sent once.
     nonce_ends_with_incarnation: a nonce is void in another incarnation than it was left in, since
     an old snapshot or a lagging copy may bring back one that has been used up.
R10  breaking_off_raises_epoch: the way back may be broken off, without a wait, by a new epoch.

Time goes in ticks. What is younger than M is at most M - 1 ticks old, so the last lease by it ends
M - 1 + T ticks after the epoch was raised. That is the W of the model: shorter than the real one,
which proves more. All clocks run alike here; that they do not is what the margins of the real W and
of the real deadlines are for.

Left out is what could only keep somebody else from having the key: a refusal, a lost release, locks
that survive a restart, the news that Redis has not the authority. So is a late release: it names
its own acquire, and can end nothing later. With `answers_late` false, an answer comes at the very
moment of the execution, and nothing is executed that nobody awaits: by R1, R3 and R4 a later answer
is worth less. With it true, nothing of that is taken for granted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.values import put, without

# Phases of the row.
REDIS, DRAIN, DATABASE, CLOSING = "redis", "drain", "database", "closing"

# Where the request of a process is.
NOWHERE, TO_REDIS, TO_DATABASE, ANSWERED = "", "to redis", "to database", "answered"

# How far an attempt to open Redis has come: it has seen the leases of the database end; has raised
# the epoch; has left its nonce and sent OPEN.
LOOKED, RAISED, SENT = "looked", "raised", "sent"

# Whether the nonce of an attempt is at an instance, or was there.
NEVER, THERE, GONE = 0, 1, 2

# The stores.
INSTANCES = (0, 1)
IN_DATABASE = 2
STORES = ("Redis 0", "Redis 1", "the database")

# No epoch, no incarnation, no bound.
NONE = -1


@dataclass(frozen=True)
class Rules:
    """The rules in force: see the docstring of the module."""

    # Without this one there is no protocol at all: try Redis, else the database.
    row_decides: bool = True
    age_from_before_read: bool = True
    knowledge_ages: bool = True
    epoch_checked: bool = True
    incarnation_checked: bool = True
    copying_ends_incarnation: bool = True
    deadline_from_before_send: bool = True
    release_is_final: bool = True
    drain_first: bool = True
    drain_covers_leases: bool = True
    grant_checks_row: bool = True
    closing_grants_nothing: bool = True
    closing_raises_epoch: bool = True
    leases_end_first: bool = True
    epoch_per_attempt: bool = True
    nonce_needed: bool = True
    nonce_sent_once: bool = True
    nonce_ends_with_incarnation: bool = True
    breaking_off_raises_epoch: bool = True


@dataclass(frozen=True)
class Bounds:
    """How much of the world is searched. NONE: without bound."""

    processes: int = 2
    # M, for how long a process may act on what it has read of the row; T, how long a lease lasts.
    mode_ticks: int = 2
    lease_ticks: int = 2
    answers_late: bool = False
    # How many attempts to open Redis may be under way, and how often each OPEN is executed.
    attempts: int = 2
    opens: int = 2
    # How often an instance may fail, and how far the epoch may rise.
    faults: int = NONE
    epochs: int = NONE


class Row(NamedTuple):
    """Who has the authority."""

    epoch: int
    phase: str
    # For how many ticks the drain still lasts.
    drain_left: int


class Process(NamedTuple):
    """What a process knows and believes, and what the stores keep for it."""

    # The epoch in which it knows Redis to have the authority, and for how long it may act on that.
    known: int
    known_left: int
    # The same, on its way from the database.
    read: int
    read_left: int
    # Its request for the key, or for more time with it.
    request: str
    request_epoch: int
    # For how long it would have the key by the answer; 0 if it awaits none.
    request_left: int
    # For how long it believes to have the key.
    held: int
    # For how long each store keeps the key for it.
    kept: tuple[int, ...]


class Instance(NamedTuple):
    """An instance of Redis."""

    # The epoch it was opened for, and the instance in whose present incarnation that was.
    epoch: int
    incarnation: int


class Attempt(NamedTuple):
    """An attempt to open Redis."""

    epoch: int
    stage: str
    # How often its OPEN may still be executed, and whether one was, which it then knows.
    opens_left: int
    opened: bool
    # Whether its nonce is at each instance.
    nonces: tuple[int, ...]


class State(NamedTuple):
    row: Row
    processes: tuple[Process, ...]
    instances: tuple[Instance, ...]
    attempts: tuple[Attempt, ...]
    faults_left: int


Steps = Iterator[tuple[str, State]]

IDLE = Process(NONE, 0, NONE, 0, NOWHERE, NONE, 0, 0, (0, 0, 0))
BLANK = Instance(NONE, NONE)


def violation(state: State) -> str:
    holders = [who for who, one in enumerate(state.processes) if one.held]
    return f"{holders} all believe to have the key" if len(holders) > 1 else ""


class ModeLease:
    """What may happen under some rules, within some bounds."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules = rules
        self.bounds = bounds
        last_lease = bounds.lease_ticks if rules.drain_covers_leases else 1
        self.drain_ticks = bounds.mode_ticks - 1 + last_lease

    def initial(self) -> State:
        """Redis has the authority, at one instance; the other is blank."""
        return State(
            row=Row(1, REDIS, 0),
            processes=(IDLE,) * self.bounds.processes,
            instances=(Instance(epoch=1, incarnation=0), BLANK),
            attempts=(),
            faults_left=self.bounds.faults,
        )

    def successors(self, state: State) -> Steps:
        yield "a tick", self._tick(state)
        for who in range(self.bounds.processes):
            yield from self._learn(state, who)
            yield from self._ask(state, who)
            yield from self._be_answered(state, who)
            yield from self._release(state, who)
        yield from self._move_authority(state)
        yield from self._begin_attempt(state)
        for number in range(len(state.attempts)):
            yield from self._raise_for_attempt(state, number)
            yield from self._leave_nonce(state, number)
            yield from self._open(state, number)
            yield from self._finish_attempt(state, number)
        if state.faults_left:
            for number in INSTANCES:
                yield from self._fail(state, number)

    # Time.

    def _tick(self, state: State) -> State:
        row = state.row._replace(drain_left=_less(state.row.drain_left))
        older = tuple(self._older(one) for one in state.processes)
        return state._replace(row=row, processes=older)

    def _older(self, one: Process) -> Process:
        rules = self.rules
        known_left = _less(one.known_left) if rules.knowledge_ages else one.known_left
        read_left = _less(one.read_left) if rules.age_from_before_read else one.read_left
        left = _less(one.request_left) if rules.deadline_from_before_send else one.request_left
        older = Process(
            known=one.known if known_left else NONE,
            known_left=known_left,
            read=one.read if read_left else NONE,
            read_left=read_left,
            request=one.request,
            request_epoch=one.request_epoch,
            request_left=left,
            held=_less(one.held),
            kept=tuple([_less(ticks) for ticks in one.kept]),
        )
        return older if left else self._unawaited(older)

    def _unawaited(self, one: Process) -> Process:
        """It does not await the answer any more; the request may still be executed."""
        if self.bounds.answers_late and one.request in (TO_REDIS, TO_DATABASE):
            return one._replace(request_left=0)
        return _without_request(one)

    # What a process does.

    def _learn(self, state: State, who: int) -> Steps:
        """It reads the row."""
        one = state.processes[who]
        if state.row.phase == REDIS:
            reading = one._replace(read=state.row.epoch, read_left=self.bounds.mode_ticks)
            if not self.bounds.answers_late:
                reading = _knowing(reading)
            yield f"{who} reads the row", _with(state, who, reading)
        if one.read_left:
            yield f"{who} hears what it read", _with(state, who, _knowing(one))

    def _ask(self, state: State, who: int) -> Steps:
        """It sends a request, and awaits no answer to an earlier one."""
        one, ticks, epoch = state.processes[who], self.bounds.lease_ticks, state.row.epoch
        if one.known_left:
            asking = one._replace(request=TO_REDIS, request_epoch=one.known, request_left=ticks)
            yield f"{who} asks Redis", _with(state, who, asking)
        asking = one._replace(request=TO_DATABASE, request_epoch=epoch, request_left=ticks)
        if self._database_admits(state.row, asking):
            if self.bounds.answers_late:
                yield f"{who} asks the database", _with(state, who, asking)
            else:
                yield from self._grant(state, who, asking, IN_DATABASE)

    def _be_answered(self, state: State, who: int) -> Steps:
        """A store executes its request, or it hears the answer."""
        one = state.processes[who]
        if one.request == TO_REDIS:
            for number in INSTANCES:
                if self._redis_admits(state, number, one):
                    yield from self._grant(state, who, one, number)
        elif one.request == TO_DATABASE:
            if self._database_admits(state.row, one) or not self.rules.grant_checks_row:
                yield from self._grant(state, who, one, IN_DATABASE)
        elif one.request == ANSWERED:
            yield f"{who} hears that it has the key", _with(state, who, _holding(one))

    def _redis_admits(self, state: State, number: int, one: Process) -> bool:
        instance = state.instances[number]
        if self.rules.incarnation_checked and instance.incarnation != number:
            return False
        return instance.epoch == one.request_epoch or not self.rules.epoch_checked

    def _database_admits(self, row: Row, one: Process) -> bool:
        if not self.rules.row_decides:
            return True
        extends = one.kept[IN_DATABASE] > 0
        if extends or not self.rules.closing_grants_nothing:
            return row.phase in (DATABASE, CLOSING)
        return row.phase == DATABASE and row.epoch == one.request_epoch

    def _grant(self, state: State, who: int, one: Process, store: int) -> Steps:
        """The store keeps the key for it from now on, unless it keeps it for somebody else."""
        if any(other.kept[store] for n, other in enumerate(state.processes) if n != who):
            return
        kept = put(one.kept, store, self.bounds.lease_ticks)
        granted = one._replace(kept=kept, request=ANSWERED)
        if not one.request_left:
            granted = _without_request(granted)
        elif not self.bounds.answers_late:
            granted = _holding(granted)
        yield f"{STORES[store]} grants {who} the key", _with(state, who, granted)

    def _release(self, state: State, who: int) -> Steps:
        """It releases the lease, or gives up its request for one."""
        one = state.processes[who]
        if one.held or (one.request_left and self.bounds.answers_late):
            released = one._replace(held=0, kept=(0, 0, 0))
            if self.rules.release_is_final:
                released = self._unawaited(released)
            yield f"{who} releases the key", _with(state, who, released)

    # Who has the authority.

    def _move_authority(self, state: State) -> Steps:
        rules, (epoch, phase, drain_left) = self.rules, state.row
        if phase == DRAIN and not drain_left:
            yield "the drain is over", _say(state, Row(epoch, DATABASE, 0))
        if not self._may_rise(epoch):
            return
        if phase == REDIS and rules.drain_first:
            yield "Redis is drained", _say(state, Row(epoch + 1, DRAIN, self.drain_ticks))
        elif phase == REDIS:
            yield "the database takes over", _say(state, Row(epoch + 1, DATABASE, 0))
        elif phase == DATABASE:
            epoch += rules.closing_raises_epoch
            yield "the database closes", _say(state, Row(epoch, CLOSING, 0))
        elif phase == CLOSING:
            epoch += rules.breaking_off_raises_epoch
            yield "the way back is broken off", _say(state, Row(epoch, DATABASE, 0))

    def _may_rise(self, epoch: int) -> bool:
        return self.bounds.epochs == NONE or epoch < self.bounds.epochs

    def _begin_attempt(self, state: State) -> Steps:
        """Somebody looks whether the leases of the database have ended."""
        row = state.row
        held = any(one.kept[IN_DATABASE] for one in state.processes)
        if row.phase != CLOSING or (held and self.rules.leases_end_first):
            return
        begun = Attempt(row.epoch, LOOKED, 0, False, (NEVER, NEVER))
        others = tuple(one for one in state.attempts if self.may_matter(one, row))
        # Where no more may be under way, another stops for ever.
        rests = [others]
        if len(others) == self.bounds.attempts:
            rests = [without(others, number) for number in range(len(others))]
        for rest in rests:
            after = state._replace(attempts=(*rest, begun))
            yield "an attempt to open Redis begins", after

    def may_matter(self, attempt: Attempt, row: Row) -> bool:
        """Whether anything may still come of it."""
        if attempt.epoch == row.epoch and (attempt.stage == LOOKED or attempt.opened):
            return True
        if attempt.stage == RAISED:
            return True
        return attempt.opens_left > 0 and (
            not self.rules.nonce_needed
            or not self.rules.nonce_sent_once
            or THERE in attempt.nonces
            or (GONE in attempt.nonces and not self.rules.nonce_ends_with_incarnation)
        )

    def _raise_for_attempt(self, state: State, number: int) -> Steps:
        attempt, row = state.attempts[number], state.row
        if (
            attempt.stage != LOOKED
            or not _is_closing(row, attempt)
            or not self._may_rise(row.epoch)
        ):
            return
        epoch = row.epoch + self.rules.epoch_per_attempt
        raised = attempt._replace(epoch=epoch, stage=RAISED)
        if not self.rules.nonce_needed:
            raised = raised._replace(stage=SENT, opens_left=self.bounds.opens)
        after = state._replace(row=row._replace(epoch=epoch))
        yield f"attempt {epoch} has its epoch", _with_attempt(after, number, raised)

    def _leave_nonce(self, state: State, number: int) -> Steps:
        attempt = state.attempts[number]
        again = attempt.stage == SENT and attempt.opens_left and not self.rules.nonce_sent_once
        if attempt.stage != RAISED and not again:
            return
        for instance in INSTANCES:
            after = _with_nonce(state, instance, number)
            if not again:
                sent = after.attempts[number]._replace(stage=SENT, opens_left=self.bounds.opens)
                after = _with_attempt(after, number, sent)
            yield f"attempt {attempt.epoch} leaves its nonce at {STORES[instance]}", after

    def _open(self, state: State, number: int) -> Steps:
        """OPEN is executed: it uses up the nonce and clears the locks."""
        attempt = state.attempts[number]
        if not attempt.opens_left:
            return
        for instance in INSTANCES:
            if attempt.nonces[instance] == THERE or not self.rules.nonce_needed:
                opened = attempt._replace(
                    opens_left=attempt.opens_left - 1,
                    opened=True,
                    nonces=put(attempt.nonces, instance, GONE),
                )
                after = _with_attempt(state, number, opened)
                yield (
                    f"attempt {attempt.epoch} opens {STORES[instance]}",
                    _with_instance(after, instance, Instance(attempt.epoch, instance)),
                )

    def _finish_attempt(self, state: State, number: int) -> Steps:
        attempt, row = state.attempts[number], state.row
        if attempt.opened and _is_closing(row, attempt):
            yield f"Redis takes over for {row.epoch}", _say(state, row._replace(phase=REDIS))

    # What befalls Redis.

    def _fail(self, state: State, number: int) -> Steps:
        """An instance loses all its data, restarts, or becomes a copy of the other.

        It comes back without locks, as if its data were too old to have them.
        """
        name, other = STORES[number], 1 - number
        if state.faults_left != NONE:
            state = state._replace(faults_left=state.faults_left - 1)
        yield f"{name} is flushed", _with_instance(_with_nonce(state, number, NONE), number, BLANK)
        restarted = _incarnation_ended(state, number)
        for after in self._with_old_nonces(restarted, number, number):
            yield f"{name} restarts", _with_instance(after, number, after.instances[number])
        copied = state.instances[other]
        if self.rules.copying_ends_incarnation:
            copied = copied._replace(incarnation=NONE)
        for after in self._with_old_nonces(state, number, other):
            yield f"{name} becomes a copy", _with_instance(after, number, copied)

    def _with_old_nonces(self, state: State, number: int, source: int) -> Iterator[State]:
        """The instance without a valid nonce, or with any that was ever at the source."""
        yield _with_nonce(state, number, NONE)
        if not self.rules.nonce_ends_with_incarnation:
            for whose, attempt in enumerate(state.attempts):
                if attempt.nonces[source] != NEVER:
                    yield _with_nonce(state, number, whose)


def _less(ticks: int) -> int:
    return ticks - 1 if ticks else 0


def _without_request(one: Process) -> Process:
    return one._replace(request=NOWHERE, request_epoch=NONE, request_left=0)


def _knowing(one: Process) -> Process:
    return one._replace(known=one.read, known_left=one.read_left, read=NONE, read_left=0)


def _holding(one: Process) -> Process:
    return _without_request(one._replace(held=one.request_left))


def _is_closing(row: Row, attempt: Attempt) -> bool:
    """Whether a compare-and-set by the attempt would find what it expects."""
    return row.phase == CLOSING and row.epoch == attempt.epoch


def _say(state: State, row: Row) -> State:
    return state._replace(row=row)


def _with(state: State, who: int, one: Process) -> State:
    return state._replace(processes=put(state.processes, who, one))


def _with_attempt(state: State, number: int, attempt: Attempt) -> State:
    return state._replace(attempts=put(state.attempts, number, attempt))


def _with_instance(state: State, number: int, instance: Instance) -> State:
    """The instance is that one from now on, without locks."""
    processes = tuple(one._replace(kept=put(one.kept, number, 0)) for one in state.processes)
    return state._replace(processes=processes, instances=put(state.instances, number, instance))


def _with_nonce(state: State, number: int, whose: int) -> State:
    """The instance has the nonce of that attempt and no other; of NONE, if it has none."""
    attempts = []
    for index, attempt in enumerate(state.attempts):
        nonce = attempt.nonces[number]
        if index == whose:
            nonce = THERE
        elif nonce == THERE:
            nonce = GONE
        attempts.append(attempt._replace(nonces=put(attempt.nonces, number, nonce)))
    return state._replace(attempts=tuple(attempts))


def _incarnation_ended(state: State, number: int) -> State:
    """Nothing that was recorded in it is of a present incarnation any more."""
    instances = tuple(
        one._replace(incarnation=NONE) if one.incarnation == number else one
        for one in state.instances
    )
    return state._replace(instances=instances)
