"""Who has keys, from what each server says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...claims import Holder
from .quorum import majority, most_common


def agreed(nodes: int, told: Iterable[Holder], silent: int = 0) -> Iterator[Holder]:
    """The holders of whom a majority of so many servers has told, or would have with those that
    are silent.

    What fewer know of was taken in vain, or is about to be given up.
    """
    wanted = max(majority(nodes) - silent, 1)
    alike: dict[tuple[object, str, str], list[Holder]] = {}
    for one in told:
        # Who only cools down has no owner id.
        alike.setdefault((one.key, one.owner_id, f"{one.host}:{one.pid}"), []).append(one)
    for versions in alike.values():
        if len(versions) >= wanted:
            token, _ = most_common(one.fencing_token for one in versions)
            yield replace(
                min(versions, key=lambda one: one.since),
                fencing_token=token,
                remaining=sorted((one.remaining for one in versions), reverse=True)[wanted - 1],
            )
