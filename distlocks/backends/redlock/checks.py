"""What is wrong or unwise about a Redlock backend's settings and servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from django.core.checks import CheckMessage, Error, Warning

from ...claims import MICROSECOND
from ...exceptions import BackendUnavailable
from ..redis import checks as redis_checks
from ..redis.wire import pack
from .node import Node, of_each, real_now
from .quorum import majority

if TYPE_CHECKING:
    from .backend import RedlockBackend

# The message of a Redis server that does not answer.
SILENT = "distlocks.E019"


def check_settings(backend: RedlockBackend) -> list[CheckMessage]:
    """What can be told from the settings alone."""
    messages = [one for node in backend.nodes for one in redis_checks.check_settings(node.half)]
    # What is the same for all of them is said once.
    messages = list({(one.id, one.msg): one for one in messages}.values())
    count = len(backend.nodes)
    if count % 2 == 0:
        messages.append(
            Warning(
                f"The lock backend {backend.alias!r} has {count} servers: no more of them may be "
                f"down than of {count - 1}.",
                hint="Name an odd number of 'servers'.",
                id="distlocks.W050",
            )
        )
    return messages


def check_servers(backend: RedlockBackend) -> list[CheckMessage]:
    """What the servers say when asked."""
    found, _ = of_each(backend.nodes, lambda node: redis_checks.check_servers(node.half))
    messages = [one for told in found.values() for one in told]
    silent = [one for one in messages if one.id == SILENT]
    if len(silent) <= len(backend.nodes) - majority(len(backend.nodes)):
        # The others decide.
        messages = [as_warning(one) if one.id == SILENT else one for one in messages]
    return [*messages, *_same_server(backend), *_clocks(backend)]


def as_warning(error: CheckMessage) -> CheckMessage:
    return Warning(
        f"{error.msg} Locks are granted without it.",
        hint="Until it is back, one more may be down than you have planned for.",
        id="distlocks.W051",
    )


def _same_server(backend: RedlockBackend) -> Iterator[CheckMessage]:
    """Servers that are one, or that have their data from one."""
    ids, _ = of_each(backend.nodes, _replication_id)
    seen: dict[str, Node] = {}
    for node, vouching in ids.items():
        other = seen.setdefault(vouching, node)
        if vouching and other is not node:
            yield Error(
                f"{other} and {node} of the lock backend {backend.alias!r} are one server, or one "
                f"is a replica of the other: their votes are one.",
                hint="Name servers that have nothing in common.",
                id="distlocks.E051",
            )


def _replication_id(node: Node) -> str:
    reply = node.servers.ask(node.hash_name, pack(b"INFO", b"replication"), or_refusal=True)
    if not isinstance(reply, bytes):
        return ""
    lines = dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line)
    return lines.get("master_replid", "")


def _clocks(backend: RedlockBackend) -> Iterator[CheckMessage]:
    skew = backend.settings.clock_skew
    times, _ = of_each(backend.nodes, _ahead)
    if times and (apart := max(times.values()) - min(times.values())) > skew:
        first, last = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
        yield Warning(
            f"The clock of {last} is ahead of that of {first} by {apart:.1f} s, and 'clock_skew' "
            f"of the lock backend {backend.alias!r} is {skew:g} s: one of them may have no vote.",
            hint="Set the clocks (NTP), or raise 'clock_skew'.",
            id="distlocks.W052",
        )


def _ahead(node: Node) -> float:
    """Seconds by which its clock is ahead of the lease clock, to within half the time of asking."""
    before = real_now()
    reply = node.servers.ask(node.hash_name, pack(b"TIME"))
    if not isinstance(reply, list):
        raise BackendUnavailable(f"{node} does not tell the time.")
    seconds, us = map(int, reply)
    return seconds + us / MICROSECOND - (before + real_now()) / 2
