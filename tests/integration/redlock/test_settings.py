"""What is said of wrong settings of a Redlock backend, and of its servers."""

from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from distlocks import locks
from distlocks.backends.redis import RedisBackend
from tests.integration.redlock.conftest import REDLOCK, Make
from tests.servers.base import free_port
from tests.servers.redis_groups import IndependentGroup
from tests.waiting import eventually

URLS = [f"redis://127.0.0.1:{port}/1" for port in (20001, 20002, 20003)]


def found(deploy: bool = False, **options: Any) -> dict[str | None, CheckMessage]:
    entry = {"BACKEND": REDLOCK, "OPTIONS": {"servers": URLS, **options}}
    with override_settings(DISTLOCKS={"default": entry}):
        messages = run_checks(tags=["distlocks"], include_deployment_checks=deploy)
        locks.close_all()
    return {message.id: message for message in messages}


def test_ordinary_ones_are_silent_and_ask_nobody() -> None:
    assert found() == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"servers": URLS[:2]}, "at least 3 servers"),
        ({"servers": "redis://127.0.0.1"}, "must be a list of the URLs"),
        ({"servers": [*URLS[:2], "http://127.0.0.1"]}, "['servers'][2] = 'http://127.0.0.1': "),
        ({"servers": [*URLS, URLS[0]]}, "names 127.0.0.1:20001 more than once"),
        ({"node_timeout": 0}, "['node_timeout'] = 0 is less than 0.01"),
        ({"clock_skew": -1}, "['clock_skew'] = -1 is less than 0"),
        ({"clock_skew": "1 s"}, "['clock_skew'] must be a number of seconds"),
        ({"namespace": "a{b}"}, "['namespace'] = 'a{b}' must be printable text without braces"),
        ({"connection": "fast"}, "['connection'] must be a dict"),
    ],
)
def test_a_wrong_one_is_named_with_the_way_out(options: dict[str, Any], said: str) -> None:
    error = found(**options)["distlocks.E050"]
    assert said in error.msg
    assert error.msg.startswith("DISTLOCKS['default']['OPTIONS']")
    assert error.hint
    entry = {"BACKEND": REDLOCK, "OPTIONS": {"servers": URLS, **options}}
    with (
        override_settings(DISTLOCKS={"default": entry}),
        pytest.raises(ImproperlyConfigured) as caught,
    ):
        locks["default"]
    assert said in str(caught.value)


def test_an_unknown_option_is_refused() -> None:
    assert "unknown option 'url'" in found(url="redis://127.0.0.1")["distlocks.E010"].msg


def test_an_even_number_is_warned_of() -> None:
    warning = found(servers=[*URLS, "redis://127.0.0.1:20004/1"])["distlocks.W050"]
    assert "no more of them may be down than of 3" in warning.msg


class TestServers:
    """Asked by check --deploy."""

    def test_that_are_as_they_should_be(self, five: IndependentGroup) -> None:
        told = found(True, servers=[member.url for member in five.members])
        # The tests' servers keep nothing on disk.
        assert set(told) == {"distlocks.W010"}

    def test_a_minority_that_does_not_answer_is_a_warning(self, five: IndependentGroup) -> None:
        urls = [member.url for member in five.members[:3]]
        dead = [f"redis://127.0.0.1:{free_port()}/0" for _ in range(2)]
        told = found(True, servers=urls + dead)
        assert "does not answer" in told["distlocks.W051"].msg
        assert "distlocks.E019" not in told

    def test_a_majority_that_does_not_answer_is_an_error(self, five: IndependentGroup) -> None:
        dead = [f"redis://127.0.0.1:{free_port()}/0" for _ in range(2)]
        told = found(True, servers=[five.members[0].url, *dead])
        assert "does not answer" in told["distlocks.E019"].msg

    def test_two_names_of_one_server_are_an_error(self, five: IndependentGroup) -> None:
        urls = [member.url for member in five.members[:3]]
        again = f"redis://localhost:{five.members[0].port}/0"
        assert "are one server" in found(True, servers=[*urls[:2], again])["distlocks.E051"].msg

    def test_so_are_a_server_and_its_replica(self, five: IndependentGroup) -> None:
        primary, replica, other = five.members[:3]
        replica.ask("REPLICAOF", primary.host, primary.port)
        try:
            eventually(lambda: replica.is_replica_in_sync())
            told = found(True, servers=[primary.url, replica.url, other.url])
        finally:
            replica.ask("REPLICAOF", "NO", "ONE")
        assert "one is a replica of the other" in told["distlocks.E051"].msg


def test_a_redis_backend_on_one_of_the_servers_has_locks_of_its_own(
    five: IndependentGroup, make: Make, key: str
) -> None:
    backend = make()
    entry = {
        "BACKEND": "distlocks.backends.redis.RedisBackend",
        "OPTIONS": {"url": five.members[0].url, "namespace": backend.options["namespace"]},
    }
    with override_settings(DISTLOCKS={"default": entry}):
        single = locks["default"]
        assert isinstance(single, RedisBackend)
        assert single.servers.hashes[0] != backend.nodes[0].hash_name
        locks.close_all()
