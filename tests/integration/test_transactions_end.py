"""A lock taken inside a transaction is held until the outermost one has ended, however it ends."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

import pytest
from django.db import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    connections,
    transaction,
)

from distlocks import db_lock, locks
from tests.servers.children import Spawner
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import FaultProxy
from tests.testapp.models import Account
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("databases")


class Lane(NamedTuple):
    """Where the lock is, and the database on which the caller's transaction runs."""

    backend: str
    database: str


# The lock lives outside the transaction. (On SQLite it may have to live inside: a file of its own.)
LANES = [
    Lane("postgres", "postgres"),
    Lane("sqlite", "deferred"),
]
# Which database and which store it is makes no difference; this is to be seen, but not everywhere.
ALL_LANES = [
    *LANES,
    Lane("portable_postgres", "postgres_other"),
    Lane("postgres", "postgres_other"),
    Lane("postgres", "default"),
    Lane("sqlite", "postgres"),
    Lane("portable_sqlite", "postgres"),
    Lane("memory", "default"),
]


@pytest.fixture(params=LANES, ids="-".join)
def lane(request: pytest.FixtureRequest) -> Lane:
    lane: Lane = request.param
    return lane


on_every_lane = pytest.mark.parametrize("lane", ALL_LANES, ids="-".join)
on_postgres = pytest.mark.parametrize("lane", LANES[:1], ids="-".join)


def is_free(key: str, lane: Lane) -> bool:
    """Whether another thread would get the lock at once. It gives it back."""

    def ask() -> bool:
        try:
            lease = db_lock(key, timeout=0, backend=lane.backend).try_acquire()
            return lease is not None and lease.release()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result(20)


class Boom(Exception):
    """What the tests' own code raises."""


def boom() -> None:
    raise Boom


@contextmanager
def tolerated(*errors: type[Exception]) -> Iterator[None]:
    """Like suppress(), but the error must come."""
    with pytest.raises(errors):
        yield


# However it ends


@on_every_lane
def test_the_lock_is_held_until_the_commit(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database):
        with db_lock(key, backend=lane.backend) as lease:
            assert not is_free(key, lane)
        assert not is_free(key, lane)
        assert not lease.lost
    assert is_free(key, lane)
    assert not lease.lost


@on_every_lane
def test_a_rollback_frees_it_too(lane: Lane, key: str) -> None:
    with tolerated(Boom), transaction.atomic(using=lane.database):
        with db_lock(key, backend=lane.backend):
            pass
        assert not is_free(key, lane)
        raise Boom
    assert is_free(key, lane)


def test_an_error_in_the_block_frees_it_only_with_the_rollback(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database):
        with tolerated(Boom), db_lock(key, backend=lane.backend):
            raise Boom
        assert not is_free(key, lane)
    assert is_free(key, lane)


def test_a_rollback_on_demand(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database):
        with db_lock(key, backend=lane.backend):
            transaction.set_rollback(True, using=lane.database)
        assert not is_free(key, lane)
    assert is_free(key, lane)


def test_the_commit_of_a_savepoint_is_not_the_end(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database):
        with transaction.atomic(using=lane.database):
            with (
                transaction.atomic(using=lane.database),
                db_lock(key, backend=lane.backend),
            ):
                pass
            assert not is_free(key, lane)
        assert not is_free(key, lane)
    assert is_free(key, lane)


@on_every_lane
def test_nor_is_the_rollback_of_a_savepoint(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database):
        with tolerated(Boom), transaction.atomic(using=lane.database):
            with db_lock(key, backend=lane.backend):
                pass
            raise Boom
        assert not is_free(key, lane)
        with transaction.atomic(using=lane.database):
            pass
        assert not is_free(key, lane)
    assert is_free(key, lane)


@pytest.mark.parametrize("fails", [False, True])
def test_an_inner_block_without_a_savepoint(lane: Lane, key: str, fails: bool) -> None:
    with transaction.atomic(using=lane.database):
        with suppress(Boom), transaction.atomic(using=lane.database, savepoint=False):
            with db_lock(key, backend=lane.backend):
                pass
            if fails:
                raise Boom
        assert not is_free(key, lane)
    assert is_free(key, lane)


def test_a_connection_closed_inside(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database):
        with db_lock(key, backend=lane.backend) as lease:
            list(Account.objects.using(lane.database)[:1])
        connections[lane.database].close()
    assert is_free(key, lane)
    assert not lease.lost


