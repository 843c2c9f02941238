"""The OPTIONS of a Redis backend: what they may be, and what is said of those that are wrong."""

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from distlocks import locks
from distlocks.backends.redis import RedisBackend
from distlocks.backends.redis.place import Cluster, Sentinels, Single

URL = "redis://127.0.0.1:6399/4"
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    "plain": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": URL},
    "extra": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": "rediss://user:secret@127.0.0.1:6398/15",
    },
}


def made(**options: Any) -> RedisBackend:
    entry = {"BACKEND": "distlocks.backends.redis.RedisBackend", "OPTIONS": options}
    with override_settings(DISTLOCKS={"default": entry}, CACHES=CACHES):
        backend = locks["default"]
    assert isinstance(backend, RedisBackend)
    return backend


def test_a_url_names_one_server() -> None:
    place = made(url=URL).place
    assert isinstance(place, Single)
    assert (place.address(b""), place.db) == (("127.0.0.1", 6399), 4)


def test_a_socket_is_a_place_too() -> None:
    place = made(url="unix:///run/redis.sock?db=3").place
    assert (place.address(b""), place.db) == (("/run/redis.sock", 0), 3)


def test_what_the_options_say_goes_before_what_the_url_says() -> None:
    place = made(url=URL, db=7, connection={"password": "secret", "socket_timeout": 0.5}).place
    assert (place.db, place.settings["password"], place.timeout) == (7, "secret", 0.5)


def test_sentinels_name_the_server() -> None:
    place = made(sentinels=[("127.0.0.1", 26379)], service="main", db=2).place
    assert isinstance(place, Sentinels)
    assert (place.service, place.db) == ("main", 2)


@pytest.mark.parametrize("cluster", ["redis://127.0.0.1:7000", [("127.0.0.1", 7000)]])
def test_a_cluster_is_named_by_some_of_its_nodes(cluster: Any) -> None:
    place = made(cluster=cluster).place
    assert isinstance(place, Cluster)
    assert place.start == [("127.0.0.1", 7000)]


def test_keys_of_one_tree_are_on_one_node_of_a_cluster() -> None:
    place = made(cluster=[("127.0.0.1", 7000)]).place
    assert place.bucket("customer:7") == place.bucket("customer:7\x1forder:42")
    assert len({place.bucket(f"customer:{n}") for n in range(100)}) > 50


@pytest.mark.parametrize(("alias", "port", "db"), [("plain", 6399, 15), ("extra", 6398, 14)])
def test_a_caches_server_is_used_and_not_its_database(alias: str, port: int, db: int) -> None:
    place = made(cache=alias).place
    assert (place.address(b""), place.db) == (("127.0.0.1", port), db)


def test_a_caches_password_and_tls_are_used() -> None:
    place = made(cache="extra").place
    assert (place.settings["username"], place.settings["password"]) == ("user", "secret")
    assert place.kind.__name__ == "SSLConnection"
    assert "secret" not in str(place)


def test_who_asks_for_the_caches_database_gets_it() -> None:
    assert made(cache="plain", db=4).place.db == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "by one of url, sentinels, cluster, cache, not by none"),
        ({"url": URL, "cache": "plain"}, "not by url and cache"),
        ({"url": "http://127.0.0.1"}, r"\['url'\] is no URL of a Redis server"),
        ({"url": 6379}, r"\['url'\] is no URL of a Redis server"),
        ({"sentinels": [("127.0.0.1", 26379)]}, "has 'sentinels' and lacks 'service'"),
        ({"sentinels": "127.0.0.1", "service": "m"}, r"\['sentinels'\] must be a list"),
        ({"cluster": []}, r"\['cluster'\] must be a list"),
        ({"cluster": "http://x"}, r"\['cluster'\] is no URL"),
        ({"cache": "absent"}, r"\['cache'\] = 'absent' is no alias of CACHES"),
        ({"cache": "default"}, "LocMemCache, which names no one Redis server"),
        ({"url": URL, "db": -1}, r"\['db'\] must be a whole number"),
        ({"url": URL, "db": "one"}, r"\['db'\] must be a whole number"),
        ({"url": URL, "namespace": "a{b}"}, r"\['namespace'\] = 'a\{b\}'"),
        ({"url": URL, "namespace": ""}, r"\['namespace'\] = ''"),
        ({"url": URL, "incarnation_guard": False}, r"\['incarnation_guard'\] = False"),
        ({"url": URL, "min_replicas": -1}, r"\['min_replicas'\] must be"),
        ({"url": URL, "max_connections": 1}, r"\['max_connections'\] must be"),
        ({"url": URL, "quarantine": -1}, r"\['quarantine'\] = -1 is less than 0"),
        ({"url": URL, "quarantine": "long"}, r"\['quarantine'\] must be a number"),
        ({"url": URL, "connection": 1}, r"\['connection'\] must be a dict"),
        ({"url": URL, "sentinel": 1}, "unknown option 'sentinel'"),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=said) as caught:
        made(**options)
    assert "DISTLOCKS['default']['OPTIONS']" in str(caught.value)
