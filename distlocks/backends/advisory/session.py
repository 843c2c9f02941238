"""One session with the server, whose locks are those of one lease; how it is asked and given up."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from ... import clock
from .sql import Raw

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from psycopg.pq.abc import PGconn, PGresult

# Seconds for which an answer is awaited: no statement here waits for a lock.
ANSWER_WITHIN = 5.0
# What a session is told once. A try is not to be cut short by a default of the role's. Nothing but
# its idleness is to end the session of a client that has left the network, which may believe in its
# lease until that: the system's own patience with TCP is longer. A row is found by its key, however
# small the table is.
SETTINGS = b"""
SELECT set_config('lock_timeout', '0', false),
       set_config('statement_timeout', '0', false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('tcp_keepalives_idle', '0', false), set_config('tcp_user_timeout', '0', false),
       set_config('enable_seqscan', 'off', false),
       set_config('plan_cache_mode', 'force_generic_plan', false),
       set_config('application_name',
                  coalesce(nullif(current_setting('application_name'), ''), 'distlocks'), false)
"""
# Where the server can look: it notices that a waiter's client is gone.
NOTICE_CLIENTS_END = b"SET client_connection_check_interval = '1s'"

Row = tuple[bytes | None, ...]
Param = str | int


class Broken(Exception):
    """The session is over, and its locks with it. `in_doubt`: it was asked something first."""

    def __init__(self, message: str, *, in_doubt: bool) -> None:
        super().__init__(message)
        self.in_doubt = in_doubt


class NoAnswer(Exception):
    """The server has not answered in time. The session has its locks yet, for all we know."""


class Refused(Exception):
    """The server refuses the statement."""

    def __init__(self, message: str, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class Session:
    """A connection of our own, never shared with the caller, through no pool of Django's: such a
    pool would hand out a connection that still has its locks.

    One statement at a time. Whoever is interrupted in the middle must close it. A forked child must
    neither ask nor close it: closing would end the parent's session.
    """

    def __init__(self, connect: Callable[[], BaseDatabaseWrapper]) -> None:
        """Open one. It is not to be used for locks before it is known to be ours: see set_up()."""
        self._wrapper = connect()
        # On an event loop's thread it is never called.
        self._wrapper.ensure_connection()
        assert self._wrapper.connection is not None
        self._conn: PGconn = self._wrapper.connection.pgconn
        self.fd: int = self._conn.socket
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._prepared: set[bytes] = set()
        # An answer is due that nobody has read yet.
        self._pending = False
        self.closed = False
        self.idle_since = clock.lease_now()
        try:
            self._send(lambda: self._conn.send_query(b"SELECT pg_backend_pid()"))
            ((pid,),) = self._answer(ANSWER_WITHIN)
            self.pid = int(pid or 0)
        except BaseException:
            self.close()
            raise

    def set_up(self, prepared: Sequence[Raw]) -> None:
        """Make it fit for locks, with these statements prepared; others are when first asked.

        What is set here stays with the server's session, and would be somebody else's behind a
        proxy that passes it on.
        """
        opening = b";".join([*[raw.prepare for raw in prepared], SETTINGS])
        self._send(lambda: self._conn.send_query(opening))
        self._answer(ANSWER_WITHIN)
        self._prepared.update(raw.name for raw in prepared)
        # Neither ours to know nor harmful: not every platform's server has it.
        with suppress(Refused):
            self._send(lambda: self._conn.send_query(NOTICE_CLIENTS_END))
            self._answer(ANSWER_WITHIN)

    @property
    def is_direct(self) -> bool:
        """Whether the server itself has told its process id when we connected: no proxy has."""
        return self._conn.backend_pid == self.pid

    @property
    def database(self) -> object:
        """Which database it is on: an alias comes to mean another one under a test runner."""
        return self._wrapper.settings_dict["NAME"]

    def ask(
        self, raw: Raw, params: Mapping[str, Param], within: float = ANSWER_WITHIN
    ) -> list[Row]:
        """The rows of one statement. Raises Broken, NoAnswer, Refused."""
        self.send(raw, params, within)
        return self._answer(within)

    def send(
        self,
        raw: Raw,
        params: Mapping[str, Param],
        within: float = ANSWER_WITHIN,
        *,
        prepare: bool = True,
    ) -> None:
        """Begin a statement, whose answer `collect` reads; `prepare` it the first time, which takes
        an answer of its own."""
        if self._pending:
            # Of a statement that was given up: what it says is too old to count.
            with suppress(Refused):
                self._answer(within)
        if self.closed or self._is_over():
            raise Broken("the session has ended", in_doubt=False)
        values = [str(params[name]).encode() for name in raw.names]
        if not prepare:
            self._send(lambda: self._conn.send_query_params(raw.text, values))
            return
        if raw.name not in self._prepared:
            self._send(lambda: self._conn.send_prepare(raw.name, raw.text))
            self._answer(within)
            self._prepared.add(raw.name)
        self._send(lambda: self._conn.send_query_prepared(raw.name, values))

    def collect(self, within: float) -> list[Row]:
        """The rows of the statement that was begun last. Raises as ask()."""
        if self.closed:
            raise Broken("the session has ended", in_doubt=True)
        return self._answer(within)

    def has_answer(self) -> bool:
        """Whether collect() will not have to wait, be it for a failure."""
        if self.closed:
            return True
        try:
            # What has been read from the wire already shows on it no more.
            if self._conn.is_busy() and self._poll.poll(0):
                self._conn.consume_input()
            return not self._conn.is_busy()
        except Exception:
            return True

    def cancel(self) -> None:
        """Ask the server to give up the statement under way. Its answer still has to be read."""
        with suppress(Exception):
            self._conn.get_cancel().cancel()

    def close(self) -> None:
        """End the session, and with it its locks."""
        self.closed = True
        with suppress(Exception):
            self._wrapper.close()

    def _is_over(self) -> bool:
        """Whether the server has ended the session while nothing was asked."""
        if not self._poll.poll(0):
            return False
        try:
            # It may be no more than a notice.
            self._conn.consume_input()
        except Exception:
            return True
        return self._conn.status != 0

    def _send(self, send: Callable[[], None]) -> None:
        try:
            send()
            self._pending = True
            self._flush()
        except Exception as error:
            self._broken(error)

    def _flush(self) -> None:
        give_up = clock.Clock().now() + ANSWER_WITHIN
        while self._conn.flush():
            if clock.Clock().now() > give_up:
                raise TimeoutError("what was asked could not be sent")
            ready = select.poll()
            ready.register(self.fd, select.POLLIN | select.POLLOUT)
            if any(event & select.POLLIN for _, event in ready.poll(100)):
                self._conn.consume_input()

    def _answer(self, within: float) -> list[Row]:
        # By the real clock, whatever a test makes of the lease clock.
        give_up = clock.Clock().now() + within
        conn = self._conn
        result: PGresult | None = None
        try:
            while True:
                while conn.is_busy():
                    rest = give_up - clock.Clock().now()
                    if not self._poll.poll(max(rest, 0.0) * 1000):
                        raise NoAnswer(f"the server has not answered for {within:g} s")
                    conn.consume_input()
                one = conn.get_result()
                if one is None:
                    break
                result = one if result is None or result.status in (1, 2) else result
        except NoAnswer:
            raise
        except Exception as error:
            self._broken(error)
        self._pending = False
        if result is None:
            self._broken("no answer")
        # Commands without rows, and rows.
        if result.status in (1, 2):
            columns = range(result.nfields)
            get = result.get_value
            return [tuple([get(row, c) for c in columns]) for row in range(result.ntuples)]
        sqlstate = (result.error_field(67) or b"").decode()
        message = result.error_message.decode(errors="replace").strip()
        if conn.status != 0:
            self._broken(message)
        raise Refused(message, sqlstate)

    def _broken(self, why: object) -> NoReturn:
        self.close()
        raise Broken(str(why), in_doubt=True) from (why if isinstance(why, Exception) else None)


def array(values: Sequence[Any]) -> str:
    """An array of texts or numbers as PostgreSQL reads it."""
    escaped = [str(value).replace("\\", "\\\\").replace('"', '\\"') for value in values]
    return "{" + ",".join(f'"{value}"' for value in escaped) + "}"