@on_every_lane
def test_a_connection_closed_while_the_lock_is_needed(lane: Lane, key: str) -> None:
    """The lock does not live on that connection: it goes on."""
    with transaction.atomic(using=lane.database):
        with db_lock(key, backend=lane.backend) as lease:
            list(Account.objects.using(lane.database)[:1])
            connections[lane.database].close()
            assert not is_free(key, lane)
            lease.check()
        assert not lease.lost
    assert is_free(key, lane)


@on_postgres
@pytest.mark.parametrize("moment", ["in the block", "after the block"])
def test_a_connection_killed_inside(lane: Lane, key: str, moment: str) -> None:
    other = f"{key} of another"
    with db_lock(other, backend=lane.backend) as bystander:
        with (
            tolerated(OperationalError, InterfaceError),
            transaction.atomic(using=lane.database),
        ):
            with db_lock(key, backend=lane.backend) as lease:
                if moment == "in the block":
                    kill_session(lane.database)
                assert not is_free(key, lane)
                lease.check()
            if moment == "after the block":
                kill_session(lane.database)
            assert not is_free(key, lane)
            list(Account.objects.using(lane.database)[:1])
        assert is_free(key, lane)
        assert not lease.lost
        bystander.check()
        assert not is_free(other, lane)


def kill_session(database: str) -> None:
    """End the server's side of the caller's connection."""
    with connections[database].cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]

    def kill() -> None:
        with connections["postgres"].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
            alive = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
            eventually(lambda: cursor.execute(alive, [pid]) or cursor.fetchone() == (0,))
        connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(kill).result(20)


@on_every_lane
def test_a_commit_that_fails(lane: Lane, key: str) -> None:
    with connections[lane.database].cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE parent (id integer PRIMARY KEY)")
        cursor.execute(
            "CREATE TEMPORARY TABLE child "
            "(id integer REFERENCES parent DEFERRABLE INITIALLY DEFERRED)"
        )
        with tolerated(IntegrityError), transaction.atomic(using=lane.database):
            with db_lock(key, backend=lane.backend):
                cursor.execute("INSERT INTO child VALUES (1)")
            assert not is_free(key, lane)
    assert is_free(key, lane)


@on_postgres
def test_the_lock_is_still_held_while_the_commit_runs(lane: Lane, key: str) -> None:
    begun = threading.Event()

    def commit_slowly() -> None:
        with connections[lane.database].cursor() as cursor:
            # The COMMIT does not return before the doorman lets it through.
            cursor.execute(
                """
                CREATE TEMPORARY TABLE slow (id integer);
                CREATE FUNCTION pg_temp.slow() RETURNS trigger LANGUAGE plpgsql AS
                  $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
                CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED
                  FOR EACH ROW EXECUTE FUNCTION pg_temp.slow()
                """
            )
            with transaction.atomic(using=lane.database):
                with db_lock(key, backend=lane.backend):
                    cursor.execute("INSERT INTO slow VALUES (1)")
                begun.set()
        connections.close_all()

    name = connections[lane.database].settings_dict["NAME"]
    held_up = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND query = 'COMMIT'"
        " AND wait_event_type = 'Lock'"
    )
    with (
        ThreadPoolExecutor(1) as pool,
        # Advisory locks are per database.
        connections[lane.database].copy(lane.database).cursor() as cursor,
    ):
        cursor.execute("SELECT pg_advisory_lock(4711)")
        committing = pool.submit(commit_slowly)
        try:
            assert begun.wait(20)
            eventually(lambda: cursor.execute(held_up, [name]) or cursor.fetchone() == (1,))
            assert not is_free(key, lane)
            assert not is_free(key, lane)
        finally:
            cursor.execute("SELECT pg_advisory_unlock(4711)")
        committing.result(20)
        cursor.db.close()
    assert is_free(key, lane)


# With other hooks around


@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_commit_hook_that_raises(lane: Lane, key: str, order: str, robust: bool) -> None:
    def register() -> None:
        transaction.on_commit(boom, using=lane.database, robust=robust)

    with (suppress if robust else tolerated)(Boom), transaction.atomic(using=lane.database):
        if order == "before":
            register()
        with db_lock(key, backend=lane.backend):
            pass
        if order == "after":
            register()
        assert not is_free(key, lane)
    assert is_free(key, lane)


def test_a_commit_hook_finds_the_lock_free(lane: Lane, key: str) -> None:
    taken = []

    def hook() -> None:
        with transaction.atomic(using=lane.database):
            with db_lock(key, backend=lane.backend, timeout=0) as lease:
                taken.append(lease)
            assert not is_free(key, lane)

    with transaction.atomic(using=lane.database):
        transaction.on_commit(hook, using=lane.database)
        with db_lock(key, backend=lane.backend):
            pass
    assert len(taken) == 1
    assert is_free(key, lane)


