"""Checks what the jobs wrote about themselves: pure functions over records, answers and log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise
from typing import Any

from project.demo.client import Answer
from project.demo.scenario import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run, as the job wrote it down."""

    run: str
    job: str
    server: str
    fencing_token: int
    started_at: datetime
    finished_at: datetime | None
    outcome: str


def check_all(
    records: Sequence[Record],
    answers: Sequence[Answer],
    log: Sequence[Mapping[str, Any]],
    limit: int,
) -> list[Check]:
    """Every promise that can be checked afterwards."""
    return [
        no_overlap(records),
        tokens_grow(records),
        few_at_once(records, limit),
        records_match(records, answers),
        log_matches(log, answers),
    ]


def no_overlap(records: Sequence[Record]) -> Check:
    """No run of a job starts before the one before it has ended."""
    overlaps = [
        f"{later.job}: {later.server} began at {later.started_at:%H:%M:%S.%f}, "
        f"{earlier.server} ended at {ended(earlier)}"
        for earlier, later in _successive(records)
        if earlier.finished_at is None or later.started_at < earlier.finished_at
    ]
    jobs = len({record.job for record in records})
    return Check(
        "no job overlaps with itself",
        not overlaps,
        "; ".join(overlaps) or f"{len(records)} runs of {jobs} jobs",
    )


def ended(record: Record) -> str:
    """When a run ended, for people."""
    return f"{record.finished_at:%H:%M:%S.%f}" if record.finished_at else "no time: it never did"


def tokens_grow(records: Sequence[Record]) -> Check:
    """Of two runs of a job, the later one has the higher token."""
    wrong = [
        f"{later.job}: {later.fencing_token} after {earlier.fencing_token}"
        for earlier, later in _successive(records)
        if later.fencing_token <= earlier.fencing_token
    ]
    pairs = sum(1 for _ in _successive(records))
    return Check(
        "fencing tokens strictly grow per job",
        not wrong,
        "; ".join(wrong) or f"{pairs} pairs of successive runs",
    )


def few_at_once(records: Sequence[Record], limit: int) -> Check:
    """Never more jobs than allowed run at once; and as many as allowed do, now and then."""
    # An end sorts before a start at the same moment.
    moments = sorted(
        [(record.started_at, 1) for record in records]
        + [(record.finished_at, -1) for record in records if record.finished_at]
    )
    running = most = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    return Check(
        f"at most {limit} jobs run at once over both servers",
        most == limit,
        f"{most} at most, of {len(records)} runs",
    )


def records_match(records: Sequence[Record], answers: Sequence[Answer]) -> Check:
    """Each 200 has its record, and there is no record without its 200."""
    written = {(r.run, r.job, r.server, r.fencing_token) for r in records if r.outcome == "done"}
    told = {
        (a.body["run"], a.body["job"], a.body["server"], a.body["fencing_token"])
        for a in answers
        if a.status == 200
    }
    unwritten, untold = told - written, {(r.run, r.job) for r in records} - {t[:2] for t in told}
    faults = [f"no record of {sorted(unwritten)}"] if unwritten else []
    faults += [f"nobody was told of {sorted(untold)}"] if untold else []
    return Check(
        "every 200 has its record, every record its 200",
        not faults,
        "; ".join(faults) or f"{len(told)} runs",
    )


def log_matches(log: Sequence[Mapping[str, Any]], answers: Sequence[Answer]) -> Check:
    """Each attempt, contention and completion is one line of the servers' logs."""
    logged = Counter(line["event"] for line in log if str(line.get("event")).startswith("job."))
    by_status = Counter(answer.status for answer in answers)
    expected = Counter(
        {
            "job.attempt": len(answers),
            "job.contention": by_status[409],
            "job.done": by_status[200],
        }
    )
    seen = ", ".join(f"{count} {event}" for event, count in sorted(logged.items()))
    return Check(
        "each attempt, contention and completion is one log line",
        logged == +expected,
        seen if logged == +expected else f"{seen}; expected {dict(expected)}",
    )


def _successive(records: Sequence[Record]) -> Iterable[tuple[Record, Record]]:
    """Each run with the next one of the same job, in the order of their starts."""
    in_order = sorted(records, key=lambda record: (record.job, record.started_at))
    for _, runs in groupby(in_order, key=lambda record: record.job):
        yield from pairwise(runs)
