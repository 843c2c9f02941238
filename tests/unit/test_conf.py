"""DISTLOCKS: what it may say, and what is said about every mistake."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core.checks import Error
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from distlocks import conf, db_lock, locks
from distlocks.backends.database import DatabaseBackend
from distlocks.backends.memory import MemoryBackend
from distlocks.checks import check_settings
from distlocks.conf import InvalidSetting, Params, seconds

MEMORY = "distlocks.backends.memory.MemoryBackend"
DATABASE = "distlocks.backends.database.DatabaseBackend"


class Unbuildable(MemoryBackend):
    def __init__(self, alias: str, params: Params) -> None:
        raise ImproperlyConfigured("This store needs a licence.")


def entry(**changes: Any) -> dict[str, Any]:
    """DISTLOCKS with a default that is wrong in one point."""
    return {"default": {"BACKEND": MEMORY} | changes}


def options(**changes: Any) -> dict[str, Any]:
    return {"default": {"BACKEND": DATABASE, "OPTIONS": changes}}


# What is wrong: the number, the setting, and words that the message must have.
WRONG = [
    # The whole
    (1, "DISTLOCKS", ["default"], "must be a dict of aliases, not list"),
    (1, "DISTLOCKS", "default", "must be a dict of aliases, not str"),
    (1, "DISTLOCKS", {"default": {"BACKEND": MEMORY}, 7: {}}, "alias 7"),
    (1, "DISTLOCKS", {"default": {"BACKEND": MEMORY}, "": {}}, "alias ''"),
    (1, "DISTLOCKS", {"default": MEMORY}, "DISTLOCKS['default'] must be a dict"),
    (1, "DISTLOCKS", {"default": None}, "DISTLOCKS['default'] must be a dict"),
    (2, "default", {}, "has no 'default' alias"),
    (2, "default", {"other": {"BACKEND": MEMORY}}, "has no 'default' alias"),
    (3, "unknown", entry(TTl=30), "unknown parameter 'TTl'"),
    (3, "unknown", entry(LOCATION="x"), "unknown parameter 'LOCATION'"),
    # BACKEND
    (4, "BACKEND", entry(BACKEND="memory"), "must be the dotted path"),
    (4, "BACKEND", entry(BACKEND=None), "must be the dotted path"),
    (4, "BACKEND", entry(BACKEND=MemoryBackend), "must be the dotted path"),
    (4, "BACKEND", entry(BACKEND="no.such.Backend"), "'no.such.Backend' cannot be imported"),
    (4, "BACKEND", entry(BACKEND="distlocks.backends.memory.Redis"), "cannot be imported"),
    (4, "BACKEND", entry(BACKEND=".MemoryBackend"), "'.MemoryBackend'"),
    (4, "BACKEND", entry(BACKEND="distlocks.db_lock"), "is not a lock backend"),
    (4, "BACKEND", entry(BACKEND="distlocks.conf.params"), "is not a lock backend"),
    # TTL and MAX_TTL
    (5, "TTL", entry(TTL=0), "['TTL'] is 0 s"),
    (5, "TTL", entry(TTL=0.999), "['TTL'] is 0.999 s"),
    (5, "TTL", entry(TTL=-5), "['TTL'] is -5 s"),
    (5, "TTL", entry(TTL=timedelta(days=367)), "['TTL'] is 3.17"),
    (5, "TTL", entry(TTL="30"), "['TTL'] must be a number of seconds or a timedelta, not str"),
    (5, "TTL", entry(TTL=True), "['TTL'] must be a number of seconds or a timedelta, not bool"),
    (5, "TTL", entry(TTL=None), "['TTL'] must be a number of seconds or a timedelta, not None"),
    (5, "TTL", entry(TTL=float("nan")), "['TTL'] must be finite"),
    (5, "TTL", entry(TTL=float("inf")), "['TTL'] must be finite"),
    (6, "MAX_TTL", entry(MAX_TTL=0.5), "['MAX_TTL'] is 0.5 s"),
    (6, "MAX_TTL", entry(MAX_TTL="1h"), "['MAX_TTL'] must be a number of seconds"),
    (6, "MAX_TTL", entry(TTL=60, MAX_TTL=30), "['TTL'] (60 s) is longer than its MAX_TTL (30 s)"),
    (6, "MAX_TTL", entry(MAX_TTL=10), "['TTL'] (30 s) is longer than its MAX_TTL (10 s)"),
    # TIMEOUT
    (7, "TIMEOUT", entry(TIMEOUT=-1), "['TIMEOUT'] is -1 s"),
    (7, "TIMEOUT", entry(TIMEOUT="0"), "['TIMEOUT'] must be a number of seconds"),
    (7, "TIMEOUT", entry(TIMEOUT=float("inf")), "['TIMEOUT'] must be finite"),
    # KEY_PREFIX
    (8, "KEY_PREFIX", entry(KEY_PREFIX=b"app:"), "['KEY_PREFIX'] must be a str"),
    (8, "KEY_PREFIX", entry(KEY_PREFIX=None), "['KEY_PREFIX'] must be a str"),
    (8, "KEY_PREFIX", entry(KEY_PREFIX="x" * 51), "['KEY_PREFIX'] has 51 characters"),
    (8, "KEY_PREFIX", entry(KEY_PREFIX="app\n"), "the control character U+000A at position 3"),
    # OPTIONS
    (9, "OPTIONS", entry(OPTIONS=["using"]), "['OPTIONS'] must be a dict"),
    (9, "OPTIONS", entry(OPTIONS=None), "['OPTIONS'] must be a dict"),
    (10, "OPTIONS", entry(OPTIONS={"using": "default"}), "unknown option 'using'"),
    (10, "OPTIONS", options(database="default"), "unknown option 'database'"),
    (11, "using", options(using="replica"), "'replica' is not a database of DATABASES"),
    (11, "using", options(using=None), "None is not a database of DATABASES"),
    (11, "using", options(using=["default"]), "['default'] is not a database of DATABASES"),
    (12, "dialect", options(dialect="postgresql"), "'postgresql' is not a dialect"),
    (13, "listen", options(listen="no"), "must be True or False, not 'no'"),
    (13, "listen", options(listen=None), "must be True or False, not None"),
    # GUARD_DATABASES
    (17, "GUARD", entry(GUARD_DATABASES="default"), "['GUARD_DATABASES'] must be a list"),
    (17, "GUARD", entry(GUARD_DATABASES=None), "['GUARD_DATABASES'] must be a list"),
    (17, "GUARD", entry(GUARD_DATABASES=["default", "nowhere"]), "names 'nowhere', which is not"),
    (17, "GUARD", entry(GUARD_DATABASES=[["default"]]), "names ['default'], which is not"),
    # What only a backend can find
    (0, "backend", entry(BACKEND=f"{__name__}.Unbuildable"), "This store needs a licence."),
]
CASES = pytest.mark.parametrize(
    ("number", "value", "words"),
    [pytest.param(n, value, words, id=f"{n:03d}-{words[:40]}") for n, _, value, words in WRONG],
)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Backends of the project's own settings come back after each test."""
    yield
    locks.close_all()


