"""What the OPTIONS of a Redlock backend say: its servers, and how far their clocks may differ."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...conf import InvalidSetting
from ..given import GivenOptions
from ..redis import RedisBackend
from ..redis.settings import is_namespace

if TYPE_CHECKING:
    from .backend import RedlockBackend

NAMES = (
    "servers",
    "connection",
    "db",
    "namespace",
    "max_connections",
    "node_timeout",
    "clock_skew",
    "incarnation_guard",
)
# Of fewer, no majority is left when one is down.
FEWEST = 3
# Seconds within which a server must answer.
NODE_TIMEOUT = 1.0
# Seconds by which the clocks of the servers may differ.
CLOCK_SKEW = 1.0


class Settings(GivenOptions):
    """The OPTIONS of one alias, checked."""

    check = 50

    def __init__(self, backend: RedlockBackend) -> None:
        super().__init__(backend)
        self._alias = backend.alias
        self._params = backend.params
        self.clock_skew = self.seconds("clock_skew", CLOCK_SKEW, 0.0)
        self.node_timeout = self.seconds("node_timeout", NODE_TIMEOUT, 0.01)
        # Twice: a token that was agreed upon may be ahead of this server by the difference of the
        # clocks, and what was proposed for it ahead of the other by as much.
        self.tokens_ahead = 2 * self.clock_skew
        # Seconds for which a server does not vote that has lost its memory.
        self.quarantine = self._params.max_ttl + self.tokens_ahead

    def halves(self) -> list[RedisBackend]:
        """A Redis backend for each server, which knows how to speak with it."""
        servers = self.options.get("servers")
        if not isinstance(servers, list | tuple) or len(servers) < FEWEST:
            self.refuse(
                f"['servers'] must be a list of the URLs of at least {FEWEST} servers, not "
                f"{servers!r}.",
                "For instance ['redis://10.0.0.1:6379/1', 'redis://10.0.0.2:6379/1', …]: five "
                "that have nothing in common, no replicas of one another.",
            )
        halves = [self._half(number, url) for number, url in enumerate(servers)]
        addresses = [str(half.place) for half in halves]
        for address in addresses:
            if addresses.count(address) > 1:
                self.refuse(
                    f"['servers'] names {address} more than once.",
                    "One server is one vote: name others, or fewer.",
                )
        return halves

    def _half(self, number: int, url: Any) -> RedisBackend:
        timeouts = {
            "socket_timeout": self.node_timeout,
            "socket_connect_timeout": self.node_timeout,
        }
        options = {
            "url": url,
            "namespace": self._namespace(),
            "quarantine": self.quarantine,
            "connection": {**timeouts, **self.arguments("redis-py")},
        }
        for name in ("db", "max_connections", "incarnation_guard"):
            if name in self.options:
                options[name] = self.options[name]
        try:
            return RedisBackend(self._alias, replace(self._params, options=options))
        except InvalidSetting as fault:
            message = fault.message.removeprefix(self.where).removeprefix("['url'] ")
            self.refuse(f"['servers'][{number}] = {url!r}: {message}", fault.hint)

    def _namespace(self) -> str:
        namespace = self.options.get("namespace", "distlocks")
        if not is_namespace(namespace):
            self.refuse(
                f"['namespace'] = {namespace!r} must be printable text without braces.",
                "All names in Redis begin with it; the default is 'distlocks'.",
            )
        # A Redis backend may use one of the servers too.
        return f"{namespace}.redlock"
