"""`python -m project.lifeline FOLDER COMMAND…` runs a command that cannot end by itself.

The command runs in the folder until our standard input ends, which its starter holds and never
writes to: so it ends with the starter, even if that is killed. Then the folder is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading

STOP_SECONDS = 5.0


def main() -> int:
    folder, *command = sys.argv[1:]
    try:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        threading.Thread(target=_watch, args=[process], name="lifeline", daemon=True).start()
        return process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes]) -> None:
    # Not through sys.stdin: its lock, held by this thread, would abort the exit.
    while os.read(0, 1):
        pass
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main())
