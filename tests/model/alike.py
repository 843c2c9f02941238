"""Which states of the fast path are alike, so that without bounds there are few enough to visit.

Two are alike if they differ only in names, or in what can have no effect any more. That nothing is
lost by it is not only argued here but tested, by a search that does without.
"""

from collections.abc import Hashable

from tests.model.mode_lease import (
    ANSWERED,
    BLANK,
    IN_DATABASE,
    INSTANCES,
    NONE,
    NOWHERE,
    THERE,
    TO_REDIS,
    Attempt,
    Instance,
    ModeLease,
    Process,
    State,
)


class Alike:
    """The canonical form of a state: the same for all that are alike."""

    def __init__(self, model: ModeLease) -> None:
        self.rules = model.rules
        self.model = model
        self.epochs_bounded = model.bounds.epochs != NONE

    def form(self, state: State) -> Hashable:
        ranks = self._ranks(state)
        instances = tuple(self._instance(state, number, ranks) for number in INSTANCES)
        first, second = instances
        # The order of the instances does not matter, nor that of the processes or the attempts.
        orders = [INSTANCES] if first <= second else []
        orders += [INSTANCES[::-1]] if second <= first else []
        processes = [self._process(one, instances, ranks) for one in state.processes]
        attempts = [
            self._attempt(attempt, state, ranks)
            for attempt in state.attempts
            if self.model.may_matter(attempt, state.row)
        ]
        return (
            state.row.phase,
            state.row.drain_left,
            state.row.epoch if self.epochs_bounded else 0,
            state.faults_left,
            min(instances, instances[::-1]),
            min(_arranged(processes, attempts, order) for order in orders),
        )

    def _ranks(self, state: State) -> dict[int, int]:
        """The epochs that may still be compared, counted down from the row's.

        Only two things matter of an epoch: which others it equals, and whether it is the row's,
        the only one that processes may still learn of. So an epoch of the past that no process
        carries, or that no instance has or may get, will never be found equal to another.
        """
        carried = {state.row.epoch}
        for one in state.processes:
            carried |= {one.known, one.read, one.request_epoch}
        found = {instance.epoch for instance in state.instances}
        found |= {attempt.epoch for attempt in state.attempts}
        live = carried & found if self.rules.epoch_checked else carried | found
        live = (live | {state.row.epoch}) - {NONE}
        return {epoch: rank for rank, epoch in enumerate(sorted(live, reverse=True))}

    def _instance(self, state: State, number: int, ranks: dict[int, int]) -> Instance:
        instance = state.instances[number]
        epoch = ranks.get(instance.epoch, NONE)
        # Whose incarnation: 0 its own, 1 the other's.
        incarnation = instance.incarnation
        if incarnation != NONE:
            incarnation = int(incarnation != number)
        refuses_all = (self.rules.epoch_checked and epoch == NONE) or (
            self.rules.incarnation_checked and incarnation == NONE
        )
        return BLANK if refuses_all else Instance(epoch, incarnation)

    def _process(
        self, one: Process, instances: tuple[Instance, ...], ranks: dict[int, int]
    ) -> tuple[tuple[Hashable, ...], tuple[int, ...]]:
        known, read = ranks.get(one.known, NONE), ranks.get(one.read, NONE)
        request, epoch, left = one.request, ranks.get(one.request_epoch, NONE), one.request_left
        if request == ANSWERED:
            epoch = NONE
        if request == TO_REDIS and epoch == NONE:
            request, left = NOWHERE, 0
        facts = (
            one.held,
            (known, one.known_left if known != NONE else 0),
            (read, one.read_left if read != NONE else 0),
            (request, epoch, left),
        )
        # The locks of an instance that refuses all requests will be cleared before it is asked.
        kept = [0 if instances[number] == BLANK else one.kept[number] for number in INSTANCES]
        return facts, (*kept, one.kept[IN_DATABASE])

    def _attempt(
        self, attempt: Attempt, state: State, ranks: dict[int, int]
    ) -> tuple[tuple[Hashable, ...], tuple[int, ...]]:
        opened = attempt.opened and attempt.epoch == state.row.epoch
        facts = (ranks.get(attempt.epoch, NONE), attempt.stage, attempt.opens_left, opened)
        if self.rules.nonce_ends_with_incarnation:
            return facts, tuple([int(nonce == THERE) for nonce in attempt.nonces])
        return facts, attempt.nonces


def _arranged(
    processes: list[tuple[tuple[Hashable, ...], tuple[int, ...]]],
    attempts: list[tuple[tuple[Hashable, ...], tuple[int, ...]]],
    order: tuple[int, ...],
) -> tuple[tuple[Hashable, ...], ...]:
    a, b = order
    return (
        tuple(sorted([(facts, kept[a], kept[b], kept[2]) for facts, kept in processes])),
        tuple(sorted([(facts, nonces[a], nonces[b]) for facts, nonces in attempts])),
    )
