"""Shows the demo in the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from project.demo.client import Answer
from project.demo.scenario import Check, Round

# What a reader of the log wants to see first; the rest of each line is left out here.
LOG_FIELDS = ("job", "server", "pid", "token", "waited_ms", "state", "retry_after")


def show_round(console: Console, number: int, played: Round) -> None:
    """A table of what each server answered."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{number}. {played.title}",
        title_justify="left",
        title_style="bold",
    )
    for column in ("answered", "server", "job", "status"):
        table.add_column(column, no_wrap=True)
    table.add_column("who holds it, or what was done", overflow="fold")
    table.add_column("Retry-After", justify="right")
    for answer in played.answers:
        table.add_row(
            f"{answer.answered_at.astimezone():%H:%M:%S.%f}"[:-3],
            answer.shot.server.name,
            answer.shot.job,
            Text(str(answer.status), style="green" if answer.status == 200 else "yellow"),
            _who(answer),
            f"{answer.retry_after} s" if answer.retry_after is not None else "",
        )
    console.print(table)
    _show_check(console, played.check)
    console.print()


def show_log(console: Console, lines: Sequence[Mapping[str, Any]]) -> None:
    """The first and last lines of each kind, in the order in which they were written."""
    chosen = sorted(_chosen(lines), key=lambda line: str(line["at"]))
    count = f"{len(chosen)} of {len(lines)} lines, shortened"
    console.print(f"[bold]From the servers' logs[/] ({count})")
    for line in chosen:
        facts = {name: line[name] for name in LOG_FIELDS if line.get(name) is not None}
        if holder := line.get("held_by"):
            facts["held_by"] = f"{holder['server']} pid {holder['pid']}"
        console.print(
            Text.assemble(
                (str(line["at"])[11:23], "dim"),
                " ",
                (f"{line['event']:<15}", "cyan"),
                json.dumps(facts),
            ),
            soft_wrap=True,
        )
    console.print()


def show_summary(console: Console, checks: Sequence[Check], seconds: float) -> None:
    """All checks, and the verdict."""
    console.print("[bold]Checks[/]")
    for check in checks:
        _show_check(console, check)
    failed = [check for check in checks if not check.held]
    console.print()
    if failed:
        verdict = f"[bold red]{len(failed)} of {len(checks)} checks failed[/]"
    else:
        verdict = f"[bold green]All {len(checks)} checks hold[/]"
    console.print(f"{verdict} ({seconds:.1f} s)")


def _show_check(console: Console, check: Check) -> None:
    mark = ("holds ", "green") if check.held else ("FAILED", "bold red")
    console.print(Text.assemble("  ", mark, "  ", check.promise, (f"  ({check.seen})", "dim")))


def _who(answer: Answer) -> str:
    body, holder = answer.body, answer.body.get("held_by")
    if answer.status == 200:
        return f"done, token {body['fencing_token']}"
    if holder is None:
        return str(body.get("detail", answer.state))
    what = "cools down after" if answer.state == "cooling_down" else "runs on"
    return f"{what} {holder['server']}, pid {holder['pid']}, {holder['remaining']:.1f} s left"


def _chosen(lines: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        kinds.setdefault((str(line["event"]), str(line.get("state", ""))), []).append(line)
    for found in kinds.values():
        yield from found[:2]
        yield from found[2:][-1:]
