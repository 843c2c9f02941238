"""Proves from the journals of all processes that the locks kept their promises.

Two clocks tell the order of things, and each must tell the same story: the server's, from which a
grant's microseconds and a reading at each end come (where it is read at the grant, not when its
statement began); and the lease clock of this machine, by which the holders trust their leases.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Event = dict[str, Any]
MICROSECOND = 1_000_000
# Seconds within which, once the lease of a killed holder has ended, a waiter must have the key;
# and within which a sleeper must be woken after a release.
GRACE = 1.0


@dataclass(frozen=True)
class Violation:
    """One promise that was not kept."""

    rule: str
    key: str
    story: str

    def __str__(self) -> str:
        return f"{self.rule}, {self.key!r}: {self.story}"


@dataclass
class Hold:
    """One key of one lease, as its holder knew it."""

    who: str
    key: str
    token: int
    owner: str
    ttl: float
    # When the acquire had returned, on the lease clock; when it was granted, on the server's, or
    # None where the server's time of it is only that of the statement's beginning.
    at: float
    granted_us: int | None
    # On the lease clock; as last known.
    deadline: float
    # Until when the holder trusted the lease, on either clock; infinite while nobody knows.
    until: float = float("inf")
    until_us: float = float("inf")
    # None: the holder has never said.
    ours: bool | None = None
    ended: float | None = None

    def __str__(self) -> str:
        return f"{self.who} with token {self.token} from {self.granted_us} to {self.until_us}"


@dataclass
class Wait:
    """From asking for keys to having them, or giving up."""

    who: str
    keys: tuple[str, ...]
    since: float
    until: float = float("inf")


@dataclass
class Report:
    """What the journals show."""

    violations: list[Violation] = field(default_factory=list)
    # How often there was something to be seen, so that a proof of nothing is noticed.
    counts: Counter[str] = field(default_factory=Counter)

    def rules(self) -> set[str]:
        return {violation.rule for violation in self.violations}

    def __str__(self) -> str:
        shown = "\n".join(f"  {violation}" for violation in self.violations[:20])
        return f"{len(self.violations)} violations, {dict(self.counts)}\n{shown}"


def check(events: Iterable[Event], balances: dict[str, int] | None = None) -> Report:
    """Hold the journals against every promise; `balances` is what the accounts hold at the end."""
    journals = _Journals(events)
    report = Report()
    for rule in (
        _tokens,
        _exclusion,
        _no_early_loss,
        _killed_holders,
        _paused_holders,
        _sleepers,
        _everybody_ended,
    ):
        report.violations.extend(rule(journals, report.counts))
    report.violations.extend(_updates(journals, report.counts, balances))
    return report


def holds(events: Iterable[Event]) -> list[Hold]:
    """All that was held, as the holders knew it."""
    return _Journals(events).holds


class _Journals:
    """The events, put together to holds and waits."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.holds: list[Hold] = []
        self.waits: list[Wait] = []
        self.kills: list[Event] = []
        self.pauses: list[Event] = []
        self.changes: list[Event] = []
        self.sleeps: list[Event] = []
        self.ends: list[Event] = []
        self.started: set[str] = set()
        self.stopped: set[str] = set()
        self._open: dict[str, list[Hold]] = {}
        self._asking: dict[str, Wait] = {}
        for event in events:
            getattr(self, f"_on_{event['event']}")(event)
        # Killed: from then on it trusted nothing.
        for kill in self.kills:
            for hold in self.holds:
                if hold.who == kill["victim"] and hold.ended is None:
                    hold.until = min(hold.deadline, kill["at"])
                    hold.until_us = min(
                        kill["before_us"],
                        kill["before_us"] + (hold.deadline - kill["at"]) * MICROSECOND,
                    )

    def _on_started(self, event: Event) -> None:
        self.started.add(event["who"])

    def _on_stopped(self, event: Event) -> None:
        self.stopped.add(event["who"])

    def _on_ask(self, event: Event) -> None:
        wait = Wait(event["who"], tuple(event["keys"]), event["at"])
        self.waits.append(wait)
        self._asking[event["who"]] = wait

    def _on_denied(self, event: Event) -> None:
        self._asking.pop(event["who"]).until = event["at"]

    def _on_grant(self, event: Event) -> None:
        self._asking.pop(event["who"]).until = event["at"]
        tokens: dict[str, int] = event["tokens"]
        several = len(tokens) > 1
        holds = [
            Hold(
                who=event["who"],
                key=key,
                token=token,
                owner=event["owner"],
                ttl=event["ttl"],
                at=event["at"],
                # The server's time of the grant is the first key's; those after it were had a
                # little later, which their tokens tell.
                granted_us=token if several and event["granted_us"] else event["granted_us"],
                deadline=event["deadline"],
            )
            for key, token in tokens.items()
        ]
        self.holds.extend(holds)
        self._open[event["owner"]] = holds

    def _on_end(self, event: Event) -> None:
        self.ends.append(event)
        for hold in self._open.pop(event["owner"]):
            hold.deadline = event["deadline"]
            hold.ours, hold.ended = event["ours"], event["at"]
            # The server's clock was read first, `read_at` on the lease clock after that, and the
            # release was sent last.
            hold.until = min(event["read_at"], hold.deadline)
            hold.until_us = (
                event["server_us"] + min(hold.deadline - event["read_at"], 0.0) * MICROSECOND
            )

    def _on_changed(self, event: Event) -> None:
        self.changes.append(event)

    def _on_slept(self, event: Event) -> None:
        self.sleeps.append(event)

    def _on_killed(self, event: Event) -> None:
        self.kills.append(event)

    def _on_paused(self, event: Event) -> None:
        self.pauses.append(event)

    def by_key(self) -> Iterator[tuple[str, list[Hold]]]:
        keys: defaultdict[str, list[Hold]] = defaultdict(list)
        for hold in self.holds:
            keys[hold.key].append(hold)
        yield from keys.items()


