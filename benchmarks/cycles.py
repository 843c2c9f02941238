"""What the processes of several benchmarks do."""

import random

from benchmarks import statements
from distlocks import locks
from distlocks.claims import Grant


def hammer(keys: int, times: int, seed: int) -> int:
    """That many grants and releases by the backend's verbs, over random keys; tries in vain."""
    backend, choose = locks["default"], random.Random(seed)
    vain = 0
    for _ in range(times):
        while True:
            grant = backend.try_acquire(statements.request(f"key:{choose.randrange(keys)}"))
            if isinstance(grant, Grant):
                break
            vain += 1
        backend.release(grant)
    # So that the server tells what this session has done.
    backend.close()
    return vain
