"""A lock that is broken on purpose, and workers who trust it.

Its state is in a file that processes share, and is honest in two things: tokens grow, and what is
counted is counted.
"""

import fcntl
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from django.db import DatabaseError, InterfaceError, connections
from django.test import override_settings

from distlocks import DistlocksError, LockTimeout, StaleToken, db_lock
from distlocks.backends.memory import MemoryBackend
from distlocks.claims import Denial, Extended, Grant, Request
from tests.integration.guard.sites import Site

BACKEND = "broken"


class Shared:
    """The state, one process at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.touch()

    @contextmanager
    def open(self) -> Iterator[dict[str, Any]]:
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = {"token": 0, "busy": {}, "grants": 0, "seconds": 0, "stale": 0, "stop": False}
            state |= json.loads(file.read() or "{}")
            yield state
            file.seek(0)
            file.truncate()
            file.write(json.dumps(state))

    def read(self) -> dict[str, Any]:
        with self.open() as state:
            return dict(state)


class BrokenBackend(MemoryBackend):
    """Lets a second holder in, half of the time that it should not."""

    option_names: ClassVar[tuple[str, ...]] = ("path",)

    def try_acquire(self, request: Request) -> Grant | Denial:
        (key,) = request.keys
        with Shared(self.options["path"]).open() as state:
            if state["busy"].get(key):
                if random.random() < 0.5:
                    return Denial(key=key)
                state["seconds"] += 1
            state["token"] = max(state["token"] + 1, time.time_ns() // 1000)
            state["busy"][key] = True
            state["grants"] += 1
            return Grant(
                claims=request.claims,
                owner_id=request.owner_id,
                fencing_tokens=(state["token"],),
                acquired_us=state["token"],
            )

    def release(self, grant: Grant) -> bool:
        with Shared(self.options["path"]).open() as state:
            state["busy"][grant.keys[0]] = False
        return True

    def extend(self, extensions: Any) -> Extended:
        """It even confirms, to whoever asks."""
        owners = frozenset(extension.grant.owner_id for extension in extensions)
        return Extended(extended=owners, lost=frozenset())


def broken_lock(path: str | Path) -> override_settings:
    return override_settings(
        DISTLOCKS={
            "default": {"BACKEND": "distlocks.backends.memory.MemoryBackend"},
            BACKEND: {
                "BACKEND": f"{__name__}.BrokenBackend",
                "OPTIONS": {"path": str(path)},
                "TTL": 1,
            },
        }
    )


def pause(likely: float, longest: float) -> None:
    if random.random() < likely:
        time.sleep(random.random() * longest)


def work(using: str, path: str, keys: list[str], seed: int) -> dict[str, dict[str, int]]:
    """Guarded read-modify-write of the accounts, until told to stop: how many deposits were
    acknowledged, and of how many nobody knows.
    """
    random.seed(seed)
    site, shared = Site(using, BACKEND), Shared(path)
    acknowledged, in_doubt = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
    with broken_lock(path):
        print("ready", flush=True)  # noqa: T201
        while not shared.read()["stop"]:
            key = random.choice(keys)
            committing = False
            try:
                with db_lock(key, backend=BACKEND, timeout=0) as lease:
                    pause(0.3, 0.03)
                    with lease.atomic(using):
                        balance = site.balance(key)
                        pause(0.3, 0.02)
                        site.set_balance(key, balance + 1)
                        pause(0.1, 0.02)
                        committing = True
                    acknowledged[key] += 1
                    committing = False
            except LockTimeout:
                pause(1, 0.002)
            except StaleToken:
                with shared.open() as state:
                    state["stale"] += 1
            except (DistlocksError, DatabaseError, InterfaceError):
                in_doubt[key] += committing
                connections[using].close()
    return {"acknowledged": acknowledged, "in doubt": in_doubt}


def soak_seconds() -> float:
    return float(os.environ.get("DISTLOCKS_SOAK_SECONDS", "300"))
