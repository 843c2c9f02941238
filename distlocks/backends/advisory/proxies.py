"""Is there a proxy between us and the server that passes sessions on between statements?"""

from __future__ import annotations

from collections.abc import Callable

from ...exceptions import NotSupported
from .session import ANSWER_WITHIN, Broken, Refused, Session
from .sql import Raw

# Turns in which two clients ask: any other answer than one session for each gives the proxy away.
TURNS = 3

PID = Raw("SELECT pg_backend_pid()")
BEGIN = Raw("BEGIN")
COMMIT = Raw("COMMIT")


def refuse_pooled(session: Session, connect: Callable[[], Session], alias: str) -> None:
    """Raise NotSupported if the session is not ours alone. Asks nothing where no proxy is.

    A proxy that pools transactions hands a server's session to whoever comes next: two clients that
    hold one open each in turn, and give them back, find theirs changed or in common, whether the
    proxy prefers the one used last or the one used first. Beside other clients' traffic it takes
    chance to be missed; then each statement of ours still does nothing in a session that is not
    the one whose lock it is about.
    """
    if session.is_direct:
        return
    other = connect()
    try:
        pids = {session.pid}, {other.pid}
        for turn in range(TURNS):
            order = (0, 1) if turn % 2 else (1, 0)
            pair = session, other
            for one in order:
                _ask(pair[one], BEGIN)
            for one in order:
                pids[one].add(_ask(pair[one], PID))
            for one in order:
                _ask(pair[one], COMMIT)
            for one in order:
                pids[one].add(_ask(pair[one], PID))
    except (Refused, Broken) as error:
        # Pooling of single statements allows no transaction.
        raise NotSupported(explain(alias)) from error
    finally:
        other.close()
    if len(pids[0]) > 1 or len(pids[1]) > 1 or pids[0] & pids[1]:
        raise NotSupported(explain(alias))


def _ask(session: Session, raw: Raw) -> int:
    # Not prepared: that would stay behind in the server's session.
    session.send(raw, {}, prepare=False)
    rows = session.collect(ANSWER_WITHIN)
    return int(rows[0][0] or 0) if rows else 0


def explain(alias: str) -> str:
    """What is wrong, and the way out."""
    return (
        f"The database {alias!r} is reached through a proxy that passes sessions on between "
        f"transactions (such as PgBouncer with pool_mode = transaction): a session's lock would "
        f"stay behind in a session that is somebody else's. Give the backend a `using` that "
        f"reaches the server directly, or by sessions (pool_mode = session); take the lock inside "
        f"atomic(); or use DatabaseBackend."
    )
