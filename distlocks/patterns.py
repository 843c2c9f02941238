"""What keys have in common: "order:42" and "order:43" are both "order:*"."""

from __future__ import annotations

import re
from functools import lru_cache

# What stands for one thing among many: UUIDs, hexadecimal digests, numbers.
_ONE_OF_MANY = re.compile(
    r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
    r"|(?<![0-9a-zA-Z])(?=[a-fA-F]*[0-9])[0-9a-fA-F]{8,}(?![0-9a-zA-Z])"
    r"|\d+(?:[.,_-]\d+)*"
)
# Where there are too many patterns, this is for the rest of them.
OTHERS = "(others)"


@lru_cache(maxsize=8192)
def pattern_of(name: str) -> str:
    """The name of a key with a star for each part that tells it from others of its kind."""
    return _ONE_OF_MANY.sub("*", name)


@lru_cache(maxsize=1024)
def pattern_of_template(template: str) -> str:
    """The pattern of all keys that a format string makes: "invoice:{pk}" is "invoice:*"."""
    import string

    parts = []
    for text, field, _, _ in string.Formatter().parse(template):
        parts.append(text if field is None else f"{text}*")
    return "".join(parts)
