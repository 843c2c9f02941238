"""What `check --deploy` says of a ZooKeeper backend's servers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.test import override_settings

from distlocks import locks
from tests.servers import session
from tests.servers.base import free_port
from tests.servers.zookeeper import ZooKeeperEnsemble, ZooKeeperServer

Found = Callable[..., dict[str | None, CheckMessage]]


@pytest.fixture
def found() -> Iterator[Found]:
    """`found(hosts=…)`: what is said of a backend on these servers, by number."""

    def check(*, deploy: bool = True, ttl: float = 5, **options: Any) -> Any:
        entry = {
            "BACKEND": "distlocks.backends.zookeeper.ZooKeeperBackend",
            "TTL": ttl,
            "OPTIONS": options,
        }
        with override_settings(DISTLOCKS={"default": entry}):
            messages = run_checks(tags=["distlocks"], include_deployment_checks=deploy)
            locks.close_all()
        return {message.id: message for message in messages}

    yield check
    locks.close_all()


def test_an_ensemble_is_as_it_should_be(found: Found) -> None:
    ensemble = session.group(ZooKeeperEnsemble)
    assert ensemble is not None
    assert found(hosts=ensemble.addresses, path="/checks") == {}


def test_ordinary_checks_ask_nobody(found: Found) -> None:
    assert found(deploy=False, hosts=f"127.0.0.1:{free_port()}") == {}


def test_servers_that_are_not_there(found: Found) -> None:
    said = found(hosts=f"127.0.0.1:{free_port()}", timeout=0.3)
    assert list(said) == ["distlocks.E041"]
    assert "cannot be reached" in said["distlocks.E041"].msg


def test_a_single_server_and_one_that_ends_sessions_too_soon(found: Found) -> None:
    server = session.private(ZooKeeperServer, longest_session=4000)
    assert server is not None
    with server:
        said = found(hosts=server.address, ttl=5)
    assert set(said) == {"distlocks.E042", "distlocks.W040"}
    assert "4 s" in said["distlocks.E042"].msg