@CASES
def test_a_system_check_reports_each_wrong_setting_by_number(
    number: int, value: object, words: str
) -> None:
    with override_settings(DISTLOCKS=value):
        (message,) = check_settings()
    assert isinstance(message, Error)
    assert message.id == f"distlocks.E{number:03d}"
    assert words in message.msg
    # Only a foreign backend's own words come without a way out.
    assert bool(message.hint) == (number != 0)


@CASES
def test_using_a_wrong_setting_raises_the_same_words(
    number: int, value: object, words: str
) -> None:
    aliases = [*(value if isinstance(value, dict) else ()), "default"]
    with override_settings(DISTLOCKS=value), pytest.raises(ImproperlyConfigured) as caught:
        [locks[alias] for alias in aliases]
    if number == 2:
        assert "There is no lock backend 'default' in DISTLOCKS" in str(caught.value)
    else:
        assert words in str(caught.value)
    if number:
        assert isinstance(caught.value, InvalidSetting)
        assert caught.value.check_id == f"distlocks.E{number:03d}"


def test_each_number_stands_for_one_setting() -> None:
    settings_of = defaultdict(set)
    for number, setting, _, _ in WRONG:
        settings_of[number].add(setting)
    assert {n: s for n, s in settings_of.items() if len(s) > 1} == {}
    # None is left out of what can be told from settings alone; those between need a database.
    assert sorted(settings_of) == [*range(14), 17]


def test_all_mistakes_are_reported_at_once() -> None:
    wrong = {
        "default": {"BACKEND": "memory", "TTL": "x", "TIMEOUT": -1, "KEY_PREFIX": 7, "SIZE": 1},
        "other": {"OPTIONS": 1},
    }
    with override_settings(DISTLOCKS=wrong):
        found = sorted(str(message.id)[-1] for message in check_settings())
    assert found == ["3", "4", "5", "7", "8", "9"]


def test_a_backend_that_cannot_be_built_hides_no_other_ones_mistake() -> None:
    wrong = {
        "default": {"BACKEND": "no.such.Backend"},
        "second": {"BACKEND": DATABASE, "OPTIONS": {"using": "replica"}},
        "third": {"BACKEND": f"{__name__}.Unbuildable"},
    }
    with override_settings(DISTLOCKS=wrong):
        found = [message.id for message in check_settings()]
    assert found == ["distlocks.E004", "distlocks.E011", "distlocks.E000"]


