"""What the renewer can keep, and what it can give back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .backends.base import BaseBackend
from .claims import MICROSECOND, Extension, Request

if TYPE_CHECKING:
    # Protocols are slow to create, and nobody asks for them at run time.

    class Releasable(Protocol):
        """What has to be known of something that is to be given back."""

        @property
        def backend(self) -> BaseBackend: ...
        @property
        def owner_id(self) -> str: ...
        @property
        def ttl(self) -> float: ...
        @property
        def deadline(self) -> float: ...

        def give_back(self) -> None:
            """Release it at the store. Raises BackendUnavailable."""

    class Renewable(Releasable, Protocol):
        """What the renewer has to know of a lease."""

        @property
        def over(self) -> bool:
            """Whether it has been released or lost: nothing more to be done."""

        @property
        def renewing(self) -> bool:
            """Whether it is to be extended, now that a renewal would be due."""

        def next_extension(self) -> tuple[Extension, float]:
            """What to ask of the store, and the ttl in seconds."""

        def extended(self, first_send: float, ttl: float) -> bool:
            """The store has granted the extension; False if that came too late."""

        def run_out(self, reason: str) -> None:
            """The lease ends at its deadline."""

        def lose(self, reason: str) -> None:
            """The lease is lost."""


@dataclass(frozen=True, slots=True, eq=False)
class Abandoned:
    """A request of which nobody knows whether it was granted."""

    backend: BaseBackend
    request: Request
    deadline: float
    # A server may still be carrying out the request while its connection is gone; its wait for a
    # row is bounded, so what it grants shows at a second look.
    looks: int = 2

    @property
    def owner_id(self) -> str:
        return self.request.owner_id

    @property
    def ttl(self) -> float:
        return self.request.ttl_us / MICROSECOND

    def give_back(self) -> None:
        self.backend.abandon(self.request)