def test_the_callers_own_hooks_run_as_ever(lane: Lane, key: str) -> None:
    ran = []
    with transaction.atomic(using=lane.database):
        transaction.on_commit(lambda: ran.append(1), using=lane.database)
        with tolerated(Boom), transaction.atomic(using=lane.database):
            transaction.on_commit(lambda: ran.append(2), using=lane.database)
            with db_lock(key, backend=lane.backend):
                transaction.on_commit(lambda: ran.append(3), using=lane.database)
            raise Boom
        transaction.on_commit(lambda: ran.append(4), using=lane.database)
        assert ran == []
    assert ran == [1, 4]
    assert is_free(key, lane)


# Several locks, several transactions


def test_two_locks_in_one_transaction(lane: Lane, key: str) -> None:
    first, second = f"{key} 1", f"{key} 2"
    with transaction.atomic(using=lane.database):
        with db_lock(first, backend=lane.backend):
            pass
        with db_lock(second, backend=lane.backend):
            assert not is_free(first, lane)
        assert not is_free(first, lane)
        assert not is_free(second, lane)
    assert is_free(first, lane)
    assert is_free(second, lane)


def test_two_keys_of_one_lock(lane: Lane, key: str) -> None:
    first, second = f"{key} 1", f"{key} 2"
    with transaction.atomic(using=lane.database):
        with db_lock(first, second, backend=lane.backend):
            pass
        assert not is_free(first, lane)
        assert not is_free(second, lane)
    assert is_free(first, lane)
    assert is_free(second, lane)


@pytest.mark.parametrize("inner_fails", [False, True])
def test_with_transactions_on_two_databases_the_last_one_counts(
    lane: Lane, key: str, inner_fails: bool
) -> None:
    outer = "postgres" if lane.database == "postgres_other" else "postgres_other"
    with transaction.atomic(using=outer):
        with suppress(Boom), transaction.atomic(using=lane.database):
            with db_lock(key, backend=lane.backend):
                pass
            assert not is_free(key, lane)
            if inner_fails:
                raise Boom
        assert not is_free(key, lane)
    assert is_free(key, lane)


def test_transactions_of_other_threads_do_not_matter(lane: Lane, key: str) -> None:
    begun, end = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with transaction.atomic(using=lane.database):
            begun.set()
            assert end.wait(20)
        connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(elsewhere)
        assert begun.wait(20)
        try:
            with db_lock(key, backend=lane.backend):
                pass
            assert is_free(key, lane)
        finally:
            end.set()
        done.result(20)


def test_an_ended_transaction_does_not_matter_to_the_next_lock(lane: Lane, key: str) -> None:
    for _ in range(3):
        with transaction.atomic(using=lane.database), db_lock(key, backend=lane.backend):
            pass
        with db_lock(key, timeout=0, backend=lane.backend):
            assert not is_free(key, lane)
        assert is_free(key, lane)


# Otherwise used


@pytest.mark.parametrize("outermost", ["atomic", "lock"])
def test_decorated_functions(lane: Lane, key: str, outermost: str) -> None:
    def work(fails: bool) -> str:
        assert not is_free(key, lane)
        if fails:
            raise Boom
        return "done"

    locked = db_lock(key, timeout=0, backend=lane.backend)
    atomic = transaction.atomic(using=lane.database)
    function: Callable[[bool], str] = (
        atomic(locked(work)) if outermost == "atomic" else locked(atomic(work))
    )
    assert function(False) == "done"
    assert is_free(key, lane)
    with tolerated(Boom):
        function(True)
    assert is_free(key, lane)
    assert function(False) == "done"
    with transaction.atomic(using=lane.database):
        function(False)
        assert not is_free(key, lane)
    assert is_free(key, lane)


def test_a_lease_taken_before_the_transaction_and_given_back_inside(lane: Lane, key: str) -> None:
    lease = db_lock(key, backend=lane.backend).acquire()
    with transaction.atomic(using=lane.database):
        assert lease.release() is True
        assert not is_free(key, lane)
        # Asked again, the answer is the same and the release is still the one.
        assert lease.release() is True
        assert not is_free(key, lane)
    assert is_free(key, lane)


def test_around_the_transaction_the_lock_ends_with_its_block(lane: Lane, key: str) -> None:
    with db_lock(key, backend=lane.backend):
        with transaction.atomic(using=lane.database):
            pass
        assert not is_free(key, lane)
    assert is_free(key, lane)


def test_on_request_the_lock_ends_before_the_commit(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database):
        with db_lock(key, backend=lane.backend, until_commit=False):
            assert not is_free(key, lane)
        assert is_free(key, lane)


