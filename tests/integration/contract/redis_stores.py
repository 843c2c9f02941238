"""A store in Redis, and what tests do to its records behind the library's back."""

from types import SimpleNamespace
from typing import Any

from django.conf import settings

from distlocks import Lease
from distlocks.backends.redis import RedisBackend
from distlocks.backends.redis.wire import ReplyError, pack
from distlocks.claims import Denial, Request, Waiter, to_us
from distlocks.clock import lease_now
from distlocks.keys import check_key
from tests.integration.contract.stores import Store
from tests.servers import session
from tests.settings import redis_stores
from tests.waiting import eventually

# Move records in time: by how much, the key's name, and '1' if it is what names begin with and
# those who wait are moved too. For records see distlocks/backends/redis/scripts/common.lua.
MOVE = """
local H, us, root, all = KEYS[1], tonumber(ARGV[1]), ARGV[2], ARGV[3] == '1'
local sub, call = string.sub, redis.call

local function moved(text, at)
  return string.format('%016.0f', tonumber(sub(text, at, at + 15)) - us)
end

local function move(k, v)
  if sub(v, 49, 49) ~= 'S' then
    call('HSET', H, k, moved(v, 1) .. sub(v, 17, 32) .. moved(v, 33) .. sub(v, 49))
    return
  end
  call('HSET', H, k, moved(v, 1) .. sub(v, 17))
  local z, info = H .. ':s:' .. k, H .. ':i:' .. k
  for _, id in ipairs(call('ZRANGE', z, 0, -1)) do
    call('ZINCRBY', z, string.format('%.0f', -us), id)
    local was = call('HGET', info, id)
    call('HSET', info, id, sub(was, 1, 16) .. moved(was, 17) .. sub(was, 33))
  end
end

local function move_queue(k)
  local queue, waiters = H .. ':q:' .. k, H .. ':w:' .. k
  for _, id in ipairs(call('ZRANGE', queue, 0, -1)) do
    call('ZINCRBY', queue, string.format('%.0f', -us), id)
    local was = call('HGET', waiters, id)
    if was then call('HSET', waiters, id, moved(was, 1) .. sub(was, 17)) end
  end
end

if not all then
  local v = call('HGET', H, root)
  if v then move(root, v) end
  return
end
local fields = call('HGETALL', H)
for i = 1, #fields, 2 do
  local k = fields[i]
  if sub(k, 1, #root) == root then move(k, fields[i + 1]) end
  if sub(k, 1, 2 + #root) == '\1q' .. root then move_queue(sub(k, 3)) end
end
"""
# Forget all keys whose names begin so.
FORGET = """
local H, root = KEYS[1], ARGV[1]
for _, field in ipairs(redis.call('HKEYS', H)) do
  local k = field
  if string.sub(k, 1, 2) == '\1q' then k = string.sub(k, 3) end
  if string.sub(k, 1, #root) == root then
    redis.call('HDEL', H, field)
    for _, kind in ipairs({':s:', ':i:', ':q:', ':w:'}) do redis.call('DEL', H .. kind .. k) end
  end
end
"""


class RedisStore(Store):
    """See Store."""

    def __init__(self, alias: str) -> None:
        session.start_for(alias)
        settings.DISTLOCKS.update(redis_stores())
        super().__init__(alias)
        self._set_back: list[str] = []
        self.prepare()

    def prepare(self) -> None:
        """Have it grant locks: no lease of an earlier test goes on, and the server was started for
        this run."""
        self.redis.quarantine(end=True)

    @property
    def redis(self) -> RedisBackend:
        backend = self.backend
        assert isinstance(backend, RedisBackend)
        return backend

    def wait(self, *keys: str, **options: Any) -> Request:
        """A request for the keys, which are held, that has its place in the queue."""
        request = self.request(*keys, waits=True, asked_at=lease_now(), **options)
        denial = self.backend.try_acquire(request)
        assert isinstance(denial, Denial)
        assert denial.queued == request.owner_id
        return request

    def bucket(self, name: str) -> bytes:
        """The hash in which the key of this name is."""
        return self.redis.servers.hash_name(name)

    def command(self, key: str, *words: Any) -> Any:
        """A command to the server of the key's bucket, `{}` in which stands for its hash."""
        return self._command(self.redis.servers.hash_name(self.backend.prefix + key), *words)

    def _command(self, hash_name: bytes, *words: Any) -> Any:
        packed = pack(*[str(word).encode().replace(b"{}", hash_name) for word in words])
        reply = self.aside(lambda: self.redis.servers.ask(hash_name, packed))
        assert not isinstance(reply, ReplyError), reply
        return reply

    def row(self, key: str) -> Any:
        record = self.command(key, "HGET", "{}", self.backend.prefix + key)
        freed = record is None or record[48:49] == b"F"
        return SimpleNamespace(expires_at=0 if freed else int(record[:16]))

    def age(self, seconds: float, *keys: str) -> None:
        for key in keys:
            name = self.backend.prefix + check_key(key)
            self.command(name, "EVAL", MOVE, 1, "{}", to_us(seconds), name, 0)

    def shift_all(self, root: str, us: int) -> None:
        """Who waits under the root waits for so much longer, too."""
        self._everywhere("EVAL", MOVE, 1, "{}", us, self.backend.prefix + root, 1)

    def forget_all(self, root: str) -> None:
        self._everywhere("EVAL", FORGET, 1, "{}", self.backend.prefix + root)

    def _everywhere(self, *words: Any) -> None:
        for hash_name in self.redis.servers.hashes:
            self._command(hash_name, *words)

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

    def eventually_waiting(self, key: str, count: int) -> list[str]:
        """Who waits for the key of this name, in order, once there are so many."""
        found: list[Waiter] = []

        def there_are() -> bool:
            found[:] = self.aside(lambda: self.backend.waiters(key))
            return len(found) == count

        eventually(there_are)
        return [waiter.owner_id for waiter in found]

    def on_every_server(self, *words: Any) -> list[Any]:
        """What each server answers to a command."""
        servers = self.redis.servers
        one_hash_each = {servers.address(name): name for name in servers.hashes}
        return [self._command(name, *words) for name in one_hash_each.values()]

    def flush_scripts(self) -> None:
        self.on_every_server("SCRIPT", "FLUSH")

    def clean_up(self) -> None:
        for key in self._set_back:
            # Other tests' keys are in the same bucket.
            self.command(key, "HDEL", "{}", "\x01t")
        super().clean_up()