def test_an_unknown_alias_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        db_lock("a", backend="absent").acquire()
    assert "There is no lock backend 'absent' in DISTLOCKS" in str(caught.value)
    for alias in settings.DISTLOCKS:
        assert repr(alias) in str(caught.value)


def test_a_wrong_alias_does_not_disturb_the_others() -> None:
    with override_settings(DISTLOCKS=entry() | {"broken": {"BACKEND": "no.such.Backend"}}):
        with db_lock("a"):
            pass
        with pytest.raises(ImproperlyConfigured, match=r"no\.such\.Backend"):
            db_lock("a", backend="broken").acquire()


@override_settings()
def test_without_the_setting_locks_live_in_the_default_database() -> None:
    del settings.DISTLOCKS
    assert list(locks) == ["default"]
    backend = locks["default"]
    assert isinstance(backend, DatabaseBackend)
    assert backend.using == "default"
    assert (backend.params.ttl, backend.params.max_ttl, backend.params.timeout) == (30, 30, 10)
    assert not [message for message in check_settings() if isinstance(message, Error)]


def test_every_parameter_reaches_the_backend() -> None:
    full = entry(
        TTL=timedelta(minutes=2), MAX_TTL=600, TIMEOUT=None, KEY_PREFIX="shop é:", OPTIONS={}
    )
    with override_settings(DISTLOCKS=full):
        params = conf.params("default")
        assert check_settings() == []
        assert isinstance(locks["default"], MemoryBackend)
        assert locks["default"].prefix == "shop é:"
    assert params.backend == MEMORY
    assert (params.ttl, params.max_ttl, params.timeout) == (120.0, 600.0, None)
    assert (params.key_prefix, params.options) == ("shop é:", {})


@pytest.mark.parametrize("ttl", [1, 1.0, timedelta(seconds=1), 366 * 86400])
def test_the_shortest_and_the_longest_lease_are_allowed(ttl: object) -> None:
    with override_settings(DISTLOCKS=entry(TTL=ttl)):
        assert check_settings() == []
        # Unless said otherwise, no lease is longer than the usual one.
        assert locks["default"].params.max_ttl == locks["default"].params.ttl


@override_settings()
def test_locks_in_memory_need_no_database_at_all() -> None:
    """What nobody has written down is no mistake."""
    settings.DATABASES = {}
    with override_settings(DISTLOCKS=entry()):
        assert check_settings() == []
        with db_lock("a"):
            pass


def test_the_settings_are_read_when_they_are_used() -> None:
    lock = db_lock("a")
    with override_settings(DISTLOCKS=entry(TTL=7)), lock as lease:
        assert lease.ttl == 7
    with override_settings(DISTLOCKS=entry(TTL=8)), lock as lease:
        assert lease.ttl == 8


def test_settings_are_never_changed_in_place() -> None:
    value = entry(TTL=7, OPTIONS={})
    with override_settings(DISTLOCKS=value):
        with db_lock("a"):
            pass
        check_settings()
    assert value == {"default": {"BACKEND": MEMORY, "TTL": 7, "OPTIONS": {}}}


def test_a_change_of_settings_brings_new_backends() -> None:
    before = locks["memory"]
    with override_settings(DISTLOCKS=entry()):
        assert locks["default"] is locks["default"]
        assert isinstance(locks["default"], MemoryBackend)
        assert [backend.alias for backend in locks.all()] == ["default"]
    assert locks["memory"] is not before


def test_only_backends_in_use_are_listed_on_request() -> None:
    with override_settings(DISTLOCKS=entry() | {"unused": {"BACKEND": "no.such.Backend"}}):
        assert locks.all(initialized_only=True) == []
        assert locks.all(initialized_only=True) == []
        used = locks["default"]
        assert locks.all(initialized_only=True) == [used]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3.0), (0.25, 0.25), (timedelta(minutes=1, milliseconds=5), 60.005), (-1, -1.0)],
)
def test_durations_are_seconds_or_timedeltas(value: object, expected: float) -> None:
    assert seconds(value, "ttl") == expected
    assert isinstance(seconds(value, "ttl"), float)


@pytest.mark.parametrize("value", ["3", None, True, False, b"3", [3], 3j])
def test_what_is_no_duration_is_refused_by_name_and_type(value: object) -> None:
    with pytest.raises(TypeError, match=f"max_hold must be .* not {type(value).__name__}"):
        seconds(value, "max_hold")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_duration_is_finite(value: float) -> None:
    with pytest.raises(ValueError, match="max_hold must be finite"):
        seconds(value, "max_hold")