def _by_server(holds: Iterable[Hold]) -> list[tuple[int, Hold]]:
    """In the order of their grants by the server's clock, which goes with each."""
    dated = [(hold.granted_us, hold) for hold in holds if hold.granted_us is not None]
    return sorted(dated, key=lambda grant: (grant[0], grant[1].until_us, grant[1].at))


def _tokens(journals: _Journals, counts: Counter[str]) -> Iterator[Violation]:
    """Each grant's token is higher than that of every grant of the key before."""
    for key, holds in journals.by_key():
        counts["grants"] += len(holds)
        by_server = [hold for _, hold in _by_server(holds)]
        # Who had lost the lease before it had the answer does not tell when it was granted.
        by_holders = sorted((h for h in holds if h.at < h.deadline), key=lambda hold: hold.at)
        for order, name in ((by_server, "server's clock"), (by_holders, "holders' clock")):
            for one, other in pairwise(order):
                if one.token >= other.token:
                    yield Violation("token", key, f"by the {name}, {other} came after {one}")


def _exclusion(journals: _Journals, counts: Counter[str]) -> Iterator[Violation]:
    """No two leases of a key are trusted at once."""
    for key, holds in journals.by_key():
        last: Hold | None = None
        for granted_us, hold in _by_server(holds):
            if last is not None and granted_us < last.until_us:
                yield Violation("exclusion", key, f"by the server's clock: {last}, and {hold}")
            if last is None or hold.until_us > last.until_us:
                last = hold
        last = None
        for hold in sorted(holds, key=lambda hold: hold.at):
            if hold.at >= hold.until:
                continue
            if last is not None and hold.at < last.until:
                yield Violation("exclusion", key, f"by the holders' clock: {last}, and {hold}")
            if last is None or hold.until > last.until:
                last = hold