@on_postgres
def test_between_block_and_commit_the_lease_is_renewed(lane: Lane, key: str) -> None:
    with transaction.atomic(using=lane.database):
        with db_lock(key, ttl=1, backend=lane.backend) as lease:
            pass
        at_the_blocks_end = lease.deadline
        eventually(lambda: lease.deadline > at_the_blocks_end)
        assert not lease.lost
    assert is_free(key, lane)


@on_postgres
def test_a_lease_lost_between_block_and_commit_does_not_disturb_the_commit(
    lane: Lane, key: str
) -> None:
    lost = []
    with transaction.atomic(using=lane.database):
        with db_lock(key, backend=lane.backend, on_lost=lost.append) as lease:
            account = Account.objects.using(lane.database).create(name=key)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(locks[lane.backend].force_release, key).result(20)
    assert Account.objects.using(lane.database).get(name=key) == account
    assert is_free(key, lane)
    eventually(lambda: lost == [lease])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_thread_that_ends_inside_its_transaction(lane: Lane, key: str) -> None:
    """Its connections are closed by the garbage collector, and its locks come free with them."""
    left: list[bool] = []

    def abandon() -> None:
        transaction.atomic(using=lane.database).__enter__()
        list(Account.objects.using(lane.database)[:1])
        with db_lock(key, backend=lane.backend):
            pass
        left.append(is_free(key, lane))

    thread = threading.Thread(target=abandon)
    thread.start()
    thread.join(20)
    assert left == [False]
    del thread

    def collected() -> bool:
        gc.collect()
        return is_free(key, lane)

    eventually(collected)


@on_postgres
def test_a_process_forked_inside_frees_nothing(lane: Lane, key: str, spawn: Spawner) -> None:
    child = spawn(
        """
        import gc, os, warnings
        from django.db import connections, transaction
        from distlocks import db_lock

        warnings.simplefilter("ignore")
        with transaction.atomic(using=database):
            with db_lock(key, backend=backend) as lease:
                pass
            forked = os.fork()
            if not forked:
                # What the end of a transaction, and of the interpreter, would do.
                connections[database].run_on_commit.clear()
                gc.collect()
                code = 0 if lease.lost and lease.release() is False else 1
                os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
            print("forked")
            input()
        input()
        """,
        key=key,
        backend=lane.backend,
        database=lane.database,
    )
    child.expect("forked")
    assert not is_free(key, lane)
    child.send()
    eventually(lambda: is_free(key, lane))
    child.send()
    child.result()


def test_a_process_that_ends_right_after_its_commit_leaves_no_lock(
    key: str, spawn: Spawner, postgres_server: PostgresServer
) -> None:
    """As a management command does. The release takes its time: the server is far away."""
    with FaultProxy(postgres_server.host, postgres_server.port, delay=0.02) as proxy:
        proxy.mode = "delay"
        url = postgres_server.url.replace(f":{postgres_server.port}/", f":{proxy.port}/")
        child = spawn(
            """
            from django.db import transaction
            from distlocks import db_lock

            with transaction.atomic(using="postgres"), db_lock(key, backend="postgres"):
                pass
            """,
            key=key,
            env={PostgresServer.url_variable: url},
        )
        child.result()
    assert is_free(key, Lane("postgres", "postgres"))


def test_many_transactions_at_once_each_keep_their_own(lane: Lane, key: str) -> None:
    def work(number: int) -> list[bool]:
        mine = f"{key} {number}"
        try:
            with transaction.atomic(using=lane.database):
                with db_lock(mine, backend=lane.backend):
                    pass
                # One thread's release must not set free, or be taken for, another one's.
                held = is_free(mine, lane)
            return [held, is_free(mine, lane)]
        finally:
            connections.close_all()

    # One writer at a time on SQLite; the transactions queue for it.
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [[False, True]] * 8


def test_what_goes_wrong_with_the_release_after_the_commit_is_not_the_callers_problem(
    lane: Lane, key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = locks[lane.backend]
    real, failures = backend.release, [DatabaseError("surprise")]

    def release(grant: object) -> bool:
        if failures:
            raise failures.pop()
        return real(grant)  # type: ignore[arg-type]

    with transaction.atomic(using=lane.database):
        with db_lock(key, backend=lane.backend, ttl=2):
            Account.objects.using(lane.database).create(name=key)
        monkeypatch.setattr(backend, "release", release)
    assert Account.objects.using(lane.database).filter(name=key).exists()
    eventually(lambda: "surprise" in caplog.text)
    backend.force_release(key)
