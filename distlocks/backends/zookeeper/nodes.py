"""How keys, claims and those who wait are named as nodes.

    {path}                                   its version counts the sweeps that deleted a key
    {path}/sessions/{session}                ephemeral: this session lives
    {path}/locks/{key}                       its last fencing token; each grant changes it
    {path}/locks/{key}/{claim}               one claim on it, live, cooling down, or left behind
    {path}/queue/{key}/{claim}{number}       ephemeral, sequential: who waits for it

A claim's node is no ephemeral one: what a dead process has left behind must be known for as long
as its lease, or its minimum hold, goes on. It names the session that it is to be trusted with.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from ...claims import EXCLUSIVE, INTENTION, PERMIT, SHARED, Claim

LETTER = {EXCLUSIVE: "E", SHARED: "S", PERMIT: "P", INTENTION: "I"}
MODE = {letter: mode for mode, letter in LETTER.items()}
# What ZooKeeper allows in no name, and what the escapes are made of. It counts in UTF-16, of
# which it allows no surrogates, and so nothing beyond the basic plane.
_ESCAPED = re.compile("[%/\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\U0010ffff]")
_DOTS = (".", "..")
_BETWEEN = "."
_RELEASED = "released"
_DIGITS = 10


def node_of(name: str) -> str:
    """The node of a key: its name as it stands, but for what ZooKeeper refuses, as in URLs."""
    node = _ESCAPED.sub(lambda found: _escaped(found[0]), name)
    return node.replace(".", "%2E") if node in _DOTS else node


def name_of(node: str) -> str:
    """The name of the key of this node."""
    return unquote(node, errors="strict") if "%" in node else node


def _escaped(text: str) -> str:
    return "".join([f"%{byte:02X}" for byte in text.encode()])


class Named(NamedTuple):
    """What the name of a claim's node says."""

    claim: Claim
    owner_id: str
    # The session that it goes with; empty of a place in a queue.
    session: str
    # Its work is over, and only its minimum hold goes on.
    released: bool = False
    # Of a place in a queue: who has a lower one came first.
    number: int = 0

    @property
    def node(self) -> str:
        """The name. ZooKeeper itself appends the number of a place."""
        parts = [
            LETTER[self.claim.mode] + (str(self.claim.limit) if self.claim.limit else ""),
            node_of(self.owner_id).replace(_BETWEEN, "%2E"),
            self.session,
        ]
        if self.released:
            parts.append(_RELEASED)
        return _BETWEEN.join(parts)


def claim_in(key: str, node: str) -> Named:
    """What the name of a claim's node says; ValueError if it is none."""
    what, owner, session, *rest = node.split(_BETWEEN)
    return Named(_claim(key, what), name_of(owner), session, rest == [_RELEASED])


def place_in(key: str, node: str) -> Named:
    """What the name of a place in a queue says; ValueError if it is none."""
    what, owner, number = node.split(_BETWEEN)
    if len(number) != _DIGITS:
        raise ValueError(node)
    return Named(_claim(key, what), name_of(owner), "", number=int(number))


def _claim(key: str, what: str) -> Claim:
    if what[:1] not in MODE:
        raise ValueError(what)
    return Claim(key, MODE[what[0]], int(what[1:] or 0))
