"""What can go wrong. All are picklable and have one base class.

Wrong settings are Django's ImproperlyConfigured; wrong arguments are TypeError and ValueError.
"""

from __future__ import annotations

from typing import Any

from .claims import Holder
from .keys import Key


class DistlocksError(Exception):
    """Something went wrong with a distributed lock."""

    def __init__(self, message: str | None = None, *, keys: tuple[Key, ...] = ()) -> None:
        super().__init__(message or type(self).__doc__)
        # The keys of the request or lease concerned, as the caller wrote them.
        self.keys = keys

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own pickling drops keyword arguments.
        return (_rebuild, (type(self), self.args, self.__dict__))


class LockTimeout(DistlocksError, TimeoutError):
    """The lock could not be had within the time allowed."""

    def __init__(
        self,
        message: str | None = None,
        *,
        keys: tuple[Key, ...] = (),
        holders: tuple[Holder, ...] = (),
    ) -> None:
        super().__init__(message, keys=keys)
        # Who had the key in the way at the last try; empty when the store could not tell.
        self.holders = holders


class LeaseLost(DistlocksError):
    """The lease ended before the work did: another holder may have begun."""


class StaleToken(DistlocksError):
    """A later holder's fencing token has been here: nothing was done."""


class BackendUnavailable(DistlocksError):
    """The store of the locks cannot be reached, or cannot answer."""

    # Whether what was asked may have been done, although the answer never came.
    in_doubt = True


class NotSupported(DistlocksError):
    """The store of the locks cannot do what was asked."""


def _rebuild(
    cls: type[DistlocksError], args: tuple[Any, ...], state: dict[str, Any]
) -> DistlocksError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
