"""What the OPTIONS of a fast path say: its two halves, and how soon the authority changes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from django.db import connections

from ...conf import Params
from ...keys import MAX_LENGTH
from ...waiting import DRIFT
from ..aliases import WrongAlias, params_of
from ..base import BaseBackend
from ..database import DatabaseBackend
from ..database.connected import is_in_memory
from ..given import GivenOptions
from ..redis import RedisBackend
from ..redis.settings import is_namespace
from .changes import Terms

if TYPE_CHECKING:
    from .backend import FastPathBackend

NAMES = ("redis", "database", "namespace", "mode_lease", "drift", "skew", "return_after")
# Seconds. A shorter mode lease than this is over before a busy process has read the next one.
LEAST_MODE_LEASE = 0.5
# Whose clock a statement can read: what is taken is told by it.
VENDORS = ("postgresql", "mysql", "sqlite")
# Seconds. Clocks are not compared more finely than that.
LEAST_SKEW = 0.1
# With a KEY_PREFIX it is the name of the authority's row.
LONGEST_NAMESPACE = MAX_LENGTH - 2

Half = TypeVar("Half", bound=BaseBackend)


class Settings(GivenOptions):
    """The OPTIONS of one alias, checked."""

    check = 23

    def __init__(self, backend: FastPathBackend) -> None:
        super().__init__(backend)
        self._params = backend.params
        self.terms = Terms(
            mode_lease=self.seconds("mode_lease", 5.0, LEAST_MODE_LEASE),
            max_ttl=self._params.max_ttl,
            drift=self.seconds("drift", DRIFT, DRIFT),
            skew=self.seconds("skew", 1.0, LEAST_SKEW),
            return_after=self.seconds("return_after", 30.0, 0.0),
        )
        redis = self._params_of("redis", RedisBackend)
        self.database = self._params_of("database", DatabaseBackend)
        # Locks of its own in Redis, one set for each set of names in the table: nobody else's are
        # cleared when it returns there.
        namespace = self.options.get(
            "namespace", f"{redis.options.get('namespace', 'distlocks')}.fast"
        )
        if not is_namespace(namespace) or len(namespace) > LONGEST_NAMESPACE:
            self.refuse(
                f"['namespace'] = {namespace!r} must be printable text without braces, of at most "
                f"{LONGEST_NAMESPACE} characters.",
                "Leave it out for the default.",
            )
        prefix = self._params.key_prefix
        # A namespace has no brace: no two fast paths have one row and different names in Redis.
        self.name = f"{namespace}{{{prefix}}}" if prefix else namespace
        if prefix:
            namespace += f".{hashlib.sha256(prefix.encode()).hexdigest()[:8]}"
        self.redis = replace(redis, options={**redis.options, "namespace": namespace})
        if self.redis.options.get("incarnation_guard", "on") != "on":
            self.refuse(
                f"['redis'] = {self.options['redis']!r} has no incarnation guard.",
                "The fast path relies on it: leave 'incarnation_guard' out of its OPTIONS.",
            )

    def check_database(self, database: DatabaseBackend) -> None:
        """InvalidSetting if nobody else sees what is in it, or its clock cannot be asked."""
        vendor = connections[database.using].vendor
        if vendor not in VENDORS:
            self.refuse(
                f"['database'] = {self.options['database']!r} is on {vendor}.",
                f"A fast path can have one of {', '.join(VENDORS)} behind Redis.",
            )
        if is_in_memory(connections[database.using]):
            self.refuse(
                f"['database'] = {self.options['database']!r} is a database in memory, which "
                f"neither other processes nor other threads see.",
                "Take a file; in tests, distlocks.testing.memory_locks takes the place of all "
                "backends.",
            )

    def half(self, kind: type[Half], name: str, params: Params) -> Half:
        """The backend of an alias, with the keys and the longest lease of the fast path."""
        return kind(self.options[name], params)

    def _params_of(self, name: str, kind: type[BaseBackend]) -> Params:
        alias = self.options.get(name)
        try:
            params = params_of(alias, kind)
        except WrongAlias as error:
            self.refuse(
                f"[{name!r}] = {alias!r} {error}.",
                f"Name the alias of a {kind.__name__}; only its settings are used.",
            )
        return replace(
            params,
            key_prefix=self._params.key_prefix,
            ttl=self._params.ttl,
            max_ttl=self._params.max_ttl,
        )
