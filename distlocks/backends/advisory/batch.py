"""One batch of extensions: each lease by its own session, all at once."""

from __future__ import annotations

from collections.abc import Sequence

from ... import clock
from ...claims import MICROSECOND, Extension
from .pool import Hold, Pool
from .session import ANSWER_WITHIN, Broken, NoAnswer, Refused
from .wire import Wire


class Batch:
    """What becomes of the extensions. Who is in neither set was busy: held, to be asked again."""

    def __init__(self, pool: Pool, wire: Wire) -> None:
        self._pool = pool
        self._wire = wire
        self.extended: set[Hold] = set()
        self.lost: set[Hold] = set()

    def extend(self, held: Sequence[tuple[Hold, Extension]]) -> None:
        """Ask all before the first answer is read: one session that hangs delays no other."""
        # Answers that come later find the leases lost.
        shortest = min((one.ttl_us for _, one in held), default=0) / MICROSECOND
        self._give_up = clock.Clock().now() + min(ANSWER_WITHIN, shortest / 3)
        begun: list[tuple[Hold, Extension]] = []
        try:
            for hold, extension in held:
                if not hold.mutex.acquire(timeout=self._rest()):
                    continue
                begun.append((hold, extension))
                if not self._begin(hold, extension):
                    begun.pop()
                    hold.mutex.release()
            while begun:
                self._end(*begun[0])
                # Whoever else wants it need not wait for the others.
                begun.pop(0)[0].mutex.release()
        finally:
            for hold, _ in begun:
                hold.mutex.release()

    def _rest(self) -> float:
        return max(self._give_up - clock.Clock().now(), 0.0)

    def _begin(self, hold: Hold, extension: Extension) -> bool:
        """Whether an answer is to be expected."""
        if self._pool.hold_of(hold.owner_id) is not hold:
            # Released, or found lost, meanwhile.
            self.lost.add(hold)
            return False
        try:
            self._wire.begin_extension(hold, extension)
        except NoAnswer:
            return False
        except (Broken, Refused):
            self._lose(hold)
            return False
        return True

    def _end(self, hold: Hold, extension: Extension) -> None:
        try:
            if self._wire.end_extension(hold, extension, self._rest()):
                self.extended.add(hold)
            else:
                self._lose(hold)
        except NoAnswer:
            return
        except (Broken, Refused):
            self._lose(hold)

    def _lose(self, hold: Hold) -> None:
        self.lost.add(hold)
        self._pool.end(hold, clean=False)
