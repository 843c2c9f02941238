"""Which statements the library sends, seen where Django sends them: nothing is copied from it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from distlocks import locks
from distlocks.backends.database.channels import Session
from distlocks.claims import Claim, Request, to_us
from distlocks.identity import host, new_owner_id, pid

Sent = tuple[str, Any]


@dataclass
class Recorder:
    """An execute wrapper that notes what passes."""

    sent: list[Sent] = field(default_factory=list)
    noted: Callable[[str, Any], None] | None = None

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.sent.append((sql, params))
        if self.noted is not None:
            self.noted(sql, params)
        return execute(sql, params, many, context)


@contextmanager
def recorded_everywhere(recorder: Recorder) -> Iterator[None]:
    """Record what is sent over connections that are opened from now on, also the library's own."""

    def attach(connection: BaseDatabaseWrapper, **kwargs: object) -> None:
        connection.execute_wrappers.append(recorder)

    connection_created.connect(attach, weak=False)
    try:
        yield
    finally:
        connection_created.disconnect(attach)


def request(key: str, ttl: float = 30.0) -> Request:
    return Request(
        claims=(Claim(key),),
        owner_id=new_owner_id(),
        ttl_us=to_us(ttl),
        host=host(),
        pid=pid(),
        thread="MainThread",
    )


def plain(alias: str, key: str) -> list[Sent]:
    """The acquire and the release as their full texts, with parameters that fit `key`."""
    backend: Any = locks[alias]
    connection = connections[backend.using]
    recorder = Recorder()
    session, asked = Session(connection), request(key)
    with connection.execute_wrapper(recorder):
        taken = backend.dialect.acquire(session, key, asked)
        backend.dialect.release(session, key, asked.owner_id, taken.fencing_token, 0)
    return recorder.sent


def as_sent(alias: str, key: str) -> tuple[list[Sent], list[Sent]]:
    """What the library sends before its first cycle, and in each: prepared, where it prepares."""
    backend = locks[alias]
    backend.close()
    recorder = Recorder()
    with recorded_everywhere(recorder):
        for _ in range(2):
            grant: Any = backend.try_acquire(request(key))
            backend.release(grant)
    backend.close()
    cycle = recorder.sent[-2:]
    return [sent for sent in recorder.sent if sent[0].startswith("PREPARE")], cycle
