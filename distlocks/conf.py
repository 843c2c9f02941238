"""What the DISTLOCKS setting says, read when it is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS

from .keys import MAX_PREFIX_LENGTH, check_characters

DEFAULT_ALIAS = "default"
DEFAULT_BACKEND = "distlocks.backends.database.DatabaseBackend"
DEFAULT_TTL = 30.0
DEFAULT_TIMEOUT = 10.0
# Below this a lease is shorter than an ordinary pause of the process that holds it.
MIN_TTL = 1.0
# A year: whoever wants a lease to last longer wants a row of their own in a table.
LONGEST_TTL = 366 * 86400.0

DEFAULT_HISTORY_DAYS = 30

PARAMETERS = (
    "BACKEND",
    "TTL",
    "MAX_TTL",
    "TIMEOUT",
    "KEY_PREFIX",
    "GUARD_DATABASES",
    "HISTORY_DAYS",
    "HISTORY_DATABASE",
    "OPTIONS",
)


class InvalidSetting(ImproperlyConfigured):
    """One wrong entry of DISTLOCKS, with the id of the system check that reports it."""

    def __init__(self, number: int, message: str, hint: str) -> None:
        super().__init__(f"{message} {hint}")
        self._number = number
        self.check_id = f"distlocks.E{number:03d}"
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._number, self.message, self.hint)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Params:
    """One alias of DISTLOCKS, checked, with defaults filled in. Durations are seconds."""

    backend: str = DEFAULT_BACKEND
    ttl: float = DEFAULT_TTL
    max_ttl: float = DEFAULT_TTL
    # None: wait for ever.
    timeout: float | None = DEFAULT_TIMEOUT
    key_prefix: str = ""
    # Where guarded data may live: a force-release raises the guards there.
    guard_databases: tuple[str, ...] = (DEFAULT_DB_ALIAS,)
    # For how long it is kept what happened to locks, and in which database; 0: not at all.
    history_days: float = 0
    history_database: str = DEFAULT_DB_ALIAS
    options: Mapping[str, Any]


def seconds(value: object, name: str) -> float:
    """`value` as seconds: an int, a float or a timedelta, finite; else TypeError or ValueError."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{name} must be a number of seconds or a timedelta, not {type(value).__name__} "
            f"({value!r})."
        )
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"{name} must be finite, not {value!r}.")
    return float(value)


def aliases() -> Mapping[str, object]:
    """The entries of DISTLOCKS by alias; the database backend alone when it is not set."""
    entries = getattr(settings, "DISTLOCKS", None)
    if entries is None:
        return {DEFAULT_ALIAS: {}}
    if not isinstance(entries, Mapping):
        raise InvalidSetting(
            1,
            f"DISTLOCKS must be a dict of aliases, not {type(entries).__name__}.",
            "Write it like CACHES: {'default': {'BACKEND': '…', 'OPTIONS': {…}}}.",
        )
    return entries


def params(alias: str) -> Params:
    """The parameters of `alias`; InvalidSetting (an ImproperlyConfigured) for the first fault."""
    entries = aliases()
    if alias not in entries:
        raise InvalidSetting(
            2,
            f"There is no lock backend {alias!r} in DISTLOCKS.",
            f"Configured are: {', '.join(map(repr, entries)) or 'none'}.",
        )
    checked = _Checked(alias, entries[alias])
    faults = list(checked.faults())
    if faults:
        raise faults[0]
    return checked.params()


def faults() -> Iterator[InvalidSetting]:
    """Everything that is wrong with DISTLOCKS, apart from the backends' own OPTIONS."""
    try:
        entries = aliases()
    except InvalidSetting as fault:
        yield fault
        return
    if DEFAULT_ALIAS not in entries:
        yield InvalidSetting(
            2,
            "DISTLOCKS has no 'default' alias.",
            "db_lock() uses it wherever no backend is named: add it.",
        )
    for alias, entry in entries.items():
        yield from _Checked(alias, entry).faults()


def under_test_runner() -> bool:
    """Whether Django's test environment has been set up in this process."""
    mail: Any = sys.modules.get("django.core.mail")
    return hasattr(mail, "outbox")


def _default_guard_databases() -> tuple[str, ...]:
    # A project without databases may keep its locks in memory.
    return (DEFAULT_DB_ALIAS,) if DEFAULT_DB_ALIAS in settings.DATABASES else ()


def _default_history_days() -> float:
    return DEFAULT_HISTORY_DAYS if DEFAULT_DB_ALIAS in settings.DATABASES else 0


