"""What a key may be."""

from __future__ import annotations

import unicodedata

MAX_LENGTH = 200
MAX_PREFIX_LENGTH = 50


def check_key(key: object) -> str:
    """Return `key` unchanged if it is one, else raise TypeError or ValueError with the way out.

    A key is a `str` of 1 to 200 characters without control characters or lone surrogates. Keys
    are compared exactly: case, accents and trailing spaces count, and no Unicode normalisation
    takes place.
    """
    if not isinstance(key, str):
        raise TypeError(_not_a_str(key))
    if not 1 <= len(key) <= MAX_LENGTH:
        if not key:
            raise ValueError(
                "A lock key must not be empty: name what it protects, as in 'order:42'."
            )
        raise ValueError(
            f"The lock key {key[:40]!r}… has {len(key)} characters; at most {MAX_LENGTH} are "
            f"allowed. Use a shorter name, or a digest of the long part "
            f"(hashlib.sha256(…).hexdigest())."
        )
    # Asked here as well, to save making the words that nearly no key needs.
    if not key.isprintable():
        check_characters(key, f"lock key {key!r}")
    return key


def check_characters(text: str, what: str, *, allowed: str = "") -> None:
    """Raise ValueError if `text` holds a control character or a lone surrogate."""
    if text.isprintable():
        return
    for position, character in enumerate(text):
        if character in allowed:
            continue
        category = unicodedata.category(character)
        if category == "Cc":
            problem = "the control character"
        elif category == "Cs":
            problem = "the lone surrogate"
        else:
            continue
        raise ValueError(
            f"The {what} holds {problem} U+{ord(character):04X} at position {position}, which no "
            f"store can keep exactly. Remove or escape it."
        )


def _not_a_str(key: object) -> str:
    if isinstance(key, bytes | bytearray | memoryview):
        return (
            f"A lock key must be a str, not {type(key).__name__}: decode it (key.decode()), or "
            f"use its hexadecimal form (key.hex())."
        )
    return (
        f"A lock key must be a str, not {type(key).__name__} ({key!r}): write what it protects "
        f"as text, as in f'order:{{order.pk}}'."
    )
