"""Commands as a shell runs them."""

from collections.abc import Callable, Iterator

import pytest
from django.core.management import load_command_class
from django.db import connections

from distlocks.renewal import renewer

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
    renewer.settle_releases()
    connections.close_all()
