"""What all tests share: the databases, fresh keys, and processes beside the test's own."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connections
from django.test.utils import setup_databases
from pytest_django import DjangoDbBlocker

from distlocks import Lease
from distlocks.history.journal import Journal, journal
from distlocks.history.waits import waits
from distlocks.renewal import renewer
from tests.servers import session
from tests.servers.children import Spawner
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgres import PostgresServer

# By alias, the server of each database that is not a file of the run's.
SERVERS: dict[str, type[PostgresServer] | type[MariaDBServer]] = {
    "postgres": PostgresServer,
    "postgres_other": PostgresServer,
    "mariadb": MariaDBServer,
}


@pytest.fixture(scope="session")
def django_db_setup(
    django_test_environment: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[None]:
    """Create the databases of all aliases, also those that no test of Django's kind names."""
    with django_db_blocker.unblock():
        setup_databases(verbosity=0, interactive=False)
    yield
    with django_db_blocker.unblock():
        connections.close_all()
    # Our own server goes with its data; somebody else's is left as it was.
    for alias, kind in SERVERS.items():
        if alias in settings.DATABASES and not session.server(kind).owned:
            session.server(kind).drop(str(settings.DATABASES[alias]["NAME"]))


@pytest.fixture
def databases(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """All databases as production code finds them: no transaction around the test, no flush after.

    What a test commits stays, so it uses keys of its own (see `key`).
    """
    with django_db_blocker.unblock():
        yield
        # Or they pile up beside the tests after it.
        assert not any(one.execute_wrappers for one in connections.all(initialized_only=True))
        # A connection that the test broke, or left in a transaction, is not the next test's.
        connections.close_all()


@pytest.fixture(autouse=True, scope="session")
def nothing_is_written_beside_a_test() -> Iterator[None]:
    """Also where a test has it that no test is run: the history is written by who asks for it, and
    by the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "wake", lambda self: None)
        yield


@pytest.fixture(autouse=True)
def no_lease_outlives_its_test() -> Iterator[None]:
    """What a test has left held is neither renewed nor missed beside the tests after it, and what
    could not be given back is not tried again beside them."""
    yield
    for lease in renewer.leases():
        if isinstance(lease, Lease):
            lease.drop()
    renewer.releases.give_up()
    journal._reset()
    waits._reset()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key that no other test uses."""
    return f"{request.node.name[:100]}:{uuid.uuid4().hex}"


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawner]:
    """Runs Python beside the test, in its settings: see `Spawner`. Ends what is left at the end."""
    spawner = Spawner(tmp_path)
    yield spawner
    spawner.close()
