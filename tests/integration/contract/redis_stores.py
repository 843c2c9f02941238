"""A store in Redis, and what tests do to its records behind the library's back."""

from types import SimpleNamespace
from typing import Any

from django.conf import settings

from distlocks import Lease
from distlocks.backends.redis import RedisBackend
from distlocks.backends.redis.wire import ReplyError, pack
from distlocks.claims import to_us
from distlocks.keys import check_key
from tests.integration.contract.stores import Store
from tests.servers import session
from tests.settings import redis_stores


class RedisStore(Store):
    """See Store."""

    def __init__(self, alias: str) -> None:
        session.start_for(alias)
        settings.DISTLOCKS.update(redis_stores())
        super().__init__(alias)
        self._set_back: list[str] = []
        # No lease of an earlier test goes on, and the server was started for this run.
        self.redis.quarantine(end=True)

    @property
    def redis(self) -> RedisBackend:
        backend = self.backend
        assert isinstance(backend, RedisBackend)
        return backend

    def command(self, key: str, *words: Any) -> Any:
        """A command to the server of the key's bucket, `{}` in which stands for its hash."""
        hash_name = self.redis.servers.hash_name(self.backend.prefix + key)
        packed = pack(*[str(word).encode().replace(b"{}", hash_name) for word in words])
        reply = self.aside(lambda: self.redis.servers.ask(hash_name, packed))
        assert not isinstance(reply, ReplyError)
        return reply

    def row(self, key: str) -> Any:
        record = self.command(key, "HGET", "{}", self.backend.prefix + key)
        freed = record is None or record[48:49] == b"F"
        return SimpleNamespace(expires_at=0 if freed else int(record[:16]))

    def age(self, seconds: float, *keys: str) -> None:
        for key in keys:
            self._shift(self.backend.prefix + check_key(key), to_us(seconds))

    def _shift(self, name: str, us: int) -> None:
        record = self.command(name, "HGET", "{}", name)
        if record is None:
            return
        moved = b"%016d" % (int(record[:16]) - us) + record[16:32]
        if record[48:49] != b"S":
            moved += b"%016d" % (int(record[32:48]) - us) + record[48:]
        else:
            moved += record[32:]
            for member in self.command(name, "ZRANGE", "{}:s:" + name, 0, -1):
                owner = member.decode()
                self.command(name, "ZINCRBY", "{}:s:" + name, -us, owner)
                was = self.command(name, "HGET", "{}:i:" + name, owner).decode()
                acquired = f"{int(was[16:32]) - us:016d}"
                self.command(name, "HSET", "{}:i:" + name, owner, was[:16] + acquired + was[32:])
        self.command(name, "HSET", "{}", name, moved.decode())

    def expire_claims(self, key: str, *leases: Lease) -> None:
        name = self.backend.prefix + check_key(key)
        for lease in leases:
            self.command(name, "ZADD", "{}:s:" + name, 1, lease.owner_id)
        # As the record is when time has passed: until the last live claim on it ends.
        latest = self.command(name, "ZRANGE", "{}:s:" + name, -1, -1, "WITHSCORES")
        record = self.command(name, "HGET", "{}", name).decode()
        self.command(name, "HSET", "{}", name, f"{int(latest[1]):016d}" + record[16:])

    def set_clock_back(self, seconds: float, *keys: str) -> None:
        for key in keys:
            last = int(self.command(key, "HGET", "{}", "\x01t"))
            self.command(key, "HSET", "{}", "\x01t", last + to_us(seconds))
            self._set_back.append(key)

    def clean_up(self) -> None:
        for key in self._set_back:
            # Other tests' keys are in the same bucket.
            self.command(key, "HDEL", "{}", "\x01t")
        super().clean_up()
