"""DOCSTRING"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

# Phases of the row.
REDIS, DRAIN, DATABASE, CLOSING = "redis", "drain", "database", "closing"

# What is under way for a process.
NOTHING, TO_REDIS, TO_DATABASE, ANSWERED = "", "to redis", "to database", "answered"

# The stores: two instances of Redis, and the database.
INSTANCES = (0, 1)
IN_DATABASE = 2
STORES = ("Redis 0", "Redis 1", "the database")

# Whether the nonce of an attempt is at an instance, or was.
NEVER, THERE, GONE = 0, 1, 2

# No epoch, no incarnation, no bound.
NONE = -1


@dataclass(frozen=True)
class Rules:
    """The rules in force: the docstring of the module says what each is."""

    # Without it: try Redis, else the database.
    row_decides: bool = True
    age_from_before_read: bool = True
    known_mode_ages: bool = True
    epoch_checked: bool = True
    incarnation_checked: bool = True
    copying_ends_incarnation: bool = True
    deadline_from_before_send: bool = True
    release_is_final: bool = True
    drain_first: bool = True
    drain_covers_leases: bool = True
    grant_checks_row: bool = True
    closing_grants_nothing: bool = True
    rows_end_first: bool = True
    epoch_per_attempt: bool = True
    nonce_needed: bool = True
    nonce_dies_with_incarnation: bool = True
    attempt_checks_epoch: bool = True
    breaking_off_raises_epoch: bool = True
    drain_raises_epoch: bool = True
    closing_raises_epoch: bool = True


@dataclass(frozen=True)
class Bounds:
    """How much of the world is searched."""

    # M: for how long a process may act on what it has read of the row.
    mode_ticks: int = 1
    # T: how long a lease lasts.
    lease_ticks: int = 1
    # Whether an answer may be late, or comes with the execution.
    answers_late: bool = False
    # How many attempts to open Redis may be under way, and how often each OPEN may be executed.
    attempts: int = 2
    opens: int = 2
    # How often an instance may lose what it has, and how far the epoch may rise.
    faults: int = NONE
    epochs: int = NONE


class Row(NamedTuple):
    """Who has the authority."""

    epoch: int
    phase: str
    # For how many ticks a drain still lasts.
    drain_left: int


class Process(NamedTuple):
    """What a process knows and believes, and what the stores keep for it."""

    # The epoch in which, as it knows, Redis has the authority; and for how long it may act on it.
    known: int
    known_left: int
    # The same, on its way from the database.
    read: int
    read_left: int
    # Its wish to have the key, for the first time or for longer, on its way to a store or back.
    request: str
    request_epoch: int
    # For how long the lease would last that the answer brings; 0 if nobody awaits the answer.
    request_left: int
    # For how long it believes to have the key.
    held: int
    # For how long each store keeps the key for it.
    kept: tuple[int, ...]


class Instance(NamedTuple):
    """An instance of Redis."""

    # What it was opened for; and the instance that was, in its incarnation of today.
    epoch: int
    recorded: int


class Attempt(NamedTuple):
    """An attempt to give Redis the authority back."""

    epoch: int
    # How often its OPEN may still be executed; NONE while the nonce has not been left.
    opens_left: int
    # Whether an OPEN of its was executed, which it then knows.
    opened: bool
    nonces: tuple[int, ...]


class State(NamedTuple):
    row: Row
    processes: tuple[Process, ...]
    instances: tuple[Instance, ...]
    attempts: tuple[Attempt, ...]
    faults_left: int


Steps = Iterator[tuple[str, State]]

IDLE = Process(NONE, 0, NONE, 0, NOTHING, NONE, 0, 0, (0, 0, 0))
BLANK = Instance(NONE, NONE)


def violation(state: State) -> str:
    first, second = state.processes
    return "both processes believe to have the key" if first.held and second.held else ""


class ModeLease:
    """What may happen under some rules, within some bounds."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules = rules
        self.bounds = bounds
        last_lease_ticks = bounds.lease_ticks if rules.drain_covers_leases else 1
        self.drain_ticks = bounds.mode_ticks - 1 + last_lease_ticks

    def initial(self) -> State:
        """Redis has the authority, at one instance; the other is blank."""
        instances = (Instance(epoch=1, recorded=0), BLANK)
        return State(Row(1, REDIS, 0), (IDLE, IDLE), instances, (), self.bounds.faults)

    def successors(self, state: State) -> Steps:
        yield "a tick", self._tick(state)
        for who in (0, 1):
            yield from self._learn(state, who)
            yield from self._ask(state, who)
            yield from self._be_answered(state, who)
            yield from self._release(state, who)
        yield from self._move_authority(state)
        yield from self._begin_attempt(state)
        for number in range(len(state.attempts)):
            yield from self._go_on_with_attempt(state, number)
        for instance in INSTANCES if state.faults_left else ():
            yield from self._fail(state, instance)

    # Time.

    def _tick(self, state: State) -> State:
        row, (first, second) = state.row, state.processes
        return state._replace(
            row=row._replace(drain_left=_less(row.drain_left)),
            processes=(self._older(first), self._older(second)),
        )

    def _older(self, one: Process) -> Process:
        rules = self.rules
        known_left = _less(one.known_left) if rules.known_mode_ages else one.known_left
        read_left = _less(one.read_left) if rules.age_from_before_read else one.read_left
        left = _less(one.request_left) if rules.deadline_from_before_send else one.request_left
        at_first, at_second, in_database = one.kept
        older = Process(
            known=one.known if known_left else NONE,
            known_left=known_left,
            read=one.read if read_left else NONE,
            read_left=read_left,
            request=one.request,
            request_epoch=one.request_epoch,
            request_left=left,
            held=_less(one.held),
            kept=(_less(at_first), _less(at_second), _less(in_database)),
        )
        return older if left else self._unawaited(older)

    def _unawaited(self, one: Process) -> Process:
        """Nobody awaits the answer any more, but the request may still be executed."""
        if self.bounds.answers_late and one.request in (TO_REDIS, TO_DATABASE):
            return one._replace(request_left=0)
        return _without_request(one)

    # What the processes do.

    def _learn(self, state: State, who: int) -> Steps:
        """Read the row. That Redis has not the authority is no news to act on."""
        one = state.processes[who]
        if state.row.phase == REDIS:
            reading = one._replace(read=state.row.epoch, read_left=self.bounds.mode_ticks)
            if not self.bounds.answers_late:
                reading = _informed(reading)
            yield f"{who} reads the row", _with(state, who, reading)
        if one.read_left:
            yield f"{who} hears what the row said", _with(state, who, _informed(one))

    def _ask(self, state: State, who: int) -> Steps:
        """Send a request. It awaits one answer at a time, that of the last."""
        one, ticks = state.processes[who], self.bounds.lease_ticks
        if one.known_left:
            asking = one._replace(request=TO_REDIS, request_epoch=one.known, request_left=ticks)
            yield f"{who} sends a request to Redis", _with(state, who, asking)
        asking = one._replace(
            request=TO_DATABASE, request_epoch=state.row.epoch, request_left=ticks
        )
        if self._database_admits(state.row, asking):
            if self.bounds.answers_late:
                yield f"{who} sends a request to the database", _with(state, who, asking)
            else:
                yield from self._grant(state, who, asking, IN_DATABASE)

    def _be_answered(self, state: State, who: int) -> Steps:
        """The request is executed, or its answer comes. A refusal is no better than silence."""
        one = state.processes[who]
        if one.request == TO_REDIS:
            for number, instance in enumerate(state.instances):
                if self._redis_admits(number, instance, one.request_epoch):
                    yield from self._grant(state, who, one, number)
        elif one.request == TO_DATABASE:
            if self._database_admits(state.row, one) or not self.rules.grant_checks_row:
                yield from self._grant(state, who, one, IN_DATABASE)
        elif one.request == ANSWERED:
            yield f"{who} hears that it has the key", _with(state, who, _holding(one))

    def _redis_admits(self, number: int, instance: Instance, epoch: int) -> bool:
        if self.rules.incarnation_checked and instance.recorded != number:
            return False
        return instance.epoch == epoch or not self.rules.epoch_checked

    def _database_admits(self, row: Row, one: Process) -> bool:
        if not self.rules.row_decides:
            return True
        # An extension of what is there goes on until it has ended.
        if one.kept[IN_DATABASE] or not self.rules.closing_grants_nothing:
            return row.phase in (DATABASE, CLOSING)
        return row.phase == DATABASE and row.epoch == one.request_epoch

    def _grant(self, state: State, who: int, one: Process, store: int) -> Steps:
        """The store keeps the key for one from now on, unless it keeps it for the other."""
        if state.processes[1 - who].kept[store]:
            return
        granted = one._replace(
            request=ANSWERED, kept=_put(one.kept, store, self.bounds.lease_ticks)
        )
        if not one.request_left:
            granted = _without_request(granted)
        elif not self.bounds.answers_late:
            granted = _holding(granted)
        yield f"{STORES[store]} grants the key to {who}", _with(state, who, granted)

    def _release(self, state: State, who: int) -> Steps:
        """Release the lease, or give up the request for one."""
        one = state.processes[who]
        if one.held or (one.request_left and self.bounds.answers_late):
            released = one._replace(held=0, kept=(0, 0, 0))
            if self.rules.release_is_final:
                released = self._unawaited(released)
            yield f"{who} releases the key", _with(state, who, released)

    # Who has the authority: whoever wants to moves it, at any time.

    def _move_authority(self, state: State) -> Steps:
        rules, (epoch, phase, drain_left) = self.rules, state.row
        if phase == REDIS and self._may_raise(epoch):
            epoch += rules.drain_raises_epoch
            if rules.drain_first:
                yield "Redis loses the authority", _say(state, epoch, DRAIN, self.drain_ticks)
            else:
                yield "the database takes the authority", _say(state, epoch, DATABASE)
        elif phase == DRAIN and not drain_left:
            yield "the drain is over", _say(state, epoch, DATABASE)
        elif phase == DATABASE and self._may_raise(epoch):
            yield "the database closes", _say(state, epoch + rules.closing_raises_epoch, CLOSING)
        elif phase == CLOSING and self._may_raise(epoch):
            epoch += rules.breaking_off_raises_epoch
            yield "the way back is broken off", _say(state, epoch, DATABASE)

    def _may_raise(self, epoch: int) -> bool:
        return self.bounds.epochs == NONE or epoch < self.bounds.epochs

    def _begin_attempt(self, state: State) -> Steps:
        row, rules = state.row, self.rules
        if row.phase != CLOSING or not self._may_raise(row.epoch):
            return
        if rules.rows_end_first and any(one.kept[IN_DATABASE] for one in state.processes):
            return
        epoch = row.epoch + rules.epoch_per_attempt
        begun = Attempt(epoch, NONE if rules.nonce_needed else self.bounds.opens, False, (0, 0))
        others = tuple(one for one in state.attempts if self._may_matter(one, row))
        free = len(others) < self.bounds.attempts
        # Where there is no room, what is left of an earlier one is lost on its way.
        rests = [others] if free else [_dropped(others, index) for index in range(len(others))]
        for rest in rests:
            after = state._replace(attempts=(*rest, begun))
            yield f"an attempt to open Redis begins, for {epoch}", _say(after, epoch, CLOSING)

    def _may_matter(self, attempt: Attempt, row: Row) -> bool:
        """Whether anything may still come of it."""
        if attempt.opens_left == NONE or self._may_take_authority(attempt, row):
            return True
        if not self.rules.nonce_needed:
            return attempt.opens_left > 0
        found = THERE in attempt.nonces
        if not self.rules.nonce_dies_with_incarnation:
            found = found or GONE in attempt.nonces
        return attempt.opens_left > 0 and found

    def _may_take_authority(self, attempt: Attempt, row: Row) -> bool:
        if not attempt.opened or row.phase != CLOSING:
            return False
        return attempt.epoch == row.epoch or not self.rules.attempt_checks_epoch

    def _go_on_with_attempt(self, state: State, number: int) -> Steps:
        attempt = state.attempts[number]
        name = f"the attempt for {attempt.epoch}"
        if attempt.opens_left == NONE:
            for instance in INSTANCES:
                yield (
                    f"{name} leaves its nonce at {STORES[instance]}",
                    self._leave_nonce(state, number, instance),
                )
        elif attempt.opens_left:
            for instance in INSTANCES:
                if attempt.nonces[instance] == THERE or not self.rules.nonce_needed:
                    yield f"{name} opens {STORES[instance]}", self._open(state, number, instance)
        if self._may_take_authority(attempt, state.row):
            yield f"{name} gives Redis the authority", _say(state, state.row.epoch, REDIS)

    def _leave_nonce(self, state: State, number: int, instance: int) -> State:
        attempts = _nonce_of(state.attempts, instance, number)
        sent = attempts[number]._replace(opens_left=self.bounds.opens)
        return state._replace(attempts=_put(attempts, number, sent))

    def _open(self, state: State, number: int, instance: int) -> State:
        """OPEN is executed: it takes the nonce, records the epoch and clears the locks."""
        attempt = state.attempts[number]
        opened = attempt._replace(
            opens_left=attempt.opens_left - 1,
            opened=True,
            nonces=_put(attempt.nonces, instance, GONE),
        )
        after = state._replace(attempts=_put(state.attempts, number, opened))
        return _emptied(after, instance, Instance(attempt.epoch, recorded=instance))

    # What befalls Redis.

    def _fail(self, state: State, number: int) -> Steps:
        """An instance loses what it has, or some of it.

        The locks are always lost: those that are not only keep others out.
        """
        name, other = STORES[number], 1 - number
        left = state.faults_left if state.faults_left == NONE else state.faults_left - 1
        after = state._replace(faults_left=left)
        yield f"{name} is flushed", _emptied(_nonce_lost(after, number), number, BLANK)
        for restored in self._nonces_restored(_restarted(after, number), number, number):
            instance = restored.instances[number]
            yield f"{name} restarts", _emptied(restored, number, instance)
        for restored in self._nonces_restored(after, number, other):
            instance = restored.instances[other]
            if self.rules.copying_ends_incarnation:
                instance = instance._replace(recorded=NONE)
            yield f"{name} comes up as a copy of the other", _emptied(restored, number, instance)

    def _nonces_restored(self, state: State, number: int, source: int) -> Iterator[State]:
        """With no nonce, or one that the source has or had: a snapshot or a copy may be old."""
        yield _nonce_lost(state, number)
        if not self.rules.nonce_dies_with_incarnation:
            for whose, attempt in enumerate(state.attempts):
                if attempt.nonces[source] != NEVER:
                    yield state._replace(attempts=_nonce_of(state.attempts, number, whose))

    # Which states are alike.

    def canonical(self, state: State) -> Hashable:
        """The same for states that have the same future.

        Neither the processes nor the instances have names that matter. Of the epochs it matters
        only which are equal and which is the latest; so they are counted down from that one, and
        those that nobody carries are not told apart. What can have no effect any more is left out.
        """
        ranks = self._ranks(state)
        first, second = (self._instance(state, number, ranks) for number in INSTANCES)
        orders = [(0, 1)] if first < second else [(1, 0)]
        if first == second:
            orders = [(0, 1), (1, 0)]
        return min(self._arranged(state, ranks, (first, second), order) for order in orders)

    def _ranks(self, state: State) -> dict[int, int]:
        carried = {
            epoch for one in state.processes for epoch in (one.known, one.read, one.request_epoch)
        }
        found = {instance.epoch for instance in state.instances}
        found.update(attempt.epoch for attempt in state.attempts if attempt.opens_left)
        live = carried & found if self.rules.epoch_checked else carried | found
        live.add(state.row.epoch)
        live.discard(NONE)
        return {epoch: rank for rank, epoch in enumerate(sorted(live, reverse=True))}

    def _instance(self, state: State, number: int, ranks: dict[int, int]) -> tuple[int, int]:
        instance = state.instances[number]
        epoch = ranks.get(instance.epoch, NONE)
        recorded = instance.recorded if instance.recorded == NONE else instance.recorded ^ number
        if self.rules.epoch_checked and epoch == NONE:
            return BLANK
        if self.rules.incarnation_checked and recorded == NONE:
            return BLANK
        return epoch, recorded

    def _arranged(
        self,
        state: State,
        ranks: dict[int, int],
        instances: tuple[tuple[int, int], ...],
        order: tuple[int, int],
    ) -> tuple[Hashable, ...]:
        a, b = order
        row = state.row
        processes = []
        for one in state.processes:
            kept = tuple(0 if instances[number] == BLANK else one.kept[number] for number in order)
            processes.append((self._process(one, ranks), kept, one.kept[IN_DATABASE]))
        processes.sort()
        attempts = [
            self._attempt_key(attempt, row, ranks, order)
            for attempt in state.attempts
            if self._may_matter(attempt, row)
        ]
        attempts.sort()
        return (
            row.phase,
            row.drain_left,
            tuple(processes),
            (instances[a], instances[b]),
            tuple(attempts),
            ranks[row.epoch] if self.bounds.epochs == NONE else row.epoch,
            state.faults_left,
        )

    def _process(self, one: Process, ranks: dict[int, int]) -> tuple[Hashable, ...]:
        known = ranks.get(one.known, NONE)
        read = ranks.get(one.read, NONE)
        request = (one.request, ranks.get(one.request_epoch, NONE), one.request_left)
        if one.request == TO_REDIS and request[1] == NONE:
            request = (NOTHING, NONE, 0)
        if one.request == ANSWERED:
            request = (ANSWERED, NONE, one.request_left)
        return (
            one.held,
            (known, 0 if known == NONE else one.known_left),
            (read, 0 if read == NONE else one.read_left),
            request,
        )

    def _attempt_key(
        self, attempt: Attempt, row: Row, ranks: dict[int, int], order: tuple[int, int]
    ) -> tuple[Hashable, ...]:
        nonces = [attempt.nonces[number] for number in order]
        if self.rules.nonce_dies_with_incarnation:
            nonces = [int(nonce == THERE) for nonce in nonces]
        return (
            ranks.get(attempt.epoch, NONE),
            attempt.opens_left,
            self._may_take_authority(attempt, row),
            tuple(nonces),
        )


