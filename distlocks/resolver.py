"""Which keys a decorated call locks."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .keys import SEPARATOR, Key, check_key
from .patterns import pattern_of_template

# The key, or a template for it, or what makes it from the call's arguments.
KeyOrCallable = Key | Callable[..., Key]


class KeyResolver:
    """The keys of a decorated call, from its arguments."""

    def __init__(self, keys: Sequence[KeyOrCallable], function: Callable[..., Any]) -> None:
        self._keys = keys
        self._signature = inspect.signature(function)
        self._name = name_of(function)
        # What operators see the keys of all calls as; None if only a call's own keys tell.
        self.patterns: tuple[str, ...] | None = None
        for key in keys:
            if not callable(key):
                check_key(key)
                for template in (key,) if isinstance(key, str) else key:
                    self._check_template(template)
        templates = [key for key in keys if not callable(key)]
        if len(templates) == len(keys):
            names = [key if isinstance(key, str) else SEPARATOR.join(key) for key in templates]
            self.patterns = tuple(map(pattern_of_template, names))

    def _check_template(self, template: str) -> None:
        parameters = self._signature.parameters
        try:
            names = list(_fields(template))
        except ValueError as error:
            raise ValueError(
                f"The key {template!r} of {self._name}() is no format string: {error}. Write "
                f"literal braces twice."
            ) from error
        for name in names:
            if name not in parameters:
                raise ValueError(
                    f"The key {template!r} of {self._name}() names the argument {name!r}, which "
                    f"the function does not have. It has: {', '.join(parameters) or 'none'}."
                )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()

        def name(key: KeyOrCallable) -> str:
            if callable(key):
                return check_key(key(*args, **kwargs))
            if isinstance(key, str):
                return check_key(key.format_map(bound.arguments))
            return check_key(tuple(part.format_map(bound.arguments) for part in key))

        return tuple({name(key): None for key in self._keys})


def _fields(template: str) -> Iterator[str]:
    """The arguments that a format string names, also inside its format specifications."""
    for _, field_name, specification, conversion in string.Formatter().parse(template):
        if field_name is None:
            continue
        if conversion not in (None, "r", "s", "a"):
            raise ValueError(f"it has an unknown conversion '!{conversion}'")
        yield field_name.split(".")[0].split("[")[0]
        yield from _fields(specification or "")


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in messages."""
    return getattr(function, "__qualname__", None) or repr(function)
