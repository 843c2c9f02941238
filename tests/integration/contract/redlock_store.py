"""A store of five Redis servers, and what tests do to their records behind the library's back."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from django.conf import settings

from distlocks import Lease
from distlocks.backends.redis.links import Link
from distlocks.backends.redis.wire import ReplyError, pack
from distlocks.backends.redlock import RedlockBackend
from distlocks.backends.redlock.node import Node
from distlocks.claims import to_us
from distlocks.keys import check_key
from tests.integration.contract.redis_stores import FORGET, MOVE
from tests.integration.contract.stores import Store
from tests.servers import session
from tests.settings import redis_stores
from tests.waiting import eventually


class RedlockStore(Store):
    """See Store."""

    def __init__(self, alias: str) -> None:
        session.start_for(alias)
        settings.DISTLOCKS.update(redis_stores())
        super().__init__(alias)
        # No lease of an earlier test goes on, and the servers were started for this run.
        self.redlock.quarantine(end=True)

    @property
    def redlock(self) -> RedlockBackend:
        backend = self.backend
        assert isinstance(backend, RedlockBackend)
        return backend

    def command(self, *words: Any) -> list[Any]:
        """What each server answers to a command, `{}` in which stands for its hash."""

        def ask() -> list[Any]:
            self.settle()
            replies = []
            for node in self.redlock.nodes:
                whole = [str(word).encode().replace(b"{}", node.hash_name) for word in words]
                reply = node.servers.ask(node.hash_name, pack(*whole))
                assert not isinstance(reply, ReplyError), reply
                replies.append(reply)
            return replies

        found: list[Any] = self.aside(ask)
        return found

    def settle(self) -> None:
        """Wait for the answers of those servers that the others did not wait for."""
        for node in self.redlock.nodes:
            links = node.servers.links.idle(node.address, blocking=False)
            for link in list(links):
                eventually(lambda link=link, node=node: self._has_all(node, link))  # type: ignore[misc]

    @staticmethod
    def _has_all(node: Node, link: Link) -> bool:
        if link.owed:
            node.passed_over(link, link.collect())
        return not link.owed

    def row(self, key: str) -> Any:
        record = self.command("HGET", "{}", self.backend.prefix + key)[0]
        freed = record is None or record[48:49] == b"F"
        return SimpleNamespace(expires_at=0 if freed else int(record[:16]))

    def age(self, seconds: float, *keys: str) -> None:
        for key in keys:
            name = self.backend.prefix + check_key(key)
            self.command("EVAL", MOVE, 1, "{}", to_us(seconds), name, 0)

    def shift_all(self, root: str, us: int) -> None:
        self.command("EVAL", MOVE, 1, "{}", us, self.backend.prefix + root, 1)

    def forget_all(self, root: str) -> None:
        self.command("EVAL", FORGET, 1, "{}", self.backend.prefix + root)

    def expire_claims(self, key: str, *leases: Lease) -> None:
        raise NotImplementedError("There is never more than one claim on a key.")

    def set_clock_back(self, seconds: float, *keys: str) -> None:
        for key in keys:
            name = self.backend.prefix + check_key(key)
            records = self.command("HGET", "{}", name)
            for node, was in zip(self.redlock.nodes, records, strict=True):
                token = b"%016d" % (int(was[16:32]) + to_us(seconds))
                changed = pack(b"HSET", node.hash_name, name.encode(), was[:16] + token + was[32:])
                self.aside(partial(node.servers.ask, node.hash_name, changed))
