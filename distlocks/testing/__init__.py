"""For the tests of code that uses locks: locks in memory, a clock that is moved by hand.

The pytest fixtures `memory_locks` and `lock_clock` come with the installed package.
"""

from .clock import FakeClock, fake_clock
from .overrides import flush_events, flush_history, forget_history, memory_locks

__all__ = [
    "FakeClock",
    "fake_clock",
    "flush_events",
    "flush_history",
    "forget_history",
    "memory_locks",
]
