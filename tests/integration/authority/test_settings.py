"""Wrong settings of a fast path are named before anything is granted, and so is the way out."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test import override_settings

from distlocks import db_lock, locks
from distlocks.conf import InvalidSetting
from tests.integration.authority.scene import FAST, FAST_PATH_BACKEND, MAX_TTL, Scene
from tests.servers.base import free_port
from tests.settings import REDIS_BACKEND

Use = Callable[..., None]


def entry(**options: Any) -> dict[str, Any]:
    """A fast path over the aliases of `use`."""
    return {
        "BACKEND": FAST_PATH_BACKEND,
        "OPTIONS": {"redis": "servers", "database": "default", **options},
    }


@pytest.fixture
def use() -> Iterator[Use]:
    """Configures a fast path over servers that are not there."""
    active: list[override_settings] = []

    def use(aliases: dict[str, Any] | None = None, prefix: str = "", **options: Any) -> None:
        url = f"redis://127.0.0.1:{free_port()}/1"
        entries = {
            "default": settings.DISTLOCKS["default"],
            "memory": settings.DISTLOCKS["memory"],
            "servers": {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": url}},
            FAST: {**entry(**options), "KEY_PREFIX": prefix},
            **(aliases or {}),
        }
        change = override_settings(DISTLOCKS=entries)
        change.enable()
        active.append(change)

    yield use
    locks.close_all()
    for change in reversed(active):
        change.disable()


def fault() -> InvalidSetting:
    """What is wrong, as whoever asks for a lock is told."""
    with pytest.raises(ImproperlyConfigured) as caught:
        db_lock("key", backend=FAST, timeout=0).acquire()
    assert isinstance(caught.value, InvalidSetting)
    return caught.value


def test_ordinary_ones_are_silent_and_ask_nobody(use: Use) -> None:
    use()
    assert run_checks(tags=["distlocks"]) == []


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "redis is missing": ({"redis": None}, "['redis'] = None is no alias", "a RedisBackend"),
    "no such redis": ({"redis": "other"}, "['redis'] = 'other' is no alias", "a RedisBackend"),
    "redis is a list": ({"redis": ["servers"]}, "['redis'] = ['servers']", "a RedisBackend"),
    "redis is a database": ({"redis": "default"}, "DatabaseBackend", "a RedisBackend"),
    "redis is memory": ({"redis": "memory"}, "MemoryBackend", "a RedisBackend"),
    "redis is itself": ({"redis": FAST}, "FastPathBackend", "a RedisBackend"),
    "no such database": ({"database": "other"}, "['database'] = 'other'", "a DatabaseBackend"),
    "database is a redis": ({"database": "servers"}, "RedisBackend", "a DatabaseBackend"),
    "database is missing": ({"database": None}, "['database'] = None", "a DatabaseBackend"),
    "mode_lease is short": ({"mode_lease": 0.4}, "['mode_lease'] = 0.4", "default"),
    "mode_lease is negative": ({"mode_lease": -1}, "['mode_lease'] = -1", "default"),
    "mode_lease is no number": ({"mode_lease": "5"}, "['mode_lease']", "default"),
    "drift is below ours": ({"drift": 0.009}, "['drift'] = 0.009", "default"),
    "skew is negative": ({"skew": -0.1}, "['skew'] = -0.1", "default"),
    "return_after is negative": ({"return_after": -1}, "['return_after'] = -1", "default"),
    "return_after is endless": ({"return_after": float("inf")}, "['return_after']", "default"),
    "skew is none": ({"skew": None}, "['skew']", "default"),
    "namespace is no str": ({"namespace": 7}, "['namespace'] = 7", "default"),
    "namespace is too long": ({"namespace": "n" * 200}, "['namespace']", "default"),
}


@pytest.mark.parametrize(("options", "problem", "way_out"), WRONG.values(), ids=WRONG)
def test_each_fault_names_the_option_and_the_way_out(
    use: Use, options: dict[str, Any], problem: str, way_out: str
) -> None:
    use(**options)
    found = fault()
    assert problem in found.message
    assert f"DISTLOCKS[{FAST!r}]['OPTIONS']" in found.message
    assert way_out in (found.hint or "")
    assert found.check_id == "distlocks.E023"


@pytest.mark.parametrize("namespace", ["", "{a}", "a\n"])
def test_a_namespace_that_redis_could_not_use_is_named_where_it_is_written(
    use: Use, namespace: str
) -> None:
    use(namespace=namespace)
    found = fault()
    assert "['namespace']" in found.message
    assert f"DISTLOCKS[{FAST!r}]" in found.message


def test_faults_of_the_halves_are_named(use: Use) -> None:
    use({"servers": {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": "no url"}}})
    found = fault()
    assert "DISTLOCKS['servers']['OPTIONS']['url']" in found.message
    assert found.check_id == "distlocks.E018"


def test_the_incarnation_guard_must_be_on(use: Use) -> None:
    options = {"url": "redis://127.0.0.1:1/0", "incarnation_guard": "off"}
    use({"bare": {"BACKEND": REDIS_BACKEND, "OPTIONS": options}}, redis="bare")
    found = fault()
    assert "['redis'] = 'bare' has no incarnation guard" in found.message
    assert "leave 'incarnation_guard' out" in (found.hint or "")
    assert found.check_id == "distlocks.E023"


@pytest.mark.parametrize("half", ["redis", "database"])
def test_a_half_that_cannot_be_imported_is_named(use: Use, half: str) -> None:
    use({"broken": {"BACKEND": "no.such.Backend"}}, **{half: "broken"})
    with pytest.raises(ImproperlyConfigured, match="'broken'"):
        Scene.backend_of(FAST)


@pytest.mark.parametrize("half", ["redis", "database", None])
def test_checks_name_an_alias_that_cannot_be_imported(use: Use, half: str | None) -> None:
    """Also one that has nothing to do with the fast path."""
    use({"broken": {"BACKEND": "no.such.Backend"}}, **({half: "broken"} if half else {}))
    messages = run_checks(tags=["distlocks"])
    assert any("no.such.Backend" in message.msg for message in messages)


def test_checks_tell_right_from_wrong_among_several(use: Use) -> None:
    use({"wrong": entry(redis=["servers"])})
    (message,) = run_checks(tags=["distlocks"])
    assert message.id == "distlocks.E023"
    assert "DISTLOCKS['wrong']['OPTIONS']['redis']" in message.msg


def test_others_that_use_the_same_keys_are_warned_of(use: Use) -> None:
    """Redis keeps them out of nothing."""
    table = settings.DISTLOCKS["default"]
    use({"other": table})
    (message,) = run_checks(tags=["distlocks"])
    assert message.id == "distlocks.W014"
    assert "'other' has keys of 'fast' in the same table" in message.msg
    use({"other": {**table, "KEY_PREFIX": "theirs/"}}, prefix="ours/")
    assert run_checks(tags=["distlocks"]) == []


def test_a_database_that_nobody_else_sees_is_refused(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = {**connections["default"].settings_dict, "NAME": ":memory:"}
    monkeypatch.setitem(connections.databases, "passing", in_memory)
    backend = settings.DISTLOCKS["default"]["BACKEND"]
    use({"passing": {"BACKEND": backend, "OPTIONS": {"using": "passing"}}}, database="passing")
    found = fault()
    assert "['database'] = 'passing' is a database in memory" in found.message
    assert found.check_id == "distlocks.E023"
    del connections["passing"]


def test_unknown_options_are_named(use: Use) -> None:
    use(retrun_after=3)
    assert "'retrun_after'" in fault().message


@pytest.mark.parametrize("options", [case[0] for case in WRONG.values()], ids=WRONG)
def test_checks_find_them_too(use: Use, options: dict[str, Any]) -> None:
    use(**options)
    ids = {message.id for message in run_checks(tags=["distlocks"])}
    assert "distlocks.E023" in ids


# What two fast paths share


def names_of(use: Use, **settings_of_one: Any) -> tuple[str, tuple[bytes, ...]]:
    """The name of the row, and of the hashes in Redis."""
    use(**settings_of_one)
    backend = Scene.backend_of(FAST)
    return backend.settings.name, tuple(backend.redis.servers.hashes)


def test_each_prefix_has_a_row_and_locks_of_its_own(use: Use) -> None:
    """What one has in the table decides nothing about the other."""
    found = [
        names_of(use),
        names_of(use, prefix="a:"),
        names_of(use, prefix="b:"),
        names_of(use, namespace="other"),
        names_of(use, namespace="other", prefix="a:"),
    ]
    assert len({name for name, _ in found}) == len(found)
    assert len({hashes for _, hashes in found}) == len(found)


def test_two_that_share_a_row_share_their_locks_in_redis(use: Use) -> None:
    """Else each would take the other's authority away."""
    first = names_of(use, namespace="shop:eu")
    second = names_of(use, namespace="shop", prefix="eu")
    assert (first[0] == second[0]) == (first[1] == second[1])


