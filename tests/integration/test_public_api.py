"""What users may rely on. A failure here is a change for them, and belongs into the changelog."""

import inspect
import re
import tomllib
from typing import Any

import pytest

import distlocks
import distlocks.testing
from distlocks import Holder, middleware, signals
from distlocks.backends.base import BaseBackend
from distlocks.context import working_for
from distlocks.http import Refusal, answer, answers_lock_errors
from distlocks.http_settings import NAMES
from tests.servers.watchdog import ROOT


def parameters(function: Any) -> list[str]:
    """As they are written, without types."""
    return [
        str(p.replace(annotation=inspect.Parameter.empty))
        + (" (keyword)" if p.kind is p.KEYWORD_ONLY else "")
        for p in inspect.signature(function).parameters.values()
    ]


def public(thing: object) -> list[str]:
    return sorted(name for name in dir(thing) if not name.startswith("_"))


def test_the_package() -> None:
    assert sorted(distlocks.__all__) == [
        "BackendUnavailable",
        "DistlocksError",
        "Holder",
        "Lease",
        "LeaseLost",
        "LockTimeout",
        "NotSupported",
        "StaleToken",
        "db_lock",
        "force_release",
        "locks",
    ]
    for name in distlocks.__all__:
        assert hasattr(distlocks, name)


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    assert distlocks.__version__ == project["version"]


def test_the_lock() -> None:
    assert parameters(distlocks.db_lock) == [
        "*keys",
        "shared=False (keyword)",
        "limit=None (keyword)",
        "ttl=<from settings> (keyword)",
        "timeout=<from settings> (keyword)",
        "renew=True (keyword)",
        "max_hold=None (keyword)",
        "min_hold=0 (keyword)",
        "on_held='raise' (keyword)",
        "on_lost=None (keyword)",
        "until_commit=True (keyword)",
        "label='' (keyword)",
        "metadata=None (keyword)",
        "backend='default' (keyword)",
    ]
    assert public(distlocks.db_lock) == ["aacquire", "acquire", "atry_acquire", "try_acquire"]


def test_the_lease() -> None:
    assert set(public(distlocks.Lease)) >= {
        "acquired_at",
        "aextend",
        "arelease",
        "backend",
        "check",
        "deadline",
        "extend",
        "fencing_token",
        "fencing_tokens",
        "keys",
        "label",
        "lost",
        "mode",
        "owner_id",
        "release",
        "remaining",
        "ttl",
        "waited",
    }
    assert parameters(distlocks.Lease.extend) == parameters(distlocks.Lease.aextend)
    assert parameters(distlocks.Lease.extend) == ["self", "ttl=None"]
    assert parameters(distlocks.Lease.release) == ["self"]


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        ("DistlocksError", {"keys"}),
        ("LockTimeout", {"keys", "holders"}),
        ("LeaseLost", {"keys"}),
        ("BackendUnavailable", {"keys"}),
        ("NotSupported", {"keys"}),
    ],
)
def test_the_errors(error: str, attributes: set[str]) -> None:
    assert {*vars(getattr(distlocks, error)("x"))} == attributes


def test_the_holder() -> None:
    assert [*Holder.__dataclass_fields__] == [
        "key",
        "owner_id",
        "fencing_token",
        "since",
        "remaining",
        "mode",
        "host",
        "pid",
        "thread",
        "label",
        "metadata",
        "activity",
    ]


def test_the_signals() -> None:
    found = [name for name in public(signals) if not name.startswith("Signal")]
    assert {"lease_lost", "lock_acquired", "lock_denied", "lock_released", "locks_expired"} <= {
        *found
    }


def test_the_backends() -> None:
    for name in ("DatabaseBackend", "MemoryBackend"):
        module = "database" if name == "DatabaseBackend" else "memory"
        backend = getattr(__import__(f"distlocks.backends.{module}", fromlist=[name]), name)
        assert issubclass(backend, BaseBackend)
    assert set(public(BaseBackend)) >= {
        "abandon",
        "check",
        "check_store",
        "close",
        "extend",
        "force_release",
        "holders",
        "release",
        "supports_sweep",
        "supports_wakeups",
        "sweep",
        "try_acquire",
        "wait",
    }


def test_the_handler() -> None:
    assert public(distlocks.locks) == ["all", "close_all"]


def test_the_tools_for_tests() -> None:
    assert sorted(distlocks.testing.__all__) == [
        "FakeClock",
        "fake_clock",
        "flush_events",
        "flush_history",
        "forget_history",
        "memory_locks",
    ]


def test_what_answers_requests() -> None:
    assert parameters(answers_lock_errors) == [
        "view=None",
        "status=None (keyword)",
        "retry_after=None (keyword)",
        "unavailable=None (keyword)",
    ]
    assert parameters(answer) == ["request", "error", "wanted=None"]
    assert [*Refusal.__dataclass_fields__] == [
        "error",
        "status",
        "retry_after",
        "title",
        "detail",
        "reason",
        "keys",
        "holders",
    ]
    assert [*NAMES] == ["STATUS", "RETRY_AFTER", "MAX_RETRY_AFTER", "UNAVAILABLE"]
    assert middleware.LockErrorsMiddleware.process_exception
    assert parameters(middleware.WorkingForMiddleware.about) == ["self", "request"]


def test_what_code_works_for() -> None:
    assert parameters(working_for) == ["**about"]


def test_all_that_is_public_says_what_it_is() -> None:
    things: dict[str, Any] = {
        name: getattr(module, name)
        for module in (distlocks, distlocks.testing)
        for name in module.__all__
    }
    for thing in (distlocks.db_lock, distlocks.Lease, BaseBackend, Holder):
        for name, member in inspect.getmembers(thing, inspect.isfunction):
            if not name.startswith("_"):
                things[f"{thing.__name__}.{name}"] = member
    silent = [name for name, thing in things.items() if not inspect.getdoc(thing)]
    assert silent == []


def test_the_twins_point_at_each_other() -> None:
    for thing in (distlocks.db_lock, distlocks.Lease, BaseBackend):
        for name, member in inspect.getmembers(thing, inspect.iscoroutinefunction):
            if name.startswith("_"):
                continue
            twin = getattr(thing, name.removeprefix("a") if name[0] == "a" else name, None)
            twin = twin or getattr(thing, name.rstrip("_").removeprefix("a"))
            assert re.match(rf"See {twin.__name__}\(\)", inspect.getdoc(member) or ""), name


def test_it_is_typed() -> None:
    assert ROOT.joinpath("distlocks", "py.typed").exists()