def _no_early_loss(journals: _Journals, counts: Counter[str]) -> Iterator[Violation]:
    """Nobody loses a lease before its deadline."""
    for hold in journals.holds:
        if hold.ended is None:
            continue
        counts["kept" if hold.ours else "lost"] += 1
        if not hold.ours and hold.ended < hold.deadline:
            yield Violation(
                "early loss",
                hold.key,
                f"{hold} was told that it is lost {hold.deadline - hold.ended:.3f} s too early",
            )


def _killed_holders(journals: _Journals, counts: Counter[str]) -> Iterator[Violation]:
    """Who waits for a killed holder's key has it, or somebody else has, within ttl + 1 s."""
    holds = dict(journals.by_key())
    for kill in journals.kills:
        for left in (h for h in journals.holds if h.who == kill["victim"] and h.ended is None):
            limit = kill["after"] + left.ttl + GRACE
            heirs = [h for h in holds[left.key] if h.who != left.who and h.token > left.token]
            first = min((heir.at for heir in heirs), default=float("inf"))
            counts["killed holders inherited from"] += first <= limit
            for wait in journals.waits:
                in_vain = left.key in wait.keys and wait.since < limit - GRACE < limit < wait.until
                if first > limit and wait.who != left.who and in_vain:
                    yield Violation(
                        "late takeover",
                        left.key,
                        f"{wait.who} was still waiting {left.ttl + GRACE:g} s after {left} died",
                    )


def _paused_holders(journals: _Journals, counts: Counter[str]) -> Iterator[Violation]:
    """Who was paused past the lease, and somebody else had it meanwhile, finds it lost."""
    for pause in journals.pauses:
        for hold in journals.holds:
            if hold.who == pause["victim"] and hold.at < pause["at"] < (hold.ended or 0.0):
                counts["paused holders"] += 1
                if hold.ours:
                    yield Violation("unaware", hold.key, f"{hold} was paused and noticed nothing")


def _sleepers(journals: _Journals, counts: Counter[str]) -> Iterator[Violation]:
    """Nobody sleeps on beside a key for long after its release."""
    released: defaultdict[str, list[int]] = defaultdict(list)
    for end in journals.ends:
        # Read after the release had been answered, and announced.
        for key in end["keys"] if end["ours"] else ():
            released[key].append(end["released_us"])
    for moments in released.values():
        moments.sort()
    for sleep in journals.sleeps:
        counts["sleeps"] += 1
        during = (r for r in released[sleep["key"]] if sleep["from_us"] < r < sleep["to_us"])
        first = next(during, None)
        if first is not None:
            counts["woken"] += 1
            late = (sleep["to_us"] - first) / MICROSECOND
            if late > GRACE:
                yield Violation(
                    "late wake-up", sleep["key"], f"{sleep['who']} slept on for {late:.2f} s"
                )


def _everybody_ended(journals: _Journals, counts: Counter[str]) -> Iterator[Violation]:
    """Every process ended as it should, or was killed."""
    killed = {kill["victim"] for kill in journals.kills}
    for who in sorted(journals.started - journals.stopped - killed):
        yield Violation("ended", "", f"{who} ended and did not say why")


def _updates(
    journals: _Journals, counts: Counter[str], balances: dict[str, int] | None
) -> Iterator[Violation]:
    """What was read, changed and written back under a lease is not lost."""
    changes: defaultdict[str, list[Event]] = defaultdict(list)
    for change in journals.changes:
        changes[change["key"]].append(change)
    for key, of_key in changes.items():
        # A lease whose holder stood still for longer than it lasted covers nothing.
        if not all(change["covered"] for change in of_key):
            counts["uncovered accounts"] += 1
            continue
        counts["updates"] += len(of_key)
        lost = _repeated([change["read"] for change in of_key])
        if lost:
            yield Violation("lost update", key, f"{lost} were read twice and changed twice")
        if balances is not None and balances[key] != len(of_key):
            yield Violation(
                "lost update", key, f"{len(of_key)} changes left a balance of {balances[key]}"
            )


def _repeated(values: Sequence[int]) -> list[int]:
    return sorted(value for value, times in Counter(values).items() if times > 1)
