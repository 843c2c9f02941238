"""How a backend reaches its database: the dialect, and on which connection its work runs."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string

from ... import clock
from ...conf import InvalidSetting, Params, under_test_runner
from ...exceptions import BackendUnavailable
from ...waiting import busy_delays
from ..aliases import WrongAlias, params_of
from ..base import BaseBackend
from .channels import Channel, Session, error_code, unavailable
from .dialect import Dialect, Tables
from .sleepers import Sleepers

if TYPE_CHECKING:
    from ..redis import RedisBackend
    from ..redis.turns import Turns

T = TypeVar("T")

DIALECTS = ("auto", "portable")
# Errors after which the same statement, sent again, finds its way: a serialization failure and a
# deadlock, on PostgreSQL; a deadlock and a changed record, on MariaDB and MySQL.
TRY_AGAIN = ("40001", "40P01", 1213, 1020)
# How long a release tries to get hold of a row that other statements have in their hands.
ROW_BUSY_PATIENCE = 5.0


class ConnectedBackend(BaseBackend):
    """A backend whose verbs are pieces of work for a session with a database."""

    option_names: ClassVar[tuple[str, ...]] = ("using", "dialect", "listen", "wakeup")

    def __init__(self, alias: str, params: Params) -> None:
        super().__init__(alias, params)
        self.using: Any = self.options.get("using", "default")
        self._check_options()
        wakeup = self.options.get("wakeup")
        self._wakeup = None if wakeup is None else self._redis_backend(wakeup)
        # As many entries as there are verbs on our own connections.
        self._verbs_under_way: list[None] = []
        # Grants to be released before this thread's next verb.
        self._deferred = threading.local()

    def _check_options(self) -> None:
        where = f"DISTLOCKS[{self.alias!r}]['OPTIONS']"
        if not isinstance(self.using, str) or self.using not in connections.databases:
            raise InvalidSetting(
                11,
                f"{where}['using'] = {self.using!r} is not a database of DATABASES.",
                f"Configured are: {', '.join(map(repr, connections.databases))}.",
            )
        if self.options.get("dialect", "auto") not in DIALECTS:
            raise InvalidSetting(
                12,
                f"{where}['dialect'] = {self.options['dialect']!r} is not a dialect.",
                f"Known are {', '.join(map(repr, DIALECTS))}.",
            )
        if not isinstance(self.options.get("listen", True), bool):
            raise InvalidSetting(
                13,
                f"{where}['listen'] must be True or False, not {self.options['listen']!r}.",
                "False makes waiters poll.",
            )

    @property
    def sweep_scope(self) -> object:
        return "locks", self.using

    @cached_property
    def dialect(self) -> Dialect:
        """The dialect of the alias' database."""
        from django.apps import apps

        if not apps.is_installed("distlocks"):
            raise ImproperlyConfigured(
                "The database backend of distlocks needs its table: add 'distlocks' to "
                "INSTALLED_APPS and run 'manage.py migrate'."
            )
        wrapper = connections[self.using]
        names = ("distlocks_lock", "distlocks_lockholder", "distlocks_lockauthority")
        tables = Tables(*map(wrapper.ops.quote_name, names))
        if self.options.get("dialect") != "portable":
            if wrapper.vendor == "postgresql":
                from .postgresql import PostgreSQL

                return PostgreSQL(self.using, tables)
            if wrapper.vendor == "sqlite":
                from .sqlite import SUPPORTED, SQLite

                if SUPPORTED:
                    return SQLite(self.using, tables)
            if wrapper.vendor == "mysql":
                from .mariadb import MariaDB, is_supported

                if is_supported(wrapper):
                    return MariaDB(self.using, tables)
        from .portable import Portable

        return Portable(self.using, tables)

    @cached_property
    def _channel(self) -> Channel:
        return self.dialect.channel()

    @cached_property
    def _renewal_channel(self) -> Channel:
        # A 250 ms wait on somebody's row must not stall the renewals of everybody else.
        return self.dialect.channel()

    @cached_property
    def _sleepers(self) -> Sleepers:
        listen = self.options.get("listen", True)
        return Sleepers(self.dialect, self._run, self._channel, listen=listen, turns=self._turns())

    def _turns(self) -> Turns | None:
        if self._wakeup is None:
            return None
        from ..redis.turns import Turns

        return Turns(self._wakeup)

    def _redis_backend(self, alias: Any) -> RedisBackend:
        """The Redis backend of this alias of DISTLOCKS; InvalidSetting if it is none."""
        where = f"DISTLOCKS[{self.alias!r}]['OPTIONS']['wakeup'] = {alias!r}"
        try:
            from ..redis import RedisBackend
        except ImportError as error:
            raise InvalidSetting(
                22, f"{where} needs redis-py: {error}.", "Install distlocks[redis]."
            ) from error
        try:
            params = params_of(alias, RedisBackend)
        except WrongAlias as error:
            raise InvalidSetting(
                22,
                f"{where} {error}.",
                "Name the alias of a Redis backend: who waits is woken through its servers.",
            ) from error
        redis: RedisBackend = import_string(params.backend)(alias, params)
        return redis

    # Where a statement runs

    def _callers_connection(self) -> BaseDatabaseWrapper | None:
        """The caller's connection, if locks have to live in the caller's transaction."""
        wrapper = connections[self.using]
        if wrapper.in_atomic_block:
            if wrapper.vendor == "sqlite" or in_testcase(wrapper):
                return wrapper
        elif is_in_memory(wrapper):
            return wrapper
        return None

    def _run(self, work: Callable[[Session], T], *, renewal: bool = False) -> T:
        wrapper = self._callers_connection()
        try:
            if wrapper is not None:
                session = Session(wrapper, is_callers=True)
                self._release_deferred(session)
                return self._in_transaction(session, work)
            channel = self._renewal_channel if renewal else self._channel
            self._verbs_under_way.append(None)
            try:
                return self._persistently(channel, work)
            finally:
                self._verbs_under_way.pop()
                self._leave_test_database_alone()
        except (DatabaseError, InterfaceError) as error:
            raise unavailable(self.using, error) from error

    @staticmethod
    def _persistently(channel: Channel, work: Callable[[Session], T]) -> T:
        while True:
            try:
                return channel.run(work)
            except DatabaseError as error:
                if error_code(error) not in TRY_AGAIN:
                    raise

    def _in_transaction(self, session: Session, work: Callable[[Session], T]) -> T:
        try:
            return work(session)
        except DatabaseError as error:
            explanation = self.dialect.explain(error, in_transaction=session.in_callers_transaction)
            if not explanation:
                raise
            raise BackendUnavailable(
                f"The lock could not be taken inside the transaction on {self.using!r}: "
                f"{error}. {explanation}"
            ) from error

    def _leave_test_database_alone(self) -> None:
        """Under a test runner, keep no connection open that would stop it from dropping the
        database: a test may have forgotten a lease."""
        if under_test_runner() and not (self._verbs_under_way or self._sleepers):
            self.close()

    @abstractmethod
    def _release_deferred(self, session: Session) -> None:
        """Carry out what release_when_next_used() was asked for in this thread."""

    def _when_not_busy(self, verb: Callable[[], T]) -> T:
        """`verb()`, again while another statement has the row in its hands."""
        give_up = clock.lease_now() + ROW_BUSY_PATIENCE
        for delay in busy_delays():
            try:
                return verb()
            except BackendUnavailable as error:
                if not self.dialect.is_busy(error.__cause__) or clock.lease_now() > give_up:
                    raise
            time.sleep(delay)
        raise AssertionError("busy_delays() never ends")

    def do(self, work: Callable[[Session], T], *, persistently: bool = True) -> T:
        """A piece of work that has nothing to do with a lock; `persistently`, again while another
        writer is in its way. Raises BackendUnavailable.

        Over the connection for renewals: who asks for a lock does not wait behind it.
        """
        if not persistently:
            return self._run(work, renewal=True)
        return self._when_not_busy(lambda: self._run(work, renewal=True))

    def close(self) -> None:
        # Only what has been made: closing must not open anything.
        for name in ("_sleepers", "_channel", "_renewal_channel"):
            if name in self.__dict__:
                self.__dict__[name].close()


def is_in_memory(wrapper: Any) -> bool:
    """Whether the database is SQLite's and exists for this process alone."""
    return wrapper.vendor == "sqlite" and bool(wrapper.is_in_memory_db())


def in_testcase(wrapper: BaseDatabaseWrapper) -> bool:
    """Whether the connection is inside the transaction that a TestCase wraps around a test."""
    return any(getattr(block, "_from_testcase", False) for block in wrapper.atomic_blocks)
