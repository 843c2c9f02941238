"""What a key may be, and how stores name it."""

from __future__ import annotations

import unicodedata

MAX_LENGTH = 200
MAX_PREFIX_LENGTH = 50

# As users write it: text, or a tree key, the path of texts from the root.
Key = str | tuple[str, ...]
# Between the parts of a tree key in its name; no part can hold a control character.
SEPARATOR = "\x1f"


def check_key(key: object) -> str:
    """The name of `key` in stores; TypeError or ValueError, with the way out, if it is no key.

    A key is a `str` of 1 to 200 characters without control characters or lone surrogates, or a
    tuple of such parts, 200 characters in all with one between each two parts. Keys are compared
    exactly: case, accents and trailing spaces count, and no Unicode normalisation takes place.
    ("a",) is "a".
    """
    if isinstance(key, tuple):
        return _check_parts(key)
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


def _check_parts(parts: tuple[object, ...]) -> str:
    if not parts:
        raise ValueError("A tree key needs at least one part, as in ('customer:7', 'order:42').")
    if any(isinstance(part, tuple) for part in parts):
        raise TypeError(f"The parts of a tree key are text, not tuples: flatten {parts!r}.")
    name = SEPARATOR.join(map(check_key, parts))
    if len(name) > MAX_LENGTH:
        raise ValueError(
            f"The tree key {name.split(SEPARATOR)[0][:40]!r}… has {len(name)} characters with "
            f"those between its {len(parts)} parts; at most {MAX_LENGTH} are allowed."
        )
    return name


def key_of(name: str) -> Key:
    """The key that a store knows by this name."""
    return tuple(name.split(SEPARATOR)) if SEPARATOR in name else name


def ancestors(name: str) -> list[str]:
    """The names of the keys above a tree key's, the root first."""
    found = []
    end = name.find(SEPARATOR)
    while end >= 0:
        found.append(name[:end])
        end = name.find(SEPARATOR, end + 1)
    return found


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
        f"as text, as in f'order:{{order.pk}}', or as a tuple of texts."
    )
