"""Which of the other aliases of DISTLOCKS a backend may build upon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.module_loading import import_string

from ..conf import Params, aliases
from ..conf import params as conf_params
from .base import BaseBackend


class WrongAlias(Exception):
    """What the alias names is not of the kind that was wanted: why, as the end of a sentence that
    begins with the alias."""


def params_of(alias: Any, kind: type[BaseBackend]) -> Params:
    """The parameters of an alias whose BACKEND is `kind` or a subclass of it.

    Raises WrongAlias, and InvalidSetting if the alias' own entry is wrong.
    """
    if not isinstance(alias, str) or not isinstance(aliases().get(alias), Mapping):
        raise WrongAlias("is no alias of DISTLOCKS")
    params = conf_params(alias)
    try:
        found = import_string(params.backend)
    except ImportError as error:
        raise WrongAlias(f"cannot be used: {str(error).rstrip('.')}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise WrongAlias(f"is a {params.backend}, and no {kind.__name__}")
    return params
