"""How the results are shown."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rounds import Result

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def show(result: Result) -> None:
    table = Table(title=f"{result.name}: {result.title}", title_justify="left")
    for number, column in enumerate(result.columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in result.rows:
        table.add_row(*row)
    console.print(table)
    for target in result.targets:
        sign = "[green]met[/green]" if target.met else "[red]missed[/red]"
        bound = "at least" if target.at_least else "at most"
        console.print(
            f"  {target.what}: {target.figure:.2f}{target.unit}, "
            f"target {bound} {target.limit:g}{target.unit}: {sign}"
        )
    for note in result.notes:
        console.print(f"  {note}", style="dim")
    console.print()


def write(path: Path, versions: dict[str, str], quick: bool, results: Sequence[Result]) -> None:
    found = {
        "versions": versions,
        "quick": quick,
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