def test_locks_of_the_plain_redis_alias_are_others(use: Use) -> None:
    use()
    fast_path, plain = Scene.backend_of(FAST), locks["servers"]
    assert not {*fast_path.redis.servers.hashes} & {*plain.servers.hashes}  # type: ignore[attr-defined]


def test_only_the_fast_path_says_how_long_leases_are(scene: Scene, key: str) -> None:
    """The halves have their servers from the other aliases, and nothing else."""
    settings.DISTLOCKS["long"] = {
        **settings.DISTLOCKS["postgres"],
        "TTL": 600,
        "KEY_PREFIX": "theirs/",
    }
    backend = scene.add(database="long")
    with scene.lock(key, timeout=0) as lease:
        assert lease.ttl == MAX_TTL
        assert [holder.key for holder in backend.redis.holders(key)] == [key]
    with pytest.raises(ValueError, match="MAX_TTL"):
        scene.lock(key, ttl=2 * MAX_TTL).acquire()


# What the checks say of the stores


def of_authority(scene: Scene) -> dict[str | None, str]:
    """The messages about the authority, by id."""
    messages = scene.backend.check_store()
    ours = ("distlocks.W013", "distlocks.E023")
    return {one.id: f"{one.msg} {one.hint}" for one in messages if one.id in ours}


def test_a_check_is_silent_while_redis_grants(fast: Scene, key: str) -> None:
    fast.hold(key)
    assert of_authority(fast) == {}


def test_a_check_tells_why_redis_does_not(fast: Scene, key: str) -> None:
    fast.hold(key)
    fast.backend.authority.drain("Redis is to be replaced.")
    row = fast.row
    (said,) = of_authority(fast).values()
    assert of_authority(fast).keys() == {"distlocks.W013"}
    assert f"Redis does not grant the locks of {FAST!r}: nobody grants until" in said
    assert f"(epoch {row.epoch}). Redis is to be replaced." in said
    assert "lock_authority" in said


def test_a_check_tells_that_redis_is_down(fast: Scene, key: str) -> None:
    fast.hold(key)
    fast.server.kill()
    before = fast.row
    assert "distlocks.E019" in {one.id for one in fast.backend.check_store()}
    # It only looks.
    assert fast.row == before


def test_a_check_tells_that_nobody_can_read_who_grants(cut_off: Scene, proxy: Any) -> None:
    proxy.mode = "reset"
    said = of_authority(cut_off)["distlocks.E023"]
    assert f"The lock backend {FAST!r} cannot read which store grants" in said
    assert "see to its database" in said
