"""Advisory locks on PostgreSQL: acquire and release, with nobody else there, beside a peer's."""

from benchmarks.environment import Environment
from benchmarks.rounds import Result
from benchmarks.uncontended import Cycle, compare, lock, pglock

PEER = "django-pglock, advisory()"


def run(env: Environment, quick: bool) -> list[Result]:
    rounds, cycles = (5, 100) if quick else (41, 400)
    contenders: dict[str, Cycle] = {
        "db_lock": lock("advisory"),
        'db_lock, on_session_end "free"': lock("advisory_free"),
        "db_lock, DatabaseBackend": lock("default"),
    }
    notes = [
        "A cycle of pglock.advisory() writes nothing. Ours writes one row, which keeps the token "
        "and tells who has the lock, and marks it when the lock is released; with on_session_end "
        '"free" it does not mark it. The server here does not wait for its disk.',
    ]
    targets = []
    if env.has["pglock"]:
        contenders[PEER] = pglock()
        targets.append((PEER, 1.1))
    else:
        notes.append("django-pglock is not installed.")
    title = "acquire and release of advisory locks"
    return [compare("advisory", title, contenders, rounds, cycles, targets, notes)]
