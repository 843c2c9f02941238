"""How claims are cleared that are over or must go, and keys that nobody uses any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...claims import Holder, Swept, to_us
from .listing import looks, names
from .records import Held, holder
from .requests import delete
from .session import Talk, Transaction
from .table import Look, look

if TYPE_CHECKING:
    from .backend import ZooKeeperBackend


def _clear(talk: Talk, there: Look, gone: Sequence[Held]) -> bool:
    """Take these claims off the key, as long as nothing has changed; whether that was so.

    The token is raised: who had one of them can tell that it was not its own release.
    """
    changes = Transaction(talk)
    changes.set(talk.session.paths.key(there.name), b"%d" % (there.token + 1), there.version)
    for one in gone:
        changes.delete(one.path, one.version)
    (answer,) = talk.ask(changes.send)
    return changes.outcome(answer).failure is None


def force_release(backend: ZooKeeperBackend, talk: Talk, name: str) -> list[Holder]:
    """Free the key from all who have it; who had it."""
    while True:
        _, (there,) = look(talk, [name], queues=False, catch_up=True)
        now_us = talk.session.now_us()
        had = backend.judge.live(there, now_us)
        if not had or _clear(talk, there, there.held):
            key = backend.public_key(name)
            return [holder(one, key, now_us) for one in had]


def sweep(
    backend: ZooKeeperBackend, older_than: float, batch_size: int, dry_run: bool
) -> Iterator[Swept]:
    """See BaseBackend.sweep()."""
    every = backend.talk(lambda talk: names(talk, ""))
    for at in range(0, len(every), batch_size):
        page = every[at : at + batch_size]
        yield backend.talk(partial(_sweep_page, backend, page, older_than, dry_run))


def _sweep_page(
    backend: ZooKeeperBackend, page: list[str], older_than: float, dry_run: bool, talk: Talk
) -> Swept:
    expired: list[Holder] = []
    deleted = 0
    for several in looks(talk, page, queues=True):
        now_us = talk.session.now_us()
        unused = []
        for there in several:
            gone = [one for one in there.held if backend.judge.is_over(one, now_us)]
            left_behind = [one for one in gone if not one.named.released]
            if gone and not dry_run and not _clear(talk, there, gone):
                # Somebody uses it.
                continue
            key = backend.public_key(there.name)
            expired += [holder(one, key, now_us) for one in left_behind]
            used_us = there.token or there.written_us
            if (
                there.version >= 0
                and not (there.held or there.queue)
                and used_us <= now_us - to_us(older_than)
            ):
                unused.append(there)
        deleted += len(unused) if dry_run else _delete(talk, unused)
    return Swept(examined=len(page), expired=tuple(expired), deleted=deleted)


def _delete(talk: Talk, unused: Sequence[Look]) -> int:
    """Delete keys that are still as they were seen; how many.

    Each changes the root: a grant that was decided on before it is decided anew. For a key that is
    made again counts its versions from 0 again.
    """
    paths = talk.session.paths
    if not unused:
        return 0
    talk.ask(*[delete(paths.queue(there.name)) for there in unused])
    together = Transaction(talk)
    together.set(paths.root, b"")
    for there in unused:
        together.delete(paths.key(there.name), there.version)
    (answer,) = talk.ask(together.send)
    if together.outcome(answer).failure is None:
        return len(unused)
    if len(unused) == 1:
        return 0
    # One of them is used again: the others do not have to wait for it.
    return sum(_delete(talk, [there]) for there in unused)
