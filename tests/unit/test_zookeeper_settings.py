"""The OPTIONS of a ZooKeeper backend, and the names that it gives to keys and claims."""

import subprocess
import sys
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from hypothesis import given
from hypothesis import strategies as st
from kazoo.security import CREATOR_ALL_ACL, make_digest_acl

from distlocks import locks
from distlocks.backends.zookeeper import ZooKeeperBackend
from distlocks.backends.zookeeper.nodes import Named, claim_in, name_of, node_of, place_in
from distlocks.claims import EXCLUSIVE, PERMIT, SHARED, Claim

HOSTS = "127.0.0.1:2181,127.0.0.1:2182"


def made(max_ttl: float = 30, **options: Any) -> ZooKeeperBackend:
    entry = {
        "BACKEND": "distlocks.backends.zookeeper.ZooKeeperBackend",
        "TTL": max_ttl,
        "OPTIONS": options,
    }
    with override_settings(DISTLOCKS={"default": entry}):
        backend = locks["default"]
    assert isinstance(backend, ZooKeeperBackend)
    return backend


def test_the_defaults() -> None:
    settings = made(hosts=HOSTS).settings
    assert (settings.hosts, settings.path, settings.timeout) == (HOSTS, "/distlocks", 5)
    assert (settings.auth, settings.acl, settings.connection) == ([], None, {})
    assert settings.session_timeout == 30


def test_hosts_may_be_a_list() -> None:
    assert made(hosts=["127.0.0.1:2181", "127.0.0.1:2182"]).settings.hosts == HOSTS


def test_a_request_never_takes_longer_than_a_third_of_a_lease_unless_it_is_told_so() -> None:
    assert made(6, hosts=HOSTS).settings.timeout == 2
    assert made(6, hosts=HOSTS, timeout=3).settings.timeout == 3


def test_who_authenticates_keeps_others_out() -> None:
    one = made(hosts=HOSTS, auth=("digest", "user:secret")).settings
    assert one.auth == [("digest", "user:secret")]
    assert one.acl == CREATOR_ALL_ACL
    several = made(hosts=HOSTS, auth=[("digest", "a:b"), ("x", "y")], acl="open").settings
    assert several.auth == [("digest", "a:b"), ("x", "y")]
    assert several.acl is None
    acl = [make_digest_acl("user", "secret", all=True)]
    assert made(hosts=HOSTS, acl=acl).settings.acl == acl


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no hosts": ({}, "'hosts'"),
    "hosts of another kind": ({"hosts": 42}, "'hosts'"),
    "empty hosts": ({"hosts": " , "}, "'hosts'"),
    "hosts with a path": ({"hosts": "h:2181/locks"}, "'path'"),
    "path without a root": ({"hosts": HOSTS, "path": "locks"}, "no path"),
    "path with an end": ({"hosts": HOSTS, "path": "/locks/"}, "no path"),
    "path with dots": ({"hosts": HOSTS, "path": "/a/../b"}, "no path"),
    "path of ZooKeeper": ({"hosts": HOSTS, "path": "/zookeeper/locks"}, "ZooKeeper's own"),
    "timeout of another kind": ({"hosts": HOSTS, "timeout": "5"}, "timeout"),
    "no time": ({"hosts": HOSTS, "timeout": 0}, "timeout"),
    "auth of another kind": ({"hosts": HOSTS, "auth": "secret"}, "'auth'"),
    "auth of three": ({"hosts": HOSTS, "auth": [("a", "b", "c")]}, "'auth'"),
    "acl of another kind": ({"hosts": HOSTS, "acl": "mine"}, "'acl'"),
    "creator without auth": ({"hosts": HOSTS, "acl": "creator"}, "'auth'"),
    "connection of another kind": ({"hosts": HOSTS, "connection": [1]}, "dict"),
    "connection with what has an option": (
        {"hosts": HOSTS, "connection": {"auth_data": []}},
        "auth_data",
    ),
    "unknown": ({"hosts": HOSTS, "url": "x"}, "unknown option"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=message) as refused:
        made(**options)
    number = "E010" if message == "unknown option" else "E040"
    assert refused.value.check_id == f"distlocks.{number}"  # type: ignore[attr-defined]
    assert "secret" not in str(refused.value)


def test_without_its_driver_it_says_what_to_install() -> None:
    script = """
import sys
sys.modules["kazoo"] = None
from django.conf import settings
settings.configure(DISTLOCKS={
    "default": {"BACKEND": "distlocks.backends.zookeeper.ZooKeeperBackend", "OPTIONS": {}}
})
from distlocks import locks
try:
    locks["default"]
except Exception as error:
    print(error.check_id, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.startswith("distlocks.E040 ")
    assert "distlocks[zookeeper]" in done.stdout


TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=200)


@given(TEXTS, TEXTS)
def test_a_name_is_one_node_and_no_other_names(name: str, other: str) -> None:
    node = node_of(name)
    assert name_of(node) == name
    assert (node_of(other) == node) == (other == name)
    assert node not in (".", "..")
    # What ZooKeeper refuses, by its UTF-16.
    units = node.encode("utf-16-le")
    for at in range(0, len(units), 2):
        unit = int.from_bytes(units[at : at + 2], "little")
        assert unit != ord("/")
        assert 0x1F < unit < 0x7F or 0x9F < unit < 0xD800 or 0xF8FF < unit < 0xFFF0


@pytest.mark.parametrize("name", [".", "..", "...", "/", "%", "%2E", "a b ", "é", "\U0001f512"])
def test_names_that_are_no_nodes_as_they_stand(name: str) -> None:
    assert name_of(node_of(name)) == name
    assert "/" not in node_of(name)


@given(TEXTS, st.sampled_from([EXCLUSIVE, SHARED, PERMIT]), st.booleans())
def test_a_claim_is_read_from_its_node(owner_id: str, mode: str, released: bool) -> None:
    claim = Claim("key", mode, 3 if mode == PERMIT else 0)
    named = Named(claim, owner_id, "5e551041", released)
    assert claim_in("key", named.node) == named
    place = Named(claim, owner_id, "", number=7)
    assert place_in("key", f"{place.node}0000000007") == place


@pytest.mark.parametrize("node", ["", "x", "E.owner", "Q.owner.session", "Ex.owner.session"])
def test_what_is_no_claim_is_told_apart(node: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        claim_in("key", node)
    with pytest.raises(ValueError, match=r".*"):
        place_in("key", node)
