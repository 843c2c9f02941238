"""A client whose way to the store can be cut and held up."""

from typing import Any

from tests.integration.contract.stores import POSTGRES_STORES, Store
from tests.servers.proxy import FaultProxy, Mode

# Those that the `proxied` fixture knows.
PROXIED_STORES = (*POSTGRES_STORES, "redis")
WRITES = ("INSERT", "UPDATE", "EXECUTE", "WITH")


class Proxied(Store):
    """A client of a store that reaches it through a proxy."""

    def __init__(self, alias: str, proxy: FaultProxy) -> None:
        super().__init__(alias)
        self.proxy = proxy
        self._at_next_write: dict[str, Mode] = {}

    def lose_next_answer(self) -> None:
        """From the next statement that writes on, the server does what it is asked and the client
        never hears of it.
        """
        self._lose({"answers": "blackhole"})

    def lose_next_request(self) -> None:
        """From the next statement that writes on, neither hears of the other."""
        self._lose({"requests": "blackhole", "answers": "blackhole"})

    def _lose(self, modes: dict[str, Mode]) -> None:
        if self.using:
            self._at_next_write = modes
            return
        # Whatever is said to Redis is a write.
        for direction, mode in modes.items():
            setattr(self.proxy, direction, mode)

    def before(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """Stands around each statement: see tests.statements.watched()."""
        if self._at_next_write and sql.lstrip().startswith(WRITES):
            modes, self._at_next_write = self._at_next_write, {}
            for direction, mode in modes.items():
                setattr(self.proxy, direction, mode)
        return execute(sql, params, many, context)

    def heal(self) -> None:
        """Break the connections that are held up, and let new ones through."""
        self.proxy.cut()
        self.proxy.mode = "pass"
