"""Which sessions have come to their end, or have had their turn: one thread looks at all."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ... import logs
from .session import Session

# The other side has closed. Where the platform cannot tell, an end shows when next extended.
ENDED = getattr(select, "POLLRDHUP", 0)
OVER = ENDED | select.POLLHUP | select.POLLERR | select.POLLNVAL

# Seconds until somebody is asked again who has a session in their hands that has ended.
BUSY = 0.05


class Watch:
    """Calls `ended(session)` and `answered(session)` from a thread of its own, once for each.

    Where `ended` returns False, somebody else has the session in their hands: it is called again.
    """

    def __init__(
        self, ended: Callable[[Session], bool], answered: Callable[[Session], None]
    ) -> None:
        self._ended = ended
        self._answered = answered
        self._mutex = threading.Lock()
        self._sessions: dict[int, Session] = {}
        self._awaited: set[int] = set()
        self._thread: threading.Thread | None = None
        self._reader = self._writer = -1

    def add(self, session: Session) -> None:
        """Look at it until it is removed or has ended."""
        with self._mutex:
            self._sessions[session.fd] = session
            self._look_again()

    def expect(self, session: Session) -> None:
        """Tell when it has an answer, too."""
        with self._mutex:
            if self._sessions.get(session.fd) is session:
                self._awaited.add(session.fd)
                self._look_again()

    def remove(self, session: Session) -> None:
        """Before it is closed: its number is another's then."""
        with self._mutex:
            if self._sessions.get(session.fd) is session:
                del self._sessions[session.fd]
                self._awaited.discard(session.fd)

    def _look_again(self) -> None:
        if self._thread is None:
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._reader, False)
            self._thread = threading.Thread(
                target=self._run, args=(self._reader,), name="distlocks-sessions", daemon=True
            )
            self._thread.start()
        else:
            os.write(self._writer, b"x")

    def _run(self, reader: int) -> None:
        while True:
            poll = select.poll()
            poll.register(reader, select.POLLIN)
            with self._mutex:
                if not self._sessions:
                    # The next session starts another.
                    self._thread = None
                    os.close(self._reader)
                    os.close(self._writer)
                    return
                for fd in self._sessions:
                    poll.register(fd, ENDED | (select.POLLIN if fd in self._awaited else 0))
            # Closing does not wake us: a session that was removed meanwhile is not looked for.
            is_busy = False
            for fd, event in poll.poll(5000):
                if fd == reader:
                    with suppress(BlockingIOError):
                        os.read(reader, 4096)
                    continue
                is_busy |= not self._tell(fd, event)
            if is_busy:
                time.sleep(BUSY)

    def _tell(self, fd: int, event: int) -> bool:
        """Whether it could be told, if there was anything to tell."""
        with self._mutex:
            session = self._sessions.get(fd)
            if session is None:
                return True
            # What was seen may have been of another session, whose number is this one's now.
            over = event & OVER and _is_over(fd)
            if not over and fd not in self._awaited:
                return True
            self._awaited.discard(fd)
        try:
            if not over:
                self._answered(session)
            elif not self._ended(session):
                return False
        except Exception as error:
            logs.event(
                logging.ERROR,
                "session_fault",
                "",
                (),
                "What has become of a lock's session could not be noted",
                exc_info=error,
            )
        if over:
            with self._mutex:
                # The number of one that was closed may be another's by now.
                if self._sessions.get(fd) is session:
                    del self._sessions[fd]
        return True


def _is_over(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, ENDED)
    return any(event & OVER for _, event in poll.poll(0))
