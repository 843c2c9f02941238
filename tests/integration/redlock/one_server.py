"""One server of a Redlock, spoken to without the others, as the backend speaks to it."""

from typing import Any

from distlocks.backends.redis.scripts import script
from distlocks.backends.redis.wire import pack, packed
from distlocks.backends.redlock import RedlockBackend
from distlocks.claims import to_us

# A proposal for a token so low that what the server remembers decides.
LOW = 1
# µs.
SECOND = to_us(1)
# Who asks, as the scripts are told of it: host, pid, thread, label.
WHO = b"\t0\t\t\t"


class OneServer:
    """Calls the scripts on one of a backend's servers, and changes behind their back what it
    remembers. Durations and moments are in µs, moments on the server's clock."""

    def __init__(self, backend: RedlockBackend, number: int = 0) -> None:
        self.node = backend.nodes[number]

    def ask(self, command: str, *words: str) -> Any:
        """The reply to a command on the hash in which everything is."""
        encoded = (word.encode() for word in words)
        return self.node.servers.ask(
            self.node.hash_name, pack(command.encode(), self.node.hash_name, *encoded)
        )

    def run(self, name: str, *words: bytes | str | int) -> Any:
        """The reply of the script redlock_`name`."""
        encoded = [one if isinstance(one, bytes) else str(one).encode() for one in words]
        return self.node.servers.run(
            self.node.hash_name, script(f"redlock_{name}"), len(encoded), packed(encoded)
        )

    @property
    def now(self) -> int:
        """What time it is on the server."""
        seconds, us = self.node.servers.ask(self.node.hash_name, pack(b"TIME"))
        return int(seconds) * SECOND + int(us)

    # The scripts

    def take(
        self,
        owner: str,
        number: int,
        *keys: str,
        proposal: int = LOW,
        hold: int = 60 * SECOND,
        ahead: int = 0,
    ) -> Any:
        """The answer to an owner's try of this number: a letter, the time, and what belongs to the
        letter. The proposal may be ahead of the server's clock by `ahead`."""
        return self.run("take", owner, number, hold, proposal, ahead, WHO, *keys)

    def value(self, owner: str, number: int, *keys: str, **options: int) -> int:
        """The value that the server puts on the keys for this try, which it grants."""
        reply = self.take(owner, number, *keys, **options)
        assert reply[0] == b"G", reply
        return int(reply[2])

    def release(
        self, owner: str, *keys: str, number: int | str = "", token: int | str = "", hold: int = 0
    ) -> str:
        """A letter for each key; `hold` is the minimum hold."""
        return str(self.run("release", owner, number, token, hold, *keys).decode())

    def raise_to(self, token: int, owner: str, number: int, *keys: str) -> bool:
        """Whether the server has put the agreed token on this try's keys."""
        return bool(self.run("raise", owner, number, token, *keys) == b"1")

    def extend(self, owner: str, token: int, *keys: str, ttl: int) -> str:
        """A letter for each key."""
        words = [word for key in keys for word in (key, owner, token, ttl, 0)]
        return str(self.run("extend", *words).decode())

    def sweep(self, *, dry_run: bool = False) -> tuple[int, list[str]]:
        """How many records of ended claims went, and the keys of those that had expired."""
        cursor, _, deleted, _, expired = self.run("sweep", 0, 1000, int(dry_run))
        assert cursor == b"0"
        return deleted, [fields[0].decode() for fields in expired]

    # What it remembers

    def field(self, name: str) -> str | None:
        """A field of the hash, for instance a key's record."""
        found = self.ask("HGET", name)
        return None if found is None else found.decode()

    def age(self, key: str, us: int) -> None:
        """Have the key's lease end so long ago."""
        record = self.field(key)
        assert record is not None
        self.ask("HSET", key, f"{self.now - us:016d}{record[16:]}")

    def disown(self) -> None:
        """Have another server have written all this: whether it is all there, nobody knows."""
        self.ask("HSET", "\1r", "another")
