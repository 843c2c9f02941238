"""A database grants only while the row says that it may, and in the epoch that it says."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from django.core import mail
from django.db import connections, transaction
from django.db.models import F

from distlocks import BackendUnavailable, locks
from distlocks.backends.database import DatabaseBackend, postgresql
from distlocks.backends.fastpath.row import AuthorityRow
from distlocks.claims import EXCLUSIVE, Denial, Extension, Grant, Request, claims_on, to_us
from distlocks.handler import build
from distlocks.identity import new_owner_id
from distlocks.keys import check_key
from distlocks.models import Lock, LockAuthority, StoreClock
from tests.integration.contract.stores import Gate
from tests.waiting import eventually

DATABASES = ("sqlite", "portable_sqlite", "postgres", "portable_postgres", "mariadb")
# Those in which several write at a time.
SEVERAL_WRITERS = ("postgres", "portable_postgres", "mariadb")
EPOCH = 7
Start = Callable[..., Future[Any]]


class Table:
    """The tables of one database alias, and a row of the test's own."""

    def __init__(self, alias: str, name: str) -> None:
        backend = locks[alias]
        assert isinstance(backend, DatabaseBackend)
        self.backend = backend
        self.using = str(backend.using)
        self.name = name

    @property
    def rows(self) -> Any:
        return LockAuthority.objects.using(self.using).filter(name=self.name)

    def create(self) -> None:
        LockAuthority.objects.using(self.using).create(
            name=self.name,
            epoch=EPOCH,
            phase="db",
            since=1,
            mode_lease=1,
            max_ttl=to_us(30),
            patience=0,
        )

    def as_row(self, backend: DatabaseBackend | None = None) -> AuthorityRow:
        """The row as processes change it, over a connection of its own."""
        return AuthorityRow(self.name, self.name, backend or self.backend)

    def request(
        self, *keys: Any, epoch: int = EPOCH, mode: str = EXCLUSIVE, limit: int = 0, **more: Any
    ) -> Request:
        names = [self.name + check_key(key) for key in keys]
        return Request(
            claims=claims_on(names, mode, limit),
            owner_id=new_owner_id(),
            ttl_us=to_us(20),
            authority=(self.name, epoch),
            **more,
        )

    def count_taken(self) -> int:
        """How many keys are taken, as anybody sees it."""
        mine = Lock.objects.using(self.using).filter(key__startswith=self.name)
        return mine.filter(expires_at__gt=StoreClock()).count()

    def ask(self, request: Request) -> Grant | Denial:
        return self.backend.try_acquire(request)

    def waiting(self) -> int:
        """How many statements wait for a row in others' hands."""
        query = {
            "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND datname = current_database()",
            "mysql": "SELECT variable_value FROM information_schema.global_status"
            " WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'",
        }
        with connections[self.using].cursor() as cursor:
            cursor.execute(query[connections[self.using].vendor])
            return int(cursor.fetchone()[0])


@pytest.fixture
def table(
    request: pytest.FixtureRequest, databases: None, monkeypatch: pytest.MonkeyPatch, key: str
) -> Iterator[Table]:
    """What a DatabaseBackend asks, and the test changes."""
    monkeypatch.delattr(mail, "outbox", raising=False)
    # Long names are for other tests.
    yield Table(request.param, f"{key[-32:]}/")
    locks.close_all()


