"""A fast path over SQLite, which has one writer: who waits for a lock waits for that one too."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction

from distlocks import clock
from distlocks.backends.database.channels import Session
from tests.integration.authority.scene import MODE_LEASE, Scene, until
from tests.waiting import eventually

Start = Callable[..., Future[Any]]


class Writer:
    """Writes to the database, in a transaction of its own, until somebody has been refused."""

    def __init__(self, using: str, start: Start) -> None:
        self.refused, self._began, self._end = Event(), Event(), Event()
        self._using = using
        self._writing = start(self._write)
        assert self._began.wait(10)

    def _write(self) -> None:
        with transaction.atomic(using=self._using):
            self._began.set()
            assert self._end.wait(20)
        connections.close_all()

    def end(self) -> None:
        self._end.set()
        self._writing.result(10)


@pytest.fixture
def write(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Writer]]:
    writers: list[Writer] = []
    execute = Session.execute

    def note_refusal(session: Session, sql: str, params: Any = None) -> Any:
        try:
            return execute(session, sql, params)
        except OperationalError:
            for writer in writers:
                writer.refused.set()
            raise

    def begin(using: str) -> Writer:
        writers.append(Writer(using, start))
        return writers[-1]

    monkeypatch.setattr(Session, "execute", note_refusal)
    yield begin
    for writer in writers:
        writer.end()


def test_a_busy_writer_keeps_nobody_from_beginning(
    make_scene: Callable[..., Scene], write: Callable[[str], Writer], start: Start, key: str
) -> None:
    scene = make_scene("sqlite")
    scene.add()
    writer = write(scene.using)
    acquiring = start(lambda: scene.lock(key, timeout=10, renew=False).acquire())
    eventually(lambda: writer.refused.is_set() or acquiring.done())
    writer.end()
    assert scene.store_of(acquiring.result(20)) == "redis"


def test_nor_from_a_lock_of_the_database_while_redis_is_down(
    make_scene: Callable[..., Scene], write: Callable[[str], Writer], start: Start, key: str
) -> None:
    """Who looks whether Redis is well writes down that it is not."""
    scene = make_scene("sqlite")
    scene.begin()
    scene.server.kill()
    scene.add().authority.look()
    # It has done nothing for a while, and has to look first.
    until(clock.lease_now() + MODE_LEASE)
    writer = write(scene.using)
    acquiring = start(lambda: scene.lock(key, timeout=10, renew=False).acquire())
    eventually(lambda: writer.refused.is_set() or acquiring.done())
    writer.end()
    assert scene.store_of(acquiring.result(20)) == "database"
