"""Python processes that a test starts beside itself: rivals, holders, victims."""

import contextlib
import inspect
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from tests.servers import processes
from tests.servers.watchdog import ROOT, watchdog


class ChildFailed(AssertionError):
    """A child ended with an error, or not in time."""


class Child:
    """One child. It runs a function, or a script's text, in the test's Django settings."""

    def __init__(
        self,
        folder: Path,
        target: str,
        args: list[Any],
        kwargs: dict[str, Any],
        env: dict[str, str],
    ) -> None:
        self.target = target
        self._call_path = folder / "call.json"
        self._result_path = folder / "result.json"
        self._errors_path = folder / "stderr"
        self._call_path.write_text(json.dumps({"target": target, "args": args, "kwargs": kwargs}))
        with self._errors_path.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.servers.children", str(folder)],
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "DISTLOCKS_TEST_HISTORY": "off"} | env,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        watchdog.process_started(self.pid, signal.SIGKILL)
        self.expected_to_fail = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"child {self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        return self._errors_path.read_text(errors="replace")

    def errors_about(self, key: str) -> str:
        """What it has written to stderr, without what it found there that others' tests had left
        behind: keys of other names whose leases had expired."""
        lines = self.errors.splitlines(keepends=True)
        found = "A lease was never released, and expired"
        return "".join([line for line in lines if key in line or not line.startswith(found)])

    def readline(self, timeout: float = 20) -> str:
        """The next line that it prints."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise self._failure(f"printed nothing for {timeout} s") from None
        if line is None:
            self._lines.put(None)
            self._process.wait(10)
            raise self._failure("ended and printed no more")
        return line

    def expect(self, line: str, timeout: float = 20) -> None:
        """Wait until it prints exactly this line; anything before it is passed over."""
        deadline = time.monotonic() + timeout
        while self.readline(max(0.001, deadline - time.monotonic())) != line:
            pass

    def send(self, line: str = "") -> None:
        """Give it a line to `input()`."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def wait(self, timeout: float = 30) -> int:
        """Its exit code, whatever it is."""
        self.expected_to_fail = True
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._failure(f"did not end within {timeout} s") from None

    def result(self, timeout: float = 30) -> Any:
        """What the function returned, or the script left in `result`."""
        if self.wait(timeout) != 0:
            raise self._failure("failed")
        return json.loads(self._result_path.read_text())

    def kill(self) -> None:
        """kill -9."""
        self.expected_to_fail = True
        processes.kill(self.pid)
        self._process.wait(10)

    def pause(self) -> None:
        processes.freeze(self.pid)

    def resume(self) -> None:
        processes.thaw(self.pid)

    def close(self) -> None:
        """End it, and raise if it had failed without the test's asking."""
        failed = self._process.poll() not in (None, 0) and not self.expected_to_fail
        if self.running:
            self.kill()
        watchdog.process_ended(self.pid)
        self._reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            _close(pipe)
        if failed:
            raise self._failure("failed unnoticed")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _failure(self, what: str) -> ChildFailed:
        code = self._process.poll()
        return ChildFailed(
            f"child {self.pid} ({self.target.strip()[:200]}) {what}; exit code {code}, stderr:\n"
            f"{self.errors[-4000:]}"
        )


class Spawner:
    """The `spawn` fixture: `spawn(function, *args, **kwargs)` or `spawn("print(args)", *args)`.

    Arguments and the result travel as JSON. A function is one that the child can import, or its
    name as "package.module:function"; a script finds `args` and the keyword arguments as its
    globals. `env` adds to the child's environment.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[Child] = []

    def __call__(
        self,
        target: str | Callable[..., Any],
        *args: Any,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Child:
        if callable(target):
            target = f"{target.__module__}:{target.__qualname__}"
        folder = self._folder / f"child-{len(self._children)}"
        folder.mkdir()
        child = Child(folder, inspect.cleandoc(target), list(args), kwargs, env or {})
        self._children.append(child)
        return child

    def close(self) -> None:
        failures = []
        for child in self._children:
            try:
                child.close()
            except ChildFailed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def main(folder: Path) -> None:
    """The child's side."""
    call = json.loads(folder.joinpath("call.json").read_text())

    import django
    from django.db import connections

    django.setup()
    if re.fullmatch(r"[\w.]+:[\w.]+", call["target"]):
        module, _, path = call["target"].partition(":")
        function: Any = import_module(module)
        for name in path.split("."):
            function = getattr(function, name)
        result = function(*call["args"], **call["kwargs"])
    else:
        scope = {"__name__": "__child__", "args": call["args"], **call["kwargs"]}
        exec(compile(call["target"], "<child>", "exec"), scope)
        result = scope.get("result")
    connections.close_all()
    folder.joinpath("result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