def on(databases: tuple[str, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("table", databases, indirect=True)


# What is asked for, as (keys, options).
ASKED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "exclusive": (("a",), {}),
    "shared": (("a",), {"mode": "shared"}),
    "permit": (("a",), {"mode": "permit", "limit": 2}),
    "several": (("a", "b", "c"), {}),
    "tree": ((("a", "b"),), {}),
}
asked_in_every_way = pytest.mark.parametrize("asked", ASKED)


def ask_for(table: Table, asked: str, **more: Any) -> Request:
    keys, options = ASKED[asked]
    return table.request(*keys, **{**options, **more})


@on(DATABASES)
@asked_in_every_way
def test_a_grant_needs_the_row_its_phase_and_its_epoch(table: Table, asked: str) -> None:
    def is_refused(epoch: int = EPOCH) -> bool:
        answer = table.ask(ask_for(table, asked, epoch=epoch))
        assert isinstance(answer, Denial)
        # Nobody has the key: there is nobody to name, and nothing is left of the try.
        assert answer.holders == ()
        assert not Lock.objects.using(table.using).filter(
            key__startswith=table.name, expires_at__gt=0
        )
        return True

    assert is_refused()
    table.create()
    for epoch in (EPOCH - 1, EPOCH + 1, 0):
        assert is_refused(epoch)
    for phase in ("redis", "drain", "closing"):
        table.rows.update(phase=phase)
        assert is_refused()
    table.rows.update(phase="db", epoch=EPOCH + 1)
    assert is_refused()
    table.rows.update(epoch=EPOCH)
    answer = table.ask(ask_for(table, asked))
    assert isinstance(answer, Grant)
    assert table.backend.release(answer) is True


@on(DATABASES)
@asked_in_every_way
def test_the_row_of_another_name_is_none(table: Table, asked: str) -> None:
    table.create()
    request = ask_for(table, asked)
    for name in (table.name.upper(), table.name + " ", table.name[:-1], ""):
        other = replace(request, authority=(name, EPOCH), owner_id=new_owner_id())
        assert isinstance(table.ask(other), Denial)
    assert isinstance(table.ask(request), Grant)


@on(DATABASES)
@asked_in_every_way
def test_a_request_sent_again_gets_the_same_grant(table: Table, asked: str) -> None:
    table.create()
    request = ask_for(table, asked)
    first, second = table.ask(request), table.ask(request)
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    assert second.fencing_tokens == first.fencing_tokens
    assert second.acquired_us == first.acquired_us
    # Not in an epoch that is over.
    table.rows.update(epoch=EPOCH + 1)
    assert isinstance(table.ask(request), Denial)
    assert table.backend.release(first) is True


@on(DATABASES)
@asked_in_every_way
def test_who_has_the_key_is_named_as_ever(table: Table, asked: str) -> None:
    table.create()
    held = table.ask(table.request("a"))
    assert isinstance(held, Grant)
    denial = table.ask(ask_for(table, asked))
    assert isinstance(denial, Denial)
    assert held.owner_id in {holder.owner_id for holder in denial.holders}
    assert table.backend.release(held) is True
    granted = table.ask(ask_for(table, asked))
    assert isinstance(granted, Grant)
    assert max(granted.fencing_tokens) > held.fencing_tokens[0]


@on(DATABASES)
def test_without_an_authority_no_row_is_asked(table: Table) -> None:
    request = replace(table.request("a"), authority=None)
    assert isinstance(table.ask(request), Grant)


@on(DATABASES)
def test_extensions_and_releases_ask_no_row(table: Table) -> None:
    """Leases are extended while the authority leaves, and given back at any time."""
    table.create()
    held = table.ask(table.request("a"))
    assert isinstance(held, Grant)
    table.rows.update(phase="closing", epoch=EPOCH + 1)
    extended = table.backend.extend([Extension(grant=held, ttl_us=to_us(10))])
    assert extended.extended == {held.owner_id}
    assert table.backend.release(held) is True


@on(DATABASES)
def test_what_is_taken_is_told_by_the_database_clock_and_its_error(table: Table) -> None:
    table.create()
    row = table.as_row()
    assert not row.is_taken(to_us(1))
    assert row.highest_token() == 0
    grants = [table.ask(table.request(key)) for key in ("b", "a", "c")]
    tokens = [grant.fencing_tokens[0] for grant in grants if isinstance(grant, Grant)]
    assert len(tokens) == 3
    assert row.highest_token() == max(tokens)
    mine = Lock.objects.using(table.using).filter(key__startswith=table.name)
    mine.filter(key__endswith="b").update(acquired_at=F("acquired_at") - to_us(5))
    assert row.is_taken(0)
    # The one that has been held for longest.
    oldest = row.oldest(_read(table), to_us(3))
    assert oldest is not None
    assert oldest.key == f"{table.name}b"
    assert oldest.age_us >= to_us(5)
    assert row.oldest(_read(table), to_us(60)) is None
    # It ended half a second ago, by a clock that may be a second ahead.
    mine.update(expires_at=_read(table).now_us - to_us(0.5))
    assert row.is_taken(to_us(1))
    assert not row.is_taken(0)
    # What was given back is free at once; and others' keys are no concern.
    mine.update(expires_at=0)
    stranger = AuthorityRow(table.name, f"{table.name}b", table.backend)
    assert not row.is_taken(to_us(1))
    assert stranger.highest_token() == tokens[0]


# The change and the grant at one time


@on(SEVERAL_WRITERS)
@asked_in_every_way
def test_a_grant_waits_for_a_change_under_way_or_is_refused(
    table: Table, start: Start, asked: str
) -> None:
    table.create()
    changed, commit = threading.Event(), threading.Event()

    def change() -> None:
        with transaction.atomic(using=table.using):
            table.rows.update(phase="closing", epoch=EPOCH + 1)
            changed.set()
            assert commit.wait(20)
        connections.close_all()

    changing = start(change)
    assert changed.wait(10)
    trying = start(table.ask, ask_for(table, asked))
    if table.backend.alias.startswith("portable"):
        eventually(lambda: trying.done() or table.waiting())
        commit.set()
    # The others wait as little as for any row in others' hands.
    answer = trying.result(10)
    commit.set()
    changing.result(10)
    # Everybody has seen the old phase until then: that is not enough.
    assert isinstance(answer, Denial)
    assert answer.holders == ()
    assert not table.as_row().is_taken(0)


def _read(table: Table) -> Any:
    row = table.as_row().read()
    assert row is not None
    return row


def change_while(
    table: Table, start: Start, trying: Future[Any], let_go_on: Callable[[], None]
) -> Grant | Denial:
    """What the try is answered that is under way, when the row is changed meanwhile.

    The change has to come after it, and whoever has made it has to see the grant.
    """
    other = build(table.backend.alias)
    assert isinstance(other, DatabaseBackend)
    row = table.as_row(other)
    before = row.read()
    assert before is not None
    alone = table.waiting()

    def change() -> bool:
        assert row.change(before, "closing", "It is well.", epoch=before.epoch + 1)
        return row.is_taken(0)

    changing = start(change)
    eventually(lambda: table.waiting() > alone or changing.done())
    assert not changing.done()
    let_go_on()
    answer: Grant | Denial = trying.result(10)
    taken = changing.result(10)
    other.close()
    assert taken == isinstance(answer, Grant)
    assert _read(table).phase == "closing"
    return answer


@on(SEVERAL_WRITERS)
@pytest.mark.parametrize("asked", ["shared", "permit", "several", "tree"])
def test_a_change_waits_for_a_grant_under_way(
    table: Table, start: Start, gate: Callable[..., Gate], asked: str
) -> None:
    table.create()
    asks = gate(table.backend.dialect, "has_authority", after=True)
    trying = start(table.ask, ask_for(table, asked))
    assert asks.arrived.wait(10)
    assert isinstance(change_while(table, start, trying, asks.open), Grant)


@on(("portable_postgres",))
def test_a_change_waits_for_a_grant_of_several_statements(
    table: Table, start: Start, gate: Callable[..., Gate]
) -> None:
    table.create()
    asks = gate(table.backend.dialect, "has_authority", after=True)
    trying = start(table.ask, table.request("a"))
    assert asks.arrived.wait(10)
    assert isinstance(change_while(table, start, trying, asks.open), Grant)


@on(("postgres",))
def test_a_change_waits_for_a_grant_of_one_statement(
    table: Table, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.create()
    held = table.ask(table.request("a"))
    assert isinstance(held, Grant)
    assert table.backend.release(held) is True
    # The statement is under way for as long as another has the key's row in its hands, which is
    # ordinarily a moment.
    longer = postgresql.BOUNDED.replace("'250ms'", "'20s'")
    assert longer != postgresql.BOUNDED
    monkeypatch.setattr(postgresql, "BOUNDED", longer)
    patient = build("postgres")
    taken, let_go = threading.Event(), threading.Event()

    def hold_the_row() -> None:
        with transaction.atomic(using=table.using):
            Lock.objects.using(table.using).filter(key=f"{table.name}a").update(label="mine")
            taken.set()
            assert let_go.wait(20)
        connections.close_all()

    holding = start(hold_the_row)
    assert taken.wait(10)
    trying = start(patient.try_acquire, table.request("a"))
    eventually(table.waiting)
    answer = change_while(table, start, trying, let_go.set)
    assert isinstance(answer, Grant)
    holding.result(10)
    patient.close()


@on(DATABASES)
def test_after_the_change_nobody_is_granted_anything_more(table: Table, start: Start) -> None:
    """Whoever has seen the change committed may count on what it finds then."""
    table.create()
    stop, granted = threading.Event(), threading.Semaphore(0)
    others = [build(table.backend.alias) for _ in range(3)]

    def ask_on(number: int, backend: Any) -> int:
        count = 0
        while not stop.is_set():
            request = table.request(f"{number} {count}")
            if isinstance(backend.try_acquire(request), Grant):
                granted.release()
                count += 1
        connections.close_all()
        return count

    asking = [start(ask_on, number, backend) for number, backend in enumerate(others)]
    try:
        for _ in range(15):
            assert granted.acquire(timeout=10)
        row = table.as_row()
        eventually(lambda: _changed(row))
        taken = table.count_taken()
    finally:
        stop.set()
    assert sum(future.result(10) for future in asking) == taken
    assert table.count_taken() == taken
    for backend in others:
        backend.close()


def _changed(row: AuthorityRow) -> bool:
    """Whether the authority has been taken from the database, by whatever time that took."""
    before = row.read()
    assert before is not None
    try:
        return before.phase == "closing" or row.change(
            before, "closing", "It is well.", epoch=before.epoch + 1
        )
    except BackendUnavailable:
        # The writers of SQLite come one at a time.
        return False
