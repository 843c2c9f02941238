"""A client whose way to the store can be cut and held up."""

from typing import Any

from kazoo.protocol.serialization import Create, Delete, SetData, Transaction

from tests.integration.contract.stores import POSTGRES_STORES, Store
from tests.servers.proxy import FaultProxy, Mode

# Those that the `proxied` fixture knows.
PROXIED_STORES = (*POSTGRES_STORES, "redis", "zookeeper")
WRITES = ("INSERT", "UPDATE", "EXECUTE", "WITH")
ZOOKEEPER_WRITES = (Create, Delete, SetData, Transaction)


class Proxied(Store):
    """A client of a store that reaches it through a proxy."""

    def __init__(self, alias: str, proxy: FaultProxy) -> None:
        super().__init__(alias)
        self.proxy = proxy
        self._at_next_write: dict[str, Mode] = {}
        # A store that is no database, where not everything that is said is a write.
        self.waits_for_write = False

    def lose_next_answer(self) -> None:
        """From the next statement that writes on, the server does what it is asked and the client
        never hears of it.
        """
        self._lose({"answers": "blackhole"})

    def lose_next_request(self) -> None:
        """From the next statement that writes on, neither hears of the other."""
        self._lose({"requests": "blackhole", "answers": "blackhole"})

    def _lose(self, modes: dict[str, Mode]) -> None:
        if self.using or self.waits_for_write:
            self._at_next_write = modes
            return
        # Whatever is said to Redis is a write.
        for direction, mode in modes.items():
            setattr(self.proxy, direction, mode)

    def watch_zookeeper(self, send: Any) -> Any:
        """What is to stand for `send`, with which kazoo's clients send a request."""
        self.waits_for_write = True

        def watched(client: Any, request: Any, pending: Any) -> Any:
            ours = (self.proxy.host, self.proxy.port) in client.hosts
            if ours and isinstance(request, ZOOKEEPER_WRITES):
                self._change_modes()
            return send(client, request, pending)

        return watched

    def before(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """Stands around each statement: see tests.statements.watched()."""
        if sql.lstrip().startswith(WRITES):
            self._change_modes()
        return execute(sql, params, many, context)

    def _change_modes(self) -> None:
        modes, self._at_next_write = self._at_next_write, {}
        for direction, mode in modes.items():
            setattr(self.proxy, direction, mode)

    def heal(self) -> None:
        """Break the connections that are held up, and let new ones through."""
        self.proxy.cut()
        self.proxy.mode = "pass"
