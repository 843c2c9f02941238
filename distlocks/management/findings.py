"""What a probe tells whoever is on call: how bad it is, and in how few words."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

# As monitoring systems read them from an exit status; see the guidelines of the Monitoring Plugins
# project.
OK, WARNING, CRITICAL, UNKNOWN = range(4)
WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
# Of several, the one that counts most.
WORST_FIRST = (CRITICAL, WARNING, UNKNOWN, OK)
# Characters of one finding: a pager shows one line.
LONGEST = 240


class Thresholds(NamedTuple):
    """Above which value something is worth a warning, and above which it is critical."""

    warning: float | None = None
    critical: float | None = None

    def severity(self, value: float) -> int:
        """How bad the value is."""
        if self.critical is not None and value > self.critical:
            return CRITICAL
        if self.warning is not None and value > self.warning:
            return WARNING
        return OK

    @property
    def are_set(self) -> bool:
        """Whether any value is too high."""
        return self != (None, None)


def thresholds(read: Callable[[str], float]) -> Callable[[str], Thresholds]:
    """What reads WARNING, or WARNING,CRITICAL, of which either may be left out; or 'none'."""

    def reads(text: str) -> Thresholds:
        if text == "none":
            return Thresholds()
        first, _, second = text.partition(",")
        if not (first or second):
            raise argparse.ArgumentTypeError("Give WARNING, WARNING,CRITICAL or ,CRITICAL.")
        warning = read(first) if first else None
        critical = read(second) if second else None
        if warning is not None and critical is not None and warning > critical:
            raise argparse.ArgumentTypeError(
                f"{text!r} is critical before it is worth a warning: give the lower one first."
            )
        return Thresholds(warning, critical)

    return reads


class Finding(NamedTuple):
    """Something that is not as it should be."""

    severity: int
    # What was looked at.
    check: str
    text: str


class Measure(NamedTuple):
    """A number for graphs."""

    name: str
    value: float
    unit: str = ""
    limits: Thresholds = Thresholds()

    def __str__(self) -> str:
        warning, critical = ("" if limit is None else f"{limit:g}" for limit in self.limits)
        return f"{self.name}={self.value:g}{self.unit};{warning};{critical}".rstrip(";")


class Findings:
    """All that one run of a probe has found."""

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self.measures: list[Measure] = []

    def add(self, severity: int, check: str, text: str) -> None:
        """Note something, if it is worth it."""
        if severity != OK:
            self.found.append(Finding(severity, check, one_line(text)))

    @property
    def status(self) -> int:
        """The worst of it."""
        severities = {finding.severity for finding in self.found} | {OK}
        return next(severity for severity in WORST_FIRST if severity in severities)

    def line(self, subject: str, when_well: str) -> str:
        """Everything in one line, the worst first; what follows the bar is for graphs."""
        self.found.sort(key=lambda finding: WORST_FIRST.index(finding.severity))
        told = "; ".join(finding.text.rstrip(".") for finding in self.found) or when_well
        numbers = " ".join(map(str, self.measures))
        return f"{subject} {WORDS[self.status]}: {told}." + (f" | {numbers}" if numbers else "")

    def document(self) -> dict[str, Any]:
        """The same for programs."""
        self.found.sort(key=lambda finding: WORST_FIRST.index(finding.severity))
        return {
            "status": WORDS[self.status].lower(),
            "code": self.status,
            "findings": [
                {
                    "severity": WORDS[finding.severity].lower(),
                    "check": finding.check,
                    "text": finding.text,
                }
                for finding in self.found
            ],
            "numbers": {measure.name: measure.value for measure in self.measures},
        }


def one_line(text: str) -> str:
    """The text without what would end the line, or begin the numbers."""
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
