"""A store in ZooKeeper, and what tests do to its nodes behind the library's back."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from socket import SHUT_RDWR
from types import SimpleNamespace
from typing import Any, TypeVar

from django.conf import settings
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from distlocks import Lease
from distlocks.backends.zookeeper import ZooKeeperBackend
from distlocks.backends.zookeeper.nodes import claim_in, name_of
from distlocks.backends.zookeeper.records import Held, held
from distlocks.backends.zookeeper.table import look
from distlocks.claims import Denial, Request, Waiter, to_us
from distlocks.clock import lease_now
from distlocks.keys import check_key
from tests.integration.contract.stores import Store
from tests.servers import session
from tests.settings import zookeeper_stores
from tests.waiting import eventually

T = TypeVar("T")
# A session that there has never been.
DEAD = "0" * 32


class ZooKeeperStore(Store):
    """See Store."""

    def __init__(self, alias: str) -> None:
        session.start_for(alias)
        settings.DISTLOCKS.update(zookeeper_stores())
        super().__init__(alias)

    @property
    def zookeeper(self) -> ZooKeeperBackend:
        backend = self.backend
        assert isinstance(backend, ZooKeeperBackend)
        return backend

    def wait(self, *keys: str, **options: Any) -> Request:
        """A request for the keys, which are held, that has its place in the queue."""
        request = self.request(*keys, waits=True, asked_at=lease_now(), **options)
        denial = self.backend.try_acquire(request)
        assert isinstance(denial, Denial)
        assert denial.queued == request.owner_id
        return request

    def eventually_waiting(self, key: str, count: int) -> list[str]:
        """Who waits for the key of this name, in order, once there are so many."""
        found: list[Waiter] = []

        def there_are() -> bool:
            found[:] = self.aside(lambda: self.backend.waiters(key))
            return len(found) == count

        eventually(there_are)
        return [waiter.owner_id for waiter in found]

    def clean_up(self) -> None:
        super().clean_up()
        session = self.zookeeper._session
        if session is not None:
            # What a test has left held is not to keep it open.
            session.leases.clear()

    # Behind the library's back

    def row(self, key: str) -> Any:
        def expires_at() -> int:
            name = self.backend.prefix + check_key(key)
            _, (there,) = self.zookeeper.talk(lambda talk: look(talk, [name]))
            return max((one.expires_us for one in there.held), default=0)

        return SimpleNamespace(expires_at=self.aside(expires_at))

    def break_connection(self) -> None:
        """As a firewall does that forgets, or a server that ends."""
        session = self.zookeeper._session
        connection = session._client._connection._socket if session is not None else None
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(SHUT_RDWR)

    def with_client(self, act: Callable[[Any], T]) -> T:
        """`act(client)` with a client that the library knows nothing of."""

        def run() -> T:
            options = self.zookeeper.settings
            client = KazooClient(hosts=options.hosts, timeout=10, auth_data=options.auth)
            client.start()
            try:
                return act(client)
            finally:
                client.stop()
                client.close()

        return self.aside(run)

    def age(self, seconds: float, *keys: str) -> None:
        self._age([self.backend.prefix + check_key(key) for key in keys], to_us(seconds))

    def expire(self, *keys: str) -> None:
        """As if their sessions had died, too."""
        self.age(3600, *keys)

    def expire_claims(self, key: str, *leases: Lease) -> None:
        owners = {lease.owner_id for lease in leases}
        self._age([self.backend.prefix + check_key(key)], to_us(3600), owners)

    def shift_all(self, root: str, us: int) -> None:
        self._age(self._names(root), us)

    def forget_all(self, root: str) -> None:
        paths = self.zookeeper.paths
        names = self._names(root)

        def forget(client: Any) -> None:
            for name in names:
                for path in (paths.key(name), paths.queue(name)):
                    with suppress(NoNodeError):
                        client.delete(path, recursive=True)

        self.with_client(forget)

    def _names(self, root: str) -> list[str]:
        start = self.backend.prefix + root
        found = self.with_client(lambda client: client.get_children(self.zookeeper.paths.locks))
        return [name for name in map(name_of, found) if name.startswith(start)]

    def _age(self, names: Iterable[str], us: int, owners: set[str] | None = None) -> None:
        def age(client: Any) -> None:
            # What time it is by the servers' clock.
            now_us = client.create(f"{self.zookeeper.paths.root}/now", b"", include_data=True)
            client.delete(f"{self.zookeeper.paths.root}/now")
            for name in names:
                path = self.zookeeper.paths.key(name)
                with suppress(NoNodeError):
                    for node in client.get_children(path):
                        claim = claim_in(name, node)
                        one = held(
                            claim, f"{path}/{node}", *client.get(f"{path}/{node}"), trusted=False
                        )
                        if owners is None or claim.owner_id in owners:
                            self._age_one(client, one, us, now_us[1].mtime * 1000)

        self.with_client(age)

    @staticmethod
    def _age_one(client: Any, one: Held, us: int, now_us: int) -> None:
        # It is written now: so much is left of the lease.
        left_us = one.written_us + one.ttl_us - now_us - us
        hold_us = max(one.min_hold_us - us, 0) if one.min_hold_us else 0
        aged = replace(one, acquired_us=one.acquired_us - us, min_hold_us=hold_us)
        if left_us > 0 or one.named.released:
            client.set(one.path, aged.data(ttl_us=left_us))
            return
        # Nobody trusts it any more; its minimum hold counts from when its node is made.
        if hold_us:
            aged = replace(aged, min_hold_us=max(aged.cooled_us - now_us, 0))
        dead = one.named._replace(session=DEAD)
        client.delete(one.path)
        client.create(f"{one.path.rpartition('/')[0]}/{dead.node}", aged.data(ttl_us=left_us))

    def set_clock_back(self, seconds: float, *keys: str) -> None:
        def move(client: Any) -> None:
            for key in keys:
                path = self.zookeeper.paths.key(self.backend.prefix + key)
                token = int(client.get(path)[0])
                client.set(path, b"%d" % (token + to_us(seconds)))

        self.with_client(move)
