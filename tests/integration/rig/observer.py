"""What really became of each row, in the order in which it happened: from PostgreSQL's own log.

The server writes every version of every row into its write-ahead log. Logical decoding reads it
back; nothing has to be installed, neither trigger nor extension, and nothing in the rig's way of
working changes.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import psycopg

from tests.integration.rig.checker import Hold, Report, Violation

SLOT = PUBLICATION = "distlocks_rig"
TABLE = "distlocks_lock"
# Commit times in the log count from here.
EPOCH_US = int(datetime(2000, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000


@dataclass(frozen=True)
class Version:
    """A row as one statement left it."""

    key: str
    # When its transaction was committed, by the server's clock.
    committed_us: int
    deleted: bool = False
    owner: str = ""
    token: int = 0
    acquired_us: int = 0
    expires_us: int = 0

    def __str__(self) -> str:
        what = f"{self.owner or 'free'}, token {self.token}, until {self.expires_us}"
        return "deleted" if self.deleted else what


class Observer:
    """Sees all versions of all lock rows from its creation on. Needs wal_level=logical."""

    def __init__(self, url: str, database: str) -> None:
        self._connection = psycopg.connect(url, dbname=database, autocommit=True)
        self._execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {TABLE}")
        self._execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", SLOT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._execute("SELECT pg_drop_replication_slot(%s)", SLOT)
        self._execute(f"DROP PUBLICATION {PUBLICATION}")
        self._connection.close()

    def versions(self) -> Iterator[Version]:
        """All that has happened since the last call."""
        messages = self._execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, "
            "'proto_version', '1', 'publication_names', %s)",
            *(SLOT, PUBLICATION),
        ).fetchall()
        yield from decode(message for (message,) in messages)

    def _execute(self, query: Any, *params: str) -> psycopg.Cursor:
        return self._connection.execute(query, params or None)


def decode(messages: Iterable[bytes]) -> Iterator[Version]:
    """The row versions in messages of the logical replication protocol, version 1."""
    columns: list[str] = []
    committed_us = 0
    for message in messages:
        reader = _Reader(message)
        kind = reader.byte()
        if kind == b"B":
            committed_us = reader.unpack(">qqi")[1] + EPOCH_US
        elif kind == b"R":
            reader.unpack(">i")
            reader.text(), reader.text()
            _, count = reader.unpack(">bh")
            columns = [reader.column() for _ in range(count)]
        elif kind in (b"I", b"U", b"D"):
            reader.unpack(">i")
            what = reader.byte()
            row = dict(zip(columns, reader.row(), strict=True))
            if kind == b"U" and what != b"N":
                reader.byte()
                row = dict(zip(columns, reader.row(), strict=True))
            if kind == b"D":
                yield Version(row["key"], committed_us, deleted=True)
            else:
                yield Version(
                    row["key"],
                    committed_us,
                    owner=row["owner_id"],
                    token=int(row["fencing_token"]),
                    acquired_us=int(row["acquired_at"]),
                    expires_us=int(row["expires_at"]),
                )


class _Reader:
    def __init__(self, message: bytes) -> None:
        self._message = message
        self._at = 0

    def unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._message, self._at)
        self._at += struct.calcsize(form)
        return values

    def byte(self) -> bytes:
        (value,) = self.unpack(">c")
        assert isinstance(value, bytes)
        return value

    def text(self) -> str:
        end = self._message.index(b"\0", self._at)
        value = self._message[self._at : end].decode()
        self._at = end + 1
        return value

    def column(self) -> str:
        self.unpack(">b")
        name = self.text()
        self.unpack(">ii")
        return name

    def row(self) -> list[str]:
        (count,) = self.unpack(">h")
        return [self._value() for _ in range(count)]

    def _value(self) -> str:
        if self.byte() != b"t":
            return ""
        (length,) = self.unpack(">i")
        self._at += length
        return self._message[self._at - length : self._at].decode()


def check_versions(versions: Iterable[Version], holds: Iterable[Hold]) -> Report:
    """Hold the server's log against the promises, and the journals against the log."""
    report = Report(counts=Counter())
    journaled = {(hold.key, hold.owner): hold for hold in holds}
    rows: dict[str, Version] = {}
    highest: dict[str, int] = {}
    # Until when the store kept each lease, at most.
    kept: dict[tuple[str, str], int] = {}
    for version in versions:
        before = rows.get(version.key)
        report.violations.extend(
            _transition(before, version, highest.get(version.key, 0), journaled, report.counts)
        )
        rows[version.key] = version
        highest[version.key] = max(highest.get(version.key, 0), version.token)
        if version.owner:
            lease = (version.key, version.owner)
            kept[lease] = max(kept.get(lease, 0), version.expires_us)
    for lease, hold in journaled.items():
        if lease not in kept:
            report.violations.append(Violation("unseen", hold.key, f"{hold} is not in the log"))
        elif hold.until_us > kept[lease]:
            report.violations.append(
                Violation("outlived", hold.key, f"{hold} was trusted past {kept[lease]}")
            )
    return report


def _transition(
    before: Version | None,
    after: Version,
    highest: int,
    journaled: dict[tuple[str, str], Hold],
    counts: Counter[str],
) -> Iterator[Violation]:
    """From one version of a row to the next."""
    key, story = after.key, f"{before} became {after}"
    if after.deleted:
        counts["deletions"] += 1
        if before is not None and before.expires_us > after.committed_us:
            yield Violation("exclusion", key, f"in the log, while it was live: {story}")
        return
    if after.token < highest:
        yield Violation("token", key, f"in the log, below {highest}: {story}")
    same = before is not None and (before.owner, before.token) == (after.owner, after.token)
    if not after.owner:
        counts["releases"] += 1
    elif not same:
        counts["grants"] += 1
        if after.token <= highest:
            yield Violation("token", key, f"in the log, not above {highest}: {story}")
        if before is not None and before.expires_us > after.acquired_us:
            yield Violation("exclusion", key, f"in the log, while it was live: {story}")
    elif before is not None and before.expires_us != after.expires_us:
        counts["extensions"] += 1
        hold = journaled.get((key, after.owner))
        if hold is not None and before.expires_us <= after.expires_us - hold.ttl * 1_000_000:
            yield Violation("exclusion", key, f"in the log, extended after its end: {story}")
