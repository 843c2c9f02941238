"""Commands as a shell runs them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import load_command_class
from django.db import connections
from django.test import override_settings

from distlocks.conf import DEFAULT_BACKEND
from distlocks.history import waits as waits_module
from distlocks.models import LockRollup, LockWaiter
from distlocks.renewal import renewer
from tests.integration.commands.scene import ALIAS, MEMORY
from tests.servers.base import free_port

Run = Callable[..., int]


@pytest.fixture
def run(databases: None) -> Iterator[Run]:
    """`run("list_locks", "order:")`: its exit status. What it prints, pytest's capfd has."""

    def run(name: str, *words: str) -> int:
        try:
            load_command_class("distlocks", name).run_from_argv(["manage.py", name, *words])
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    yield run
    renewer.releases.settle()
    connections.close_all()


@pytest.fixture
def watched(databases: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One alias, whose locks are in memory and whose history is empty; it tells of every waiter."""
    monkeypatch.setattr(waits_module, "TELL_AFTER", 0.0)
    forget()
    with override_settings(DISTLOCKS={ALIAS: MEMORY, "default": MEMORY}):
        yield
    forget()


def forget() -> None:
    LockWaiter.objects.all().delete()
    LockRollup.objects.all().delete()


@pytest.fixture
def unreachable(databases: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The settings of an alias whose store does not answer."""
    server = {**connections["postgres"].settings_dict, "HOST": "127.0.0.1", "PORT": free_port()}
    monkeypatch.setitem(connections.databases, "nowhere", server)
    yield {"BACKEND": DEFAULT_BACKEND, "HISTORY_DAYS": 0, "OPTIONS": {"using": "nowhere"}}
    del connections["nowhere"]