X = TypeVar("X")


def _less(ticks: int) -> int:
    return ticks - 1 if ticks else 0


def _put(items: tuple[X, ...], index: int, item: X) -> tuple[X, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _dropped(items: tuple[X, ...], index: int) -> tuple[X, ...]:
    return items[:index] + items[index + 1 :]


def _with(state: State, who: int, one: Process) -> State:
    return state._replace(processes=_put(state.processes, who, one))


def _without_request(one: Process) -> Process:
    return one._replace(request=NOTHING, request_epoch=NONE, request_left=0)


def _informed(one: Process) -> Process:
    return one._replace(known=one.read, known_left=one.read_left, read=NONE, read_left=0)


def _holding(one: Process) -> Process:
    return _without_request(one._replace(held=one.request_left))


def _say(state: State, epoch: int, phase: str, drain_left: int = 0) -> State:
    return state._replace(row=Row(epoch, phase, drain_left))


def _emptied(state: State, number: int, instance: Instance) -> State:
    """The instance as given, without locks."""
    processes = tuple(one._replace(kept=_put(one.kept, number, 0)) for one in state.processes)
    return state._replace(processes=processes, instances=_put(state.instances, number, instance))


def _restarted(state: State, number: int) -> State:
    """What was recorded in the instance's last incarnation is nobody's any more."""
    instances = tuple(
        instance._replace(recorded=NONE) if instance.recorded == number else instance
        for instance in state.instances
    )
    return state._replace(instances=instances)


def _nonce_of(attempts: tuple[Attempt, ...], number: int, whose: int) -> tuple[Attempt, ...]:
    """The instance has the nonce of that attempt, and no other; of NONE, if there is none."""
    after = []
    for index, attempt in enumerate(attempts):
        nonce = attempt.nonces[number]
        if index == whose:
            nonce = THERE
        elif nonce == THERE:
            nonce = GONE
        after.append(attempt._replace(nonces=_put(attempt.nonces, number, nonce)))
    return tuple(after)


def _nonce_lost(state: State, number: int) -> State:
    return state._replace(attempts=_nonce_of(state.attempts, number, NONE))
