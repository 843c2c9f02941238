"""pytest fixtures, registered by the installed package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .clock import FakeClock


@pytest.fixture
def memory_locks() -> Iterator[None]:
    """All locks of the test in memory."""
    # Imported late: the plugin must not load Django before it is configured.
    from .overrides import memory_locks

    with memory_locks():
        yield


@pytest.fixture
def lock_clock(memory_locks: None) -> Iterator[FakeClock]:
    """All locks of the test in memory, and their clock in the test's hands."""
    from .clock import fake_clock

    with fake_clock() as clock:
        yield clock
