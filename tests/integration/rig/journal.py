"""What a process of the rig did, one JSON object a line, written before it goes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distlocks.clock import lease_now

Event = dict[str, Any]


class Journal:
    """One process' journal. What it has written survives a SIGKILL of the process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, event: str, **fields: Any) -> None:
        """Note an event, and when that was on the lease clock, which all processes here share."""
        line = json.dumps({"event": event, "at": lease_now(), **fields}, ensure_ascii=False)
        self._file.write(f"{line}\n".encode())

    def close(self) -> None:
        self._file.close()


def read(folder: Path) -> Iterator[Event]:
    """All events of all journals in a folder; `who` names the process."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as lines:
            for line in lines:
                # A process that was killed while writing leaves half a line.
                if line.endswith(b"\n"):
                    yield json.loads(line) | {"who": path.stem}
