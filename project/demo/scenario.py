"""The course of the demo: what is asked of the servers, and what has to come of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from project.demo.client import Answer, Shot, Volley, fire
from project.servers import Server

LEASE_SECONDS = 10.0
LONG_JOB = "nightly-report"
LONG_SECONDS = 12.0
# When the rival asks for the long job: after its first lease would have run out.
RIVAL_SECONDS = 11.0
CONTESTED_JOB = "invoices"
INTERVAL = 3.0
# So many jobs may run at once.
LIMIT = 4
# How often those who were refused come back together.
RETURNS = 3


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, whether it held, and by what one sees it."""

    promise: str
    held: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that belong together, their answers, and what has to hold of them."""

    title: str
    answers: Sequence[Answer]
    check: Check


def play(servers: Sequence[Server], show: Callable[[Round], None]) -> list[Round]:
    """Play all rounds, showing each when it is over."""
    rounds: list[Round] = []

    def over(title: str, answers: Sequence[Answer], check: Check) -> None:
        rounds.append(Round(title, answers, check))
        show(rounds[-1])

    began = time.monotonic()
    long_run = Volley([Shot(server=servers[0], job=LONG_JOB, seconds=LONG_SECONDS, interval=0)])

    over(*_contested(servers))
    over(*_cooling(servers))
    refusals = rounds[-1].answers
    over(*_parallel(servers))
    for number in range(1, RETURNS + 1):
        over(*_as_told(servers, refusals, number))
        refusals = rounds[-1].answers
    time.sleep(max(began + RIVAL_SECONDS - time.monotonic(), 0))
    rival = fire([Shot(server=servers[-1], job=LONG_JOB, seconds=1, interval=0)])
    over(*_renewed([*rival, *long_run.answers()]))
    return rounds


def _contested(servers: Sequence[Server]) -> tuple[str, list[Answer], Check]:
    answers = fire(_eight(servers))
    return (
        f"Eight requests for {CONTESTED_JOB} at once, over both servers",
        answers,
        Check("exactly one of eight runs", _one_runs(answers), _statuses(answers)),
    )


def _cooling(servers: Sequence[Server]) -> tuple[str, list[Answer], Check]:
    answers = fire(_eight(servers)[: len(servers)])
    held = all(answer.state == "cooling_down" and _is_refusal(answer) for answer in answers)
    return (
        f"{CONTESTED_JOB} again, before its {INTERVAL:g} s are over",
        answers,
        Check("no job runs again within its interval", held, _statuses(answers)),
    )


def _as_told(
    servers: Sequence[Server], refusals: Sequence[Answer], number: int
) -> tuple[str, list[Answer], Check]:
    until = max(
        (answer.answered_at.timestamp() + (answer.retry_after or 0) for answer in refusals),
        default=0.0,
    )
    time.sleep(max(until - time.time(), 0))
    answers = fire(_eight(servers))
    return (
        f"Return {number}: eight for {CONTESTED_JOB} after the wait that Retry-After asked for",
        answers,
        Check(
            f"return {number}: of those who waited as told, exactly one runs",
            _one_runs(answers),
            _statuses(answers),
        ),
    )


def _parallel(servers: Sequence[Server]) -> tuple[str, list[Answer], Check]:
    jobs = [f"customer-{number}" for number in range(1, 7)]
    answers = fire(
        [
            Shot(server=servers[number % len(servers)], job=job, seconds=1, interval=0)
            for number, job in enumerate(jobs)
        ]
    )
    took = max(a.answered_at for a in answers) - min(a.sent_at for a in answers)
    held = all(answer.status == 200 for answer in answers) and took.total_seconds() < len(jobs)
    seen = f"{_statuses(answers)}; six seconds of work in {took.total_seconds():.1f} s"
    return (
        f"Six different jobs at once, beside {LONG_JOB}: {LIMIT} jobs may run",
        answers,
        Check("different jobs run side by side", held, seen),
    )


def _renewed(answers: list[Answer]) -> tuple[str, list[Answer], Check]:
    rival, long_run = answers
    age = (rival.sent_at - long_run.sent_at).total_seconds()
    held = (
        rival.state == "running"
        and _is_refusal(rival)
        and age > LEASE_SECONDS
        and long_run.status == 200
    )
    seen = f"rival at second {age:.1f} got {rival.status}; the long job got {long_run.status}"
    return (
        f"{LONG_JOB} works {LONG_SECONDS:g} s on a lease of {LEASE_SECONDS:g} s; a rival asks late",
        answers,
        Check("a lease is renewed while its job runs", held, seen),
    )


def _eight(servers: Sequence[Server]) -> list[Shot]:
    return [
        Shot(
            server=servers[number % len(servers)],
            job=CONTESTED_JOB,
            seconds=0.6,
            interval=INTERVAL,
        )
        for number in range(8)
    ]


def _one_runs(answers: Sequence[Answer]) -> bool:
    done = [answer for answer in answers if answer.status == 200]
    return len(done) == 1 and all(map(_is_refusal, (a for a in answers if a not in done)))


def _is_refusal(answer: Answer) -> bool:
    """A 409 that says who holds the job and when to come again."""
    holder = answer.body.get("held_by") or {}
    return (
        answer.status == 409
        and answer.retry_after is not None
        and answer.retry_after >= 1
        and {"server", "host", "pid", "since", "remaining"} <= holder.keys()
    )


def _statuses(answers: Sequence[Answer]) -> str:
    counts = Counter(answer.status for answer in answers)
    return ", ".join(f"{count} answered {status}" for status, count in sorted(counts.items()))
