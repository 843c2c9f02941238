"""The examples of the README and the guides run as they stand."""

import ast
import re
import unittest
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import transaction
from django.test import SimpleTestCase

from distlocks import LeaseLost, db_lock
from distlocks.testing import memory_locks
from tests.testapp.models import Account

ROOT = Path(__file__).parents[2]


def examples(name: str) -> list[Any]:
    """The Python blocks of a page that are code to run, and not a piece of settings."""
    text = (ROOT / name).read_text()
    blocks = [match[1] for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]
    runnable = [block for block in blocks if "db_lock" in block]
    return [pytest.param(block, id=f"{name}-{at}") for at, block in enumerate(runnable)]


class _Executor:
    """Stands for the reader's own."""

    def submit(self, work: Any, *args: Any) -> None:
        work(*args)


async def _run(source: str) -> None:
    names: dict[str, Any] = {
        "db_lock": db_lock,
        "transaction": transaction,
        "Account": Account,
        **dict.fromkeys(("charge", "ship", "merge"), lambda thing: None),
        **dict.fromkeys(("call_partner", "report", "reload_prices"), lambda: None),
        "customer": None,
        "order": None,
        "rows": [1, 2],
        "pk": 1,
        "amount": 1,
        "executor": _Executor(),
        "consume": lambda lease: lease.release(),
    }
    # What stands beside an `async with` in an example stands elsewhere in a program.
    for statement in ast.parse(source).body:
        module = ast.Module([statement], [])
        if isinstance(statement, ast.AsyncWith):
            code = compile(module, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            await eval(code, names)
        else:
            await sync_to_async(exec)(compile(module, "example", "exec"), names)


@pytest.mark.django_db
@pytest.mark.parametrize("source", examples("README.md") + examples("docs/howto.md"))
def test_examples_run(source: str) -> None:
    Account.objects.create(pk=1, name="example", balance=10)
    if "class ImportTests" in source:
        names: dict[str, Any] = {
            "db_lock": db_lock,
            "LeaseLost": LeaseLost,
            "SimpleTestCase": SimpleTestCase,
        }
        exec(compile(source, "example", "exec"), names)
        tests = unittest.defaultTestLoader.loadTestsFromTestCase(names["ImportTests"])
        result = tests.run(unittest.TestResult())
        assert result.testsRun == 1
        assert not result.failures
        assert not result.errors
        return
    with memory_locks():
        async_to_sync(_run)(source)