class _Checked:
    """One entry of DISTLOCKS under inspection."""

    def __init__(self, alias: object, entry: object) -> None:
        self.alias = alias
        self.entry: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
        self.is_mapping = isinstance(entry, Mapping)
        self.where = f"DISTLOCKS[{alias!r}]"

    def params(self) -> Params:
        ttl = seconds(self.entry.get("TTL", DEFAULT_TTL), "TTL")
        timeout = self.entry.get("TIMEOUT", DEFAULT_TIMEOUT)
        return Params(
            backend=self.entry.get("BACKEND", DEFAULT_BACKEND),
            ttl=ttl,
            max_ttl=seconds(self.entry.get("MAX_TTL", ttl), "MAX_TTL"),
            timeout=None if timeout is None else seconds(timeout, "TIMEOUT"),
            key_prefix=self.entry.get("KEY_PREFIX", ""),
            guard_databases=tuple(self.entry.get("GUARD_DATABASES", _default_guard_databases())),
            history_days=self.entry.get("HISTORY_DAYS", _default_history_days()),
            history_database=self.entry.get("HISTORY_DATABASE", DEFAULT_DB_ALIAS),
            options=self.entry.get("OPTIONS", {}),
        )

    def faults(self) -> Iterator[InvalidSetting]:
        if not isinstance(self.alias, str) or not self.alias:
            yield InvalidSetting(
                1,
                f"The alias {self.alias!r} in DISTLOCKS is not a name.",
                "Use a non-empty str.",
            )
        if not self.is_mapping:
            yield InvalidSetting(
                1, f"{self.where} must be a dict.", "Give it a 'BACKEND' and, if needed, 'OPTIONS'."
            )
            return
        for name in self.entry:
            if name not in PARAMETERS:
                yield InvalidSetting(
                    3,
                    f"{self.where} has an unknown parameter {name!r}.",
                    f"Known are {', '.join(PARAMETERS)}; what only one backend knows goes into "
                    f"OPTIONS.",
                )
        yield from self._backend()
        yield from self._ttl()
        yield from self._timeout()
        yield from self._key_prefix()
        yield from self._guard_databases()
        yield from self._history()
        if not isinstance(self.entry.get("OPTIONS", {}), Mapping):
            yield InvalidSetting(
                9,
                f"{self.where}['OPTIONS'] must be a dict.",
                "Give the backend's options by name.",
            )

    def _backend(self) -> Iterator[InvalidSetting]:
        backend = self.entry.get("BACKEND", DEFAULT_BACKEND)
        if not isinstance(backend, str) or "." not in backend:
            yield InvalidSetting(
                4,
                f"{self.where}['BACKEND'] must be the dotted path of a backend class, not "
                f"{backend!r}.",
                f"For instance {DEFAULT_BACKEND!r}.",
            )

    def _ttl(self) -> Iterator[InvalidSetting]:
        values: dict[str, float] = {}
        for number, name in ((5, "TTL"), (6, "MAX_TTL")):
            if name not in self.entry:
                continue
            try:
                value = seconds(self.entry[name], f"{self.where}[{name!r}]")
            except (TypeError, ValueError) as error:
                yield InvalidSetting(number, str(error), "Give seconds or a timedelta.")
                return
            if not MIN_TTL <= value <= LONGEST_TTL:
                yield InvalidSetting(
                    number,
                    f"{self.where}[{name!r}] is {value:g} s.",
                    f"A lease lasts from {MIN_TTL:g} to {LONGEST_TTL:g} seconds.",
                )
                return
            values[name] = value
        ttl = values.get("TTL", DEFAULT_TTL)
        if ttl > values.get("MAX_TTL", ttl):
            yield InvalidSetting(
                6,
                f"{self.where}['TTL'] ({ttl:g} s) is longer than its MAX_TTL "
                f"({values['MAX_TTL']:g} s).",
                "MAX_TTL bounds every lease of the alias: raise it, or lower TTL.",
            )

    def _timeout(self) -> Iterator[InvalidSetting]:
        timeout = self.entry.get("TIMEOUT", DEFAULT_TIMEOUT)
        if timeout is None:
            return
        try:
            value = seconds(timeout, f"{self.where}['TIMEOUT']")
        except (TypeError, ValueError) as error:
            yield InvalidSetting(7, str(error), "Give seconds, a timedelta, or None (for ever).")
            return
        if value < 0:
            yield InvalidSetting(
                7,
                f"{self.where}['TIMEOUT'] is {value:g} s.",
                "0 makes one try, None waits for ever.",
            )

    def _guard_databases(self) -> Iterator[InvalidSetting]:
        guarded = self.entry.get("GUARD_DATABASES", ())
        where = f"{self.where}['GUARD_DATABASES']"
        if isinstance(guarded, str) or not isinstance(guarded, Sequence):
            yield InvalidSetting(
                17, f"{where} must be a list of database aliases, not {guarded!r}.", "[] for none."
            )
            return
        for alias in guarded:
            if not isinstance(alias, str) or alias not in settings.DATABASES:
                yield InvalidSetting(
                    17,
                    f"{where} names {alias!r}, which is not in DATABASES.",
                    "Name the databases whose data is written under lease.atomic().",
                )

    def _history(self) -> Iterator[InvalidSetting]:
        days = self.entry.get("HISTORY_DAYS", 0)
        if isinstance(days, bool) or not isinstance(days, int | float) or not 0 <= days <= 36600:
            yield InvalidSetting(
                60,
                f"{self.where}['HISTORY_DAYS'] must be a number of days, not {days!r}.",
                "For how long it is kept what happened to locks; 0 keeps nothing.",
            )
        database = self.entry.get("HISTORY_DATABASE", DEFAULT_DB_ALIAS)
        is_default = "HISTORY_DATABASE" not in self.entry and not days
        if not is_default and (not isinstance(database, str) or database not in settings.DATABASES):
            yield InvalidSetting(
                60,
                f"{self.where}['HISTORY_DATABASE'] names {database!r}, which is not in DATABASES.",
                "Name the database for the history of locks, or set HISTORY_DAYS to 0.",
            )

    def _key_prefix(self) -> Iterator[InvalidSetting]:
        prefix = self.entry.get("KEY_PREFIX", "")
        where = f"{self.where}['KEY_PREFIX']"
        if not isinstance(prefix, str):
            yield InvalidSetting(
                8, f"{where} must be a str, not {prefix!r}.", "For instance 'app:'."
            )
            return
        if len(prefix) > MAX_PREFIX_LENGTH:
            yield InvalidSetting(
                8,
                f"{where} has {len(prefix)} characters.",
                f"At most {MAX_PREFIX_LENGTH} are allowed.",
            )
        try:
            check_characters(prefix, f"prefix {where}")
        except ValueError as error:
            yield InvalidSetting(8, str(error), "Use printable characters.")
