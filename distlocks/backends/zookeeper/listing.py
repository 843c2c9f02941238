"""Who has keys, and who waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kazoo.exceptions import NoNodeError

from ...claims import Holder, Waiter
from .nodes import name_of
from .records import holder, waiter
from .requests import catch_up, children, get
from .session import Talk
from .table import Look, look

if TYPE_CHECKING:
    from .backend import ZooKeeperBackend

# So many keys are looked at by one request.
PAGE = 100


def names(talk: Talk, prefix: str = "") -> list[str]:
    """Of all keys that there are, in order. The server has caught up with the others then."""
    paths = talk.session.paths
    _, nodes = talk.ask(catch_up(paths.root), children(paths.locks))
    if isinstance(nodes, NoNodeError):
        return []
    return sorted(name for name in map(name_of, nodes) if name.startswith(prefix))


def looks(talk: Talk, found: list[str], *, queues: bool = False) -> Iterator[list[Look]]:
    """What is on these keys, so many at a time."""
    for at in range(0, len(found), PAGE):
        yield look(talk, found[at : at + PAGE], queues=queues)[1]


def holders(backend: ZooKeeperBackend, talk: Talk, prefix: str, limit: int | None) -> list[Holder]:
    """Who has the keys whose names begin so, in their order."""
    found: list[Holder] = []
    for page in looks(talk, names(talk, prefix)):
        now_us = talk.session.now_us()
        for there in page:
            key = backend.public_key(there.name)
            found += [holder(one, key, now_us) for one in backend.judge.live(there, now_us)]
        if limit is not None and len(found) >= limit:
            break
    return found[:limit]


def holders_of(backend: ZooKeeperBackend, talk: Talk, name: str) -> list[Holder]:
    """Who has the key of this name."""
    _, (there,) = look(talk, [name], catch_up=True)
    key, now_us = backend.public_key(name), talk.session.now_us()
    return [holder(one, key, now_us) for one in backend.judge.live(there, now_us)]


def waiters(backend: ZooKeeperBackend, talk: Talk, name: str) -> list[Waiter]:
    """Who waits for the key, first come first."""
    _, (there,) = look(talk, [name], catch_up=True)
    if not there.queue:
        return []
    answers = talk.ask(*[get(place.path) for place in there.queue])
    key = backend.public_key(name)
    return [
        waiter(place.named, key, *answer)
        for place, answer in zip(there.queue, answers, strict=True)
        if not isinstance(answer, NoNodeError)
    ]
