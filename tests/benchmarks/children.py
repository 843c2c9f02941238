"""What the counted tests run beside themselves."""

import threading
from typing import Any

from django.core.management import call_command
from django.db import connections

from distlocks import db_lock, locks
from distlocks.claims import Claim, Grant, Request, to_us
from distlocks.identity import new_owner_id

ALIAS = "postgres"


def migrate() -> None:
    """Create the tables in a new database."""
    call_command("migrate", database=ALIAS, run_syncdb=True, verbosity=0)


def steps(*arguments: Any) -> None:
    """Do one step for each line "NAME ARGUMENT…" of the input, and say when it is done."""
    print("ready")  # noqa: T201
    while (line := input()) != "stop":
        name, *values = line.split()
        STEPS[name](*values)
        print("done")  # noqa: T201


def cycles(times: str, *keys: str) -> None:
    """Acquire and release."""
    for _ in range(int(times)):
        with db_lock(*keys, backend=ALIAS):
            pass


def denied(times: str, key: str) -> None:
    """Try in vain."""
    for _ in range(int(times)):
        assert db_lock(key, backend=ALIAS, timeout=0).try_acquire() is None


def hold(key: str) -> None:
    """Take it, and keep it until "let"."""
    held[key] = db_lock(key, backend=ALIAS).acquire()


def let(key: str) -> None:
    assert held.pop(key).release()


def wait_in_vain(key: str) -> None:
    """Wait for long enough to have begun to listen."""
    assert db_lock(key, backend=ALIAS, timeout=0.5).try_acquire() is None


def renew(leases: str, times: str) -> None:
    """Hold many leases until each has been extended that often."""
    backend = locks[ALIAS]
    extend, left = backend.extend, threading.Semaphore(0)

    def counted(extensions: Any) -> Any:
        answer = extend(extensions)
        left.release(len(answer.extended))
        return answer

    backend.extend = counted  # type: ignore[method-assign]
    taken = [db_lock(f"renewed:{n}", backend=ALIAS, ttl=2).acquire() for n in range(int(leases))]
    for _ in range(int(leases) * int(times)):
        assert left.acquire(timeout=30)
    assert all(lease.release() for lease in taken)


STEPS: dict[str, Any] = {
    function.__name__: function for function in (cycles, denied, hold, let, wait_in_vain, renew)
}
held: dict[str, Any] = {}


def hammer(alias: str, first: int, keys: int, times: int) -> None:
    """Acquire and release through the backend's verbs, one key after the other."""
    backend = locks[alias]
    for number in range(times):
        request = Request(
            claims=(Claim(f"{first + number % keys}"),), owner_id=new_owner_id(), ttl_us=to_us(30)
        )
        grant = backend.try_acquire(request)
        assert isinstance(grant, Grant)
        assert backend.release(grant)
    backend.close()
    connections.close_all()
