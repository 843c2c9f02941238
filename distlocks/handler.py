"""Which backend an alias stands for, in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from . import conf
from .backends.base import BaseBackend


class LockHandler:
    """The backends of DISTLOCKS by alias: `locks["default"]`.

    Backends are built when first used, one per process (sessions and pools are shared by its
    threads), anew after a fork and after DISTLOCKS changed. An alias that is not configured, or
    wrongly, raises ImproperlyConfigured.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._backends: dict[str, BaseBackend] = {}
        # Backends of the process that forked us. Finalising them would speak on its sockets.
        self._inherited: list[BaseBackend] = []
        # Called with each backend that this process is done with.
        self._when_closed: list[Callable[[BaseBackend], None]] = []

    def __getitem__(self, alias: str) -> BaseBackend:
        backend = self._backends.get(alias)
        if backend is None:
            with self._mutex:
                backend = self._backends.get(alias)
                if backend is None:
                    backend = self._backends[alias] = build(alias)
        return backend

    def __iter__(self) -> Iterator[str]:
        return iter(conf.aliases())

    def all(self, *, initialized_only: bool = False) -> list[BaseBackend]:
        """Every configured backend, or only those that have been used in this process."""
        if initialized_only:
            return list(self._backends.values())
        return [self[alias] for alias in self]

    def close_all(self) -> None:
        """Close what the backends of this process have open; they are rebuilt when next used."""
        with self._mutex:
            backends, self._backends = list(self._backends.values()), {}
        for backend in backends:
            backend.close()
            for forget in self._when_closed:
                forget(backend)

    def _after_fork(self) -> None:
        self._mutex = threading.Lock()
        self._inherited.extend(self._backends.values())
        self._backends = {}


def build(alias: str) -> BaseBackend:
    """A new backend for `alias`; ImproperlyConfigured if its settings are wrong."""
    params = conf.params(alias)
    return backend_class(alias, params.backend)(alias, params)


def backend_class(alias: str, path: str) -> type[BaseBackend]:
    """The class that `path` names; InvalidSetting if it cannot be imported or is none."""
    try:
        found = import_string(path)
    except (ImportError, ValueError) as error:
        raise conf.InvalidSetting(
            4,
            f"DISTLOCKS[{alias!r}]['BACKEND'] = {path!r} cannot be imported: {error}.",
            "Check the path, and that the extra that the backend needs is installed.",
        ) from error
    if not (isinstance(found, type) and issubclass(found, BaseBackend)):
        raise conf.InvalidSetting(
            4,
            f"DISTLOCKS[{alias!r}]['BACKEND'] = {path!r} is not a lock backend.",
            "Name a subclass of distlocks.backends.base.BaseBackend.",
        )
    return found


locks = LockHandler()


def _on_setting_changed(*, setting: str, **kwargs: Any) -> None:
    if setting in ("DISTLOCKS", "DATABASES"):
        locks.close_all()


setting_changed.connect(_on_setting_changed, dispatch_uid="distlocks.handler")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=locks._after_fork)
