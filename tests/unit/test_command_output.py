"""What commands show."""

import pytest

from distlocks.management.findings import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARNING,
    Findings,
    Measure,
    Thresholds,
    one_line,
)
from distlocks.management.shown import length, table


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0.0 s"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (10, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 m"),
        (61, "1 m 1 s"),
        (3600, "1 h"),
        (3 * 3600 + 125, "3 h 2 m"),
        (86400 * 2 + 59, "2 d"),
        (86400 * 400 + 7200, "400 d 2 h"),
    ],
)
def test_lengths_of_time_have_two_units(seconds: float, words: str) -> None:
    assert length(seconds) == words


def test_a_table_has_no_blanks_at_its_end() -> None:
    assert list(table([("a", "b", "c"), ("long", "", ""), ("", "x", "")])) == [
        "a     b  c",
        "long",
        "      x",
    ]


@pytest.mark.parametrize(
    ("limits", "severities"),
    [
        (Thresholds(), [OK, OK, OK]),
        (Thresholds(1), [OK, WARNING, WARNING]),
        (Thresholds(None, 1), [OK, CRITICAL, CRITICAL]),
        (Thresholds(0, 2), [WARNING, WARNING, CRITICAL]),
    ],
)
def test_a_threshold_is_the_highest_value_that_is_well(
    limits: Thresholds, severities: list[int]
) -> None:
    assert [limits.severity(value) for value in (1, 2, 3)] == severities


@pytest.mark.parametrize(
    ("severities", "status"),
    [
        ([], OK),
        ([UNKNOWN], UNKNOWN),
        ([UNKNOWN, WARNING], WARNING),
        ([WARNING, CRITICAL, UNKNOWN], CRITICAL),
    ],
)
def test_the_worst_counts(severities: list[int], status: int) -> None:
    findings = Findings()
    for severity in severities:
        findings.add(severity, "check", f"{severity}.")
    assert findings.status == status
    line = findings.line("LOCKS", "all is well")
    assert line.count("\n") == 0
    if severities:
        assert f": {status}" in line


def test_numbers_come_behind_a_bar() -> None:
    findings = Findings()
    findings.measures = [Measure("held", 2), Measure("age", 1.5, "s", Thresholds(3, 4))]
    assert findings.line("LOCKS", "well") == "LOCKS OK: well. | held=2 age=1.5s;3;4"


def test_no_text_breaks_the_line_or_makes_it_endless() -> None:
    assert one_line("a\nb |\tc") == "a b / c"
    assert len(one_line("long " * 100)) == 240
