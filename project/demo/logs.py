"""Reads the servers' logs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_events(logs: Iterable[Path]) -> list[dict[str, Any]]:
    """The job runner's events of all logs, in the order of their time.

    Other lines, such as gunicorn's own, are left out.
    """
    events = []
    for log in logs:
        for line in log.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and str(entry.get("event", "")).startswith("job."):
                events.append(entry)
    return sorted(events, key=lambda entry: str(entry["at"]))
