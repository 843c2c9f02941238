"""How the OPTIONS of a backend are read, and what is wrong with them said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..conf import InvalidSetting, seconds

if TYPE_CHECKING:
    from .base import BaseBackend


class GivenOptions:
    """The OPTIONS of one alias. Raises InvalidSetting for the first that is wrong."""

    # The number of the system check that reports a wrong one.
    check: ClassVar[int]

    def __init__(self, backend: BaseBackend) -> None:
        self.options = backend.options
        self.where = f"DISTLOCKS[{backend.alias!r}]['OPTIONS']"

    def seconds(self, name: str, default: float, least: float = 0.0) -> float:
        """A duration, or another number, that is not less than `least`."""
        try:
            value = seconds(self.options.get(name, default), f"{self.where}[{name!r}]")
        except (TypeError, ValueError) as error:
            hint = "Give seconds or a timedelta, or leave it out for the default."
            raise InvalidSetting(self.check, str(error), hint) from error
        if value < least:
            self.refuse(
                f"[{name!r}] = {value:g} is less than {least:g}.", "Leave it out for the default."
            )
        return value

    def arguments(self, client: str) -> dict[str, Any]:
        """The option 'connection': what is given to the client as it is."""
        connection = self.options.get("connection", {})
        if not isinstance(connection, Mapping):
            self.refuse("['connection'] must be a dict.", f"It holds arguments for {client}.")
        return dict(connection)

    def refuse(self, problem: str, hint: str) -> NoReturn:
        """Raise InvalidSetting; `problem` begins with ["the option"], or is of them all."""
        separator = "" if problem.startswith("[") else " "
        raise InvalidSetting(self.check, f"{self.where}{separator}{problem}", hint)
