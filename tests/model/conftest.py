"""The fixture that keeps verdicts."""

import sys
from collections.abc import Callable

import pytest

from tests.model.explorer import Report, S
from tests.model.verdicts import Tell


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Tell:
    """Keeps a verdict: in the test's output, and in its properties."""

    def keep(report: Report[S]) -> None:
        record_property("states", report.states)
        record_property("steps", report.depth)
        record_property("verdict", str(report))
        sys.stdout.write(f"{report}\n")

    return keep
