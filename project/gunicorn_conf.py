"""How gunicorn runs one server process of the demo. `project.servers` adds where it listens."""

from __future__ import annotations

import os
import signal
import threading
from typing import Protocol

# One process with many threads: each running job keeps one thread busy while it lasts.
workers = 1
worker_class = "gthread"
threads = 32
# On a stop, running jobs get this long to end; what is cut off comes free with its lease.
graceful_timeout = 3
loglevel = "warning"
control_socket_disable = True


class Worker(Protocol):
    """What we need of gunicorn's worker: the process id of its master."""

    ppid: int


def post_worker_init(worker: Worker) -> None:
    """Stop when whoever started the server is gone, even if it was killed without warning.

    The starter holds the other end of our standard input and never writes to it.
    """
    if not os.environ.get("DEMO_LIFELINE"):
        return

    def watch() -> None:
        # Not through sys.stdin: its lock, held by this thread, would abort the exit.
        while os.read(0, 1):
            pass
        if os.getppid() == worker.ppid:
            os.kill(worker.ppid, signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
