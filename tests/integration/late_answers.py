"""Lets leases be counted from the wrong moment, for the tests that show why it is the right one."""

from __future__ import annotations

from typing import Any

import pytest

from distlocks import Lease, acquisition
from distlocks.clock import lease_now


def count_leases_from(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From "the first send", as it is, or from "the reply"."""
    if moment == "the reply":

        def counted_late(*args: Any, first_send: float, **options: Any) -> Lease:
            return Lease(*args, first_send=lease_now(), **options)

        monkeypatch.setattr(acquisition, "Lease", counted_late)
