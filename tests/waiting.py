"""Waiting for what another thread, task or process brings about."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE = 0.002


def eventually(predicate: Callable[[], T], *, within: float = 10.0) -> T:
    """The first true value of `predicate()`; AssertionError if there is none in time."""
    give_up = time.monotonic() + within
    while not (value := predicate()):
        if time.monotonic() > give_up:
            raise AssertionError(f"It has not come about within {within:g} s: {predicate}.")
        time.sleep(PAUSE)
    return value


async def eventually_on_loop(predicate: Callable[[], T], *, within: float = 10.0) -> T:
    """See eventually(): the event loop goes on meanwhile."""
    give_up = time.monotonic() + within
    while not (value := predicate()):
        if time.monotonic() > give_up:
            raise AssertionError(f"It has not come about within {within:g} s: {predicate}.")
        await asyncio.sleep(PAUSE)
    return value
