"""Which verbs an event loop must not be kept waiting by."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from django.utils.asyncio import async_unsafe

Verb = TypeVar("Verb", bound=Callable[..., Any])


def blocking(way_out: str) -> Callable[[Verb], Verb]:
    """Have a verb raise SynchronousOnlyOperation where an event loop runs.

    Like Django's async_unsafe(), which raises and catches an error where none does: too dear for
    an acquire.
    """

    def decorate(verb: Verb) -> Verb:
        refused = async_unsafe(way_out)(verb)

        @functools.wraps(verb)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if asyncio._get_running_loop() is None:
                return verb(*args, **kwargs)
            return refused(*args, **kwargs)

        return cast("Verb", checked)

    return decorate
