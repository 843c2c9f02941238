"""How those who wait for a key in a table learn that it is free."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ... import clock
from ...claims import Denial, Request
from ...exceptions import BackendUnavailable
from ...waiting import poll_delay
from ..offload import offload
from ..wakeups import Wakeups
from .channels import Channel, OwnConnection, Session
from .dialect import Dialect

if TYPE_CHECKING:
    from ..redis.turns import Turns
    from .listener import Listener

# Seconds between two looks at a held key, at the longest: a look costs next to nothing on a
# database in a local file.
POLL_CAP_LOCAL = 0.025
POLL_CAP = 0.25
# Seconds after which who polls because Redis is lost asks for it again.
UNTOLD = 1.0


class Run(Protocol):
    """Runs a piece of work on a connection of the backend's."""

    def __call__(self, work: Callable[[Session], Any], /) -> Any: ...


class Sleepers:
    """Who sleeps in this process beside which key, and what wakes them.

    Where the database can announce a release, a sleeper leaves a mark in the row, and whoever
    frees a marked row announces it. Elsewhere, and while announcements do not arrive, sleepers
    look at the row now and then. In either case, a release in the same process wakes them at once.
    """

    def __init__(
        self,
        dialect: Dialect,
        run: Run,
        channel: Channel,
        *,
        listen: bool,
        turns: Turns | None = None,
    ) -> None:
        self._dialect = dialect
        self._run = run
        self._channel = channel
        self._listen = listen
        # Where a queue in Redis says whose turn it is.
        self._turns = turns
        self.wakeups = Wakeups()

    def __bool__(self) -> bool:
        return bool(self.wakeups)

    def sleep(self, denial: Denial, until: float, attempt: int) -> None:
        """Block until trying again makes sense, at the latest until `until` on the lease clock."""
        if self._turns is not None and denial.queued:
            if self._turns.wait(denial, until, lambda: self._still_denied(denial)):
                return
            # What others announce meanwhile, they may announce in Redis.
            until = min(until, clock.lease_now() + UNTOLD)
        with self.wakeups.ticket(denial.key) as ticket:
            while True:
                # Asked each time: announcements may have come to be heard.
                listener = self._hearing_listener()
                if listener is not None:
                    if self._mark(denial) and listener.hearing:
                        ticket.wait(until)
                    return
                if ticket.wait(min(until, clock.lease_now() + self._poll_delay(attempt))):
                    return
                attempt += 1
                if clock.lease_now() >= until or not self._still_denied(denial):
                    return

    async def asleep(self, denial: Denial, until: float, attempt: int) -> None:
        """See sleep()."""
        if self._turns is not None and denial.queued:
            if await self._turns.await_(denial, until, lambda: self._still_denied(denial)):
                return
            until = min(until, clock.lease_now() + UNTOLD)
        with self.wakeups.ticket(denial.key) as ticket:
            while True:
                listener = self._hearing_listener()
                if listener is not None:
                    if await offload(lambda: self._mark(denial)) and listener.hearing:
                        await ticket.wait_async(until)
                    return
                if await ticket.wait_async(
                    min(until, clock.lease_now() + self._poll_delay(attempt))
                ):
                    return
                attempt += 1
                if clock.lease_now() >= until:
                    return
                if not await offload(lambda: self._still_denied(denial)):
                    return

    def announce(self, session: Session, key: str) -> None:
        """Tell other processes that the key has been freed, by the database."""
        if self._turns is None:
            self._dialect.announce(session, key)

    def wake(self, key: str, by: str | None) -> None:
        """The key has been freed by this owner, or from one that is not known: wake who sleeps
        beside it in this process; where there is a queue, who comes first in all of them."""
        self.wakeups.wake(key)
        if self._turns is not None:
            self._turns.call(key, released_by=by)

    def denied(self, request: Request, denial: Denial) -> bool:
        """Take note of who is going to wait; whether there is a queue for it."""
        if self._turns is None:
            return False
        if request.waits and denial.can_wait:
            self._turns.denied(request, denial.key)
            return True
        self._turns.done(request, granted=False)
        return False

    def done(self, request: Request, *, granted: bool) -> None:
        """The request does not wait any more."""
        if self._turns is not None:
            self._turns.done(request, granted=granted)

    def close(self) -> None:
        """Stop listening, until somebody sleeps again."""
        if self._turns is not None:
            self._turns.close()
        if "_listener" in self.__dict__ and self._listener is not None:
            self._listener.close()

    def _mark(self, denial: Denial) -> bool:
        """Leave word in the row. False if it has changed, or is in another statement's hands: try
        again rather than sleep."""
        try:
            return bool(
                self._run(lambda session: self._dialect.mark(session, denial.key, denial.version))
            )
        except BackendUnavailable as error:
            if not self._dialect.is_busy(error.__cause__):
                raise
            return False

    def _still_denied(self, denial: Denial) -> bool:
        """False if it is better to try again than to look on."""
        if denial.version is None:
            return bool(self._run(lambda session: self._dialect.is_taken(session, denial.key)))
        # Whoever comes or goes changes it.
        several = self._dialect.several
        return bool(
            self._run(lambda session: several.version(session, denial.key)) == denial.version
        )

    def _poll_delay(self, attempt: int) -> float:
        return poll_delay(attempt, cap=POLL_CAP_LOCAL if self._dialect.one_writer else POLL_CAP)

    def _hearing_listener(self) -> Listener | None:
        """The listener, if announcements are known to arrive."""
        listener = self._listener
        if listener is None:
            return None
        listener.start()
        return listener if listener.hearing else None

    @cached_property
    def _listener(self) -> Listener | None:
        if not (self._listen and self._dialect.can_announce) or self._turns is not None:
            return None
        assert isinstance(self._channel, OwnConnection)
        from .listener import Listener

        return Listener(
            self._channel.open,
            lambda text: self._run(lambda session: self._dialect.announce(session, text)),
            self.wakeups,
        )
