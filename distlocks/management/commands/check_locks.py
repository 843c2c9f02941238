"""manage.py check_locks: a probe for monitoring, with the exit statuses that Nagios knows."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import Sum

from ... import facts
from ...backends.phases import REDIS, SAID
from ...claims import INTENTION
from ...handler import locks
from ...history.pruning import MINUTES_KEPT
from ...history.rollups import HOUR, MINUTE, TOTAL
from ...live.waiters import databases_of
from ..arguments import (
    add_backends,
    chosen_aliases,
    duration,
    duration_or_none,
    exit_when_misused,
    whole_number,
)
from ..findings import CRITICAL, UNKNOWN, WARNING, Findings, Measure, Thresholds, thresholds
from ..listing import Listed, Listing, Unanswered, listing
from ..shown import age, length, process

LIMITS = "WARNING[,CRITICAL]"
COUNT = thresholds(whole_number("occurrences", 0, 10**9))
# What is counted of the last minutes: by its option, the column, and what one is called, and many.
COUNTED = {
    "timeouts": ("timed_out", "time-out", "time-outs"),
    "losses": ("lost", "lost lease", "lost leases"),
    "errors": ("errors", "failed request to a store", "failed requests to stores"),
    "dropped": ("dropped", "event that the history could not keep", "events lost to the history"),
}


class Command(BaseCommand):
    """Changes nothing. Whatever happens, it ends with one line and a status that says how bad."""

    help = (
        "Tell in one line whether something is wrong with the locks. Exit status: 0 ok, 1 warning, "
        "2 critical, 3 unknown (wrong arguments, or what should be looked at could not be). A "
        "backend that does not answer is critical; a fast path that Redis does not grant for, or a "
        "store in quarantine, is worth a warning. For all else, give the values above which there "
        "is a warning, and above which it is critical: '1h,6h', '3', ',0', or 'none'."
    )
    # They have a probe of their own: check --deploy.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        exit_when_misused(parser, UNKNOWN)
        add_backends(parser, "all")
        lengths = thresholds(duration_or_none)
        for option, read, default, what in (
            ("--held", lengths, "none", "A lock has been held for longer than this."),
            ("--waiters", COUNT, "none", "More than so many wait for one key."),
            ("--waiting", lengths, "none", "Somebody has waited for longer than this."),
            (
                "--expired",
                COUNT,
                "none",
                "More than so many leases have expired and were not swept. Reads whole tables.",
            ),
            (
                "--circles",
                COUNT,
                ",0",
                "More than so many circles of processes that wait for each other.",
            ),
            ("--timeouts", COUNT, "none", "More than so many have waited in vain."),
            ("--losses", COUNT, "0", "More than so many leases were lost to their holders."),
            ("--errors", COUNT, "0", "More than so many requests to stores have failed."),
            ("--dropped", COUNT, "0", "More than so many events were lost to the history."),
        ):
            parser.add_argument(
                option,
                type=read,
                default=default,
                metavar=LIMITS,
                help=f"{what} Default: {default}.",
            )
        parser.add_argument(
            "--within",
            type=duration,
            default="15m",
            metavar="TIME",
            help="How far back time-outs, losses, errors and lost events count. Default: 15m.",
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")

    def handle(self, *args: Any, **options: Any) -> None:
        findings = Findings()
        summary = ""
        try:
            summary = probe(findings, chosen_aliases(options["backend"]), options)
        except (CommandError, ImproperlyConfigured) as error:
            findings.add(UNKNOWN, "settings", str(error))
        except Exception as error:
            # A traceback would end with the status of a warning.
            findings.add(UNKNOWN, "probe", f"The probe failed: {type(error).__name__}: {error}")
        if options["json"]:
            self.stdout.write(json.dumps(findings.document(), indent=2, ensure_ascii=False))
        else:
            self.stdout.write(findings.line("LOCKS", summary))
        if findings.status:
            raise SystemExit(findings.status)


def probe(findings: Findings, aliases: list[str], options: dict[str, Any]) -> str:
    """Look at everything; a summary for the case that all is well."""
    # Who tells of itself is found by one query; queues cost a round trip for each key.
    found = listing(aliases, asks_queue=lambda backend: not backend.recorded)
    for alias, why in found.errors.items():
        findings.add(CRITICAL, "backend", f"{alias} does not answer: {why}")
    for database, why in found.history_errors.items():
        findings.add(UNKNOWN, "history", f"Who waits cannot be read from {database!r}: {why}")
    answering = [alias for alias in aliases if alias not in found.errors]
    check_granting(findings, answering)
    summary = check_holders(findings, found, options["held"])
    summary += f", {check_waiters(findings, found, options['waiters'], options['waiting'])}"
    circles: Thresholds = options["circles"]
    findings.measures.append(Measure("circles", len(found.circles), limits=circles))
    for _, who in found.circles[:1]:
        text = f"Processes wait for each other, and none can go on: {who}"
        findings.add(circles.severity(len(found.circles)), "circles", text)
    if options["expired"].are_set:
        check_expired(findings, answering, options["expired"])
    check_counters(findings, answering, options)
    return summary


def check_granting(findings: Findings, aliases: list[str]) -> None:
    """Whether the stores grant that could."""
    for alias in aliases:
        backend: Any = locks[alias]
        try:
            if backend.supports_authority:
                row = backend.authority.look().row
                if row.phase != REDIS:
                    findings.add(WARNING, "authority", f"{alias}: {SAID[row.phase]}. {row.why}")
            if backend.supports_quarantine and (left := backend.quarantine()):
                text = f"{alias} is in quarantine, and grants nothing for another {length(left)}"
                findings.add(WARNING, "quarantine", text)
        except Unanswered as error:
            findings.add(CRITICAL, "backend", f"{alias} does not answer: {error}")


def check_holders(findings: Findings, found: Listing, limits: Thresholds) -> str:
    """Whether a lock is held for too long; how many are, in words."""
    held = [
        (age(one.holder.since), one)
        for one in found.locks
        # What cools down is kept on purpose; that a key below is held, its own line says.
        if one.holder is not None and not one.holder.cooling_down and one.holder.mode != INTENTION
    ]
    held.sort(key=lambda pair: -pair[0])
    longest = held[0][0] if held else 0.0
    findings.measures += [
        Measure("held", len(held)),
        Measure("longest_held", round(longest, 1), "s", limits),
    ]
    if not held:
        return "no lock held"
    severity = limits.severity(longest)
    others = sum(limits.severity(one) >= severity for one, _ in held) - 1
    also = f", and {others} more for too long" if others else ""
    findings.add(severity, "held", f"{_held(held[0][1], longest)}{also}")
    return f"{len(held)} held, the longest for {length(longest)}"


def _held(one: Listed, seconds: float) -> str:
    assert one.holder is not None
    holder = one.holder
    label = f" ({holder.label})" if holder.label else ""
    return (
        f"{facts.shown(one.name)!r} ({one.aliases[0]}) has been held for {length(seconds)} by "
        f"{process(holder.host, holder.pid, holder.thread)}{label}"
    )


def check_waiters(
    findings: Findings, found: Listing, crowd: Thresholds, patience: Thresholds
) -> str:
    """Whether too many wait, or for too long; how many do, in words."""
    waiting = [(age(one.since), one) for each in found.locks for one in each.waiters]
    waiting.sort(key=lambda pair: -pair[0])
    (key, most), *_ = Counter((one.name, one.alias) for _, one in waiting).most_common(1) or [
        (("", ""), 0)
    ]
    longest = waiting[0][0] if waiting else 0.0
    findings.measures += [
        Measure("waiters", len(waiting)),
        Measure("waiters_of_one_key", most, limits=crowd),
        Measure("longest_wait", round(longest, 1), "s", patience),
    ]
    text = f"{most} wait for {facts.shown(key[0])!r} ({key[1]})"
    findings.add(crowd.severity(most), "waiters", text)
    if not waiting:
        return "nobody waits"
    first = waiting[0][1]
    text = f"{process(first.host, first.pid, first.thread)} has waited for {length(longest)} for "
    text += f"{facts.shown(first.name)!r} ({first.alias})"
    findings.add(patience.severity(longest), "waiting", text)
    return f"{len(waiting)} waiting, the longest for {length(longest)}"


def check_expired(findings: Findings, aliases: list[str], limits: Thresholds) -> None:
    """Whether the sweep has stopped."""
    # Several aliases may share one table.
    stores = {locks[alias].sweep_scope: locks[alias] for alias in aliases}
    count = 0
    for store in stores.values():
        if store.supports_sweep:
            try:
                for batch in store.sweep(older_than=86400, batch_size=1000, dry_run=True):
                    count += len(batch.expired)
            except Unanswered as error:
                findings.add(CRITICAL, "backend", f"{store.alias} does not answer: {error}")
    findings.measures.append(Measure("expired", count, limits=limits))
    text = f"{count} expired {'lease was' if count == 1 else 'leases were'} not swept: does "
    findings.add(limits.severity(count), "expired", f"{text}sweep_locks run?")


def check_counters(findings: Findings, aliases: list[str], options: dict[str, Any]) -> None:
    """Whether too much of what is counted has happened lately."""
    from ...models import LockRollup

    sums: Counter[str] = Counter()
    columns = [column for column, _, _ in COUNTED.values()]
    # Minutes are not kept for long.
    span = MINUTE if options["within"] <= MINUTES_KEPT * 86400 / 2 else HOUR
    for database, backends in databases_of([locks[alias] for alias in aliases]).items():
        rows = LockRollup.objects.using(database).filter(
            span=span,
            pattern=TOTAL,
            backend__in=[backend.alias for backend in backends],
            # One that has begun before is one of those that count.
            began__gt=time.time() - options["within"] - span,
        )
        try:
            found = rows.aggregate(**{f"all_{column}": Sum(column) for column in columns})
        except Unanswered as error:
            text = f"What has happened cannot be read from {database!r}: {error}"
            findings.add(UNKNOWN, "history", text)
            continue
        sums.update({column: found[f"all_{column}"] or 0 for column in columns})
    for option, (column, singular, plural) in COUNTED.items():
        limits: Thresholds = options[option]
        count = sums[column]
        findings.measures.append(Measure(option, count, limits=limits))
        what = f"{count} {singular if count == 1 else plural}"
        text = f"{what} in the last {length(options['within'])}"
        findings.add(limits.severity(count), option, text)
