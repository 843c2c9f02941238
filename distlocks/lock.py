"""db_lock: by hand, as context manager and as decorator, sync and async."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from .acquisition import Acquisition
from .conf import DEFAULT_ALIAS
from .eventloop import blocking
from .exceptions import LockTimeout
from .identity import current_task
from .keys import check_key
from .lease import Lease, OnLost
from .options import FROM_SETTINGS, FromSettings, OnHeld, Seconds, options_of
from .resolver import KeyOrCallable, KeyResolver, name_of

P = ParamSpec("P")
R = TypeVar("R")


class db_lock:
    """A lock on one or more keys: a context manager, a decorator, or by hand.

        with db_lock("order:42") as lease: ...
        async with db_lock("order:42", "stock:7"): ...
        with db_lock(("customer:7", "order:42")): ...
        with db_lock("report", shared=True): ...
        with db_lock("export", limit=3): ...

        @db_lock("invoice:{invoice_id}", on_held="skip")
        def send_invoice(invoice_id): ...

        lease = db_lock("order:42", timeout=0).acquire()

    The object holds the options, and no state of a call: threads and tasks may share it. A lease
    is not reentrant: whoever asks again for a key that it holds waits like everybody else.

    Keys are `str` of 1 to 200 characters. A tuple of them is a *tree key*: it excludes those above
    it as a whole ("customer:7") and is excluded by them, but not by its siblings. Several keys are
    had together or not at all. Used as a decorator, keys and their parts are format strings for
    the call's arguments ("invoice:{invoice_id}", "order:{self.pk}"), or a callable that gets the
    arguments and returns the key.

    Options; durations are seconds or `timedelta`:

    - `shared`: whether others with `shared=True` may hold the keys too. Who wants them exclusively
      keeps newcomers out while it waits, so that it is not starved.
    - `limit`: a permit: up to so many hold the keys at once, counted against each asker's own
      limit, from 1 to 10,000. Nobody else has a permit's key exclusively or shared meanwhile.
    - `ttl`: how long a lease lasts unless it is extended; from 1 s to the alias' MAX_TTL.
    - `timeout`: how long to wait; 0 makes one try, None waits for ever.
    - `renew`: whether a thread of distlocks extends the lease until it is released.
    - `max_hold`: the lease ends this long after the acquire, renewed or not.
    - `min_hold`: the keys stay taken for at least this long from the acquire, even if the body
      ends earlier, raises, rolls back, or its process dies.
    - `on_held` (decorator only): what a call does that does not get the lock: "raise" LockTimeout,
      "skip" (return None), or a callable that gets the LockTimeout and whose result is returned.
    - `on_lost`: called with the lease, from another thread, when it is found lost.
    - `until_commit`: inside a transaction, release only when the outermost one has ended.
    - `label`, `metadata`: shown to operators beside the holder; metadata is a dict of JSON values.
    - `backend`: an alias of DISTLOCKS.

    Raises TypeError and ValueError for a key or an option that is none, ImproperlyConfigured for
    wrong settings, LockTimeout, BackendUnavailable, and at the end of a block that went well,
    LeaseLost if the lease did not last; NotSupported if the backend has no such claims.
    """

    def __init__(
        self,
        *keys: KeyOrCallable,
        shared: bool = False,
        limit: int | None = None,
        ttl: Seconds | FromSettings = FROM_SETTINGS,
        timeout: Seconds | FromSettings | None = FROM_SETTINGS,
        renew: bool = True,
        max_hold: Seconds | None = None,
        min_hold: Seconds = 0,
        on_held: OnHeld = "raise",
        on_lost: OnLost | None = None,
        until_commit: bool = True,
        label: str = "",
        metadata: Mapping[str, Any] | None = None,
        backend: str = DEFAULT_ALIAS,
    ) -> None:
        if not keys:
            raise TypeError("db_lock() needs at least one key: name what it protects.")
        self._keys = keys
        # By position: most are the same as for other locks, and need no second look.
        self._options = options_of(
            shared,
            limit,
            ttl,
            timeout,
            renew,
            max_hold,
            min_hold,
            on_held,
            on_lost,
            until_commit,
            label,
            metadata,
            backend,
        )
        # Names of keys that are the same for every call; None if they depend on a decorated call.
        self._fixed: tuple[str, ...] | None = None
        if not any(map(callable, keys)):
            self._fixed = tuple({check_key(key): None for key in keys})
        # Leases of `with` blocks under way, by who entered. Not state of a call: it only tells
        # __exit__, which gets no hint of its __enter__, which lease is its own.
        self._entered: list[tuple[object, Lease]] = []
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        return f"db_lock({', '.join(map(repr, self._keys))}, backend={self._options.alias!r})"

    # By hand

    @blocking("Use 'await lock.aacquire()' or 'async with' on an event loop.")
    def acquire(self) -> Lease:
        """Wait for the lock and return its lease; LockTimeout if it cannot be had in time."""
        return Acquisition(self._fixed_keys(), self._options).run()

    @blocking("Use 'await lock.atry_acquire()' on an event loop.")
    def try_acquire(self) -> Lease | None:
        """Like acquire(), but None if it cannot be had in time."""
        try:
            return self.acquire()
        except LockTimeout:
            return None

    async def aacquire(self) -> Lease:
        """See acquire()."""
        return await Acquisition(self._fixed_keys(), self._options).arun()

    async def atry_acquire(self) -> Lease | None:
        """See try_acquire()."""
        try:
            return await self.aacquire()
        except LockTimeout:
            return None

    def _fixed_keys(self) -> tuple[str, ...]:
        if self._fixed is None:
            raise TypeError(
                f"{self!r} has a callable for a key, which only a decorated call can resolve: "
                f"give the key itself."
            )
        return self._fixed

    # As context manager

    def __enter__(self) -> Lease:
        self._refuse_on_held()
        lease = self.acquire()
        try:
            self._enter(threading.get_ident(), lease)
        except BaseException as error:
            lease.finish(error)
            raise
        return lease

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(threading.get_ident()).finish(error)

    async def __aenter__(self) -> Lease:
        self._refuse_on_held()
        lease = await self.aacquire()
        self._enter(current_task(), lease)
        return lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave(current_task()).afinish(error)

    def _refuse_on_held(self) -> None:
        if self._options.on_held != "raise":
            raise TypeError(
                "on_held is for decorated functions: a `with` block cannot be skipped. Catch "
                "LockTimeout, or use try_acquire()."
            )

    def _enter(self, who: object, lease: Lease) -> None:
        with self._mutex:
            self._entered.append((who, lease))

    def _leave(self, who: object) -> Lease:
        with self._mutex:
            for index in range(len(self._entered) - 1, -1, -1):
                if self._entered[index][0] == who:
                    return self._entered.pop(index)[1]
            # Left in another thread or task than it was entered in: a generator moved on.
            if len(self._entered) == 1:
                return self._entered.pop()[1]
        raise RuntimeError(
            f"{self!r} was left in another thread or task than it was entered in, and several "
            f"blocks are under way. To hand a lock over, use lease = lock.acquire() and "
            f"lease.release()."
        )

    # As decorator

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate `function`: each call runs under a lease of its own.

        Plain and `async def` functions and methods; generators are refused, since they would
        return, and release, before their body has run.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{name_of(function)}() is a generator: its body runs after the call has "
                f"returned. Use `with db_lock(…)` inside it."
            )
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"db_lock() decorates functions, not {function!r}.")
        keys_of = KeyResolver(self._keys, function)
        options = self._options

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def locked_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                acquisition = Acquisition(keys_of(args, kwargs), options, keys_of.patterns)
                try:
                    lease = await acquisition.arun()
                except LockTimeout as timeout:
                    return _when_held(options.on_held, timeout)
                try:
                    result = await function(*args, **kwargs)
                except BaseException as error:
                    await lease.afinish(error)
                    raise
                await lease.afinish(None)
                return result

            return cast("Callable[P, R]", locked_async)

        @functools.wraps(function)
        def locked(*args: P.args, **kwargs: P.kwargs) -> R:
            _check_not_async()
            acquisition = Acquisition(keys_of(args, kwargs), options, keys_of.patterns)
            try:
                lease = acquisition.run()
            except LockTimeout as timeout:
                return cast("R", _when_held(options.on_held, timeout))
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                lease.finish(error)
                raise
            lease.finish(None)
            return result

        return locked


def _when_held(on_held: OnHeld, timeout: LockTimeout) -> Any:
    if on_held == "raise":
        raise timeout
    if on_held == "skip":
        return None
    return on_held(timeout)


@blocking("A function decorated with db_lock() blocks: make it `async def` on an event loop.")
def _check_not_async() -> None:
    """Raise SynchronousOnlyOperation on a running event loop."""
