"""How commands show what they have found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def length(seconds: float) -> str:
    """A length of time in its two largest units."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    rest = round(seconds)
    parts = []
    for unit, size in UNITS:
        count, rest = divmod(rest, size)
        parts.append((count, unit))
    first = next(index for index, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


def age(since: datetime) -> float:
    """Seconds since then, by this process's clock; the stores' may differ a little."""
    return max((datetime.now(UTC) - since).total_seconds(), 0.0)


def until(moment: datetime) -> float:
    """Seconds until then; 0 after it."""
    return max((moment - datetime.now(UTC)).total_seconds(), 0.0)


def process(host: str, pid: int, thread: str) -> str:
    """Who it is."""
    return f"{host or 'unknown host'} pid {pid} {thread}".rstrip()


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows as lines, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()
