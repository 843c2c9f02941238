"""Claims that go together, asked for by many threads of one process at a moment."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from distlocks.keys import Key
from tests.integration.contract.stores import Store, for_stores

Start = Callable[..., Future[Any]]
CROWD = 40


@for_stores(["zookeeper"])
@pytest.mark.parametrize("kind", ["shared", "siblings"])
def test_all_of_them_get_what_they_ask_for(store: Store, key: str, start: Start, kind: str) -> None:
    """Each grant changes the version that the others go by."""

    def ask(number: int) -> Any:
        wanted: Key = key if kind == "shared" else (key, str(number))
        return store.lock(wanted, shared=kind == "shared", timeout=0).acquire()

    running = [start(ask, number) for number in range(CROWD)]
    for lease in [future.result(30) for future in running]:
        assert lease.release() is True
